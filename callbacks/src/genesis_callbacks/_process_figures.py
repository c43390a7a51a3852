"""The kernel's counts for this process and those that it has started: memory, page faults, bytes of disks.

Every reader returns None where the system has no such figure.
"""

import os
import resource
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_MAXRSS_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024
_FIND_CHILDREN_SECONDS: Final = 10.0


def read_resident_bytes() -> int | None:
    """Returns the resident memory of this process."""
    try:
        pages = int((_PROC / "self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()


def read_peak_resident_bytes() -> int:
    """Returns the most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


def read_major_faults() -> int:
    """Returns how many pages this process has waited for a disk to read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class DiskBytes(NamedTuple):
    """Bytes that reached or left disks, since a process began."""

    read: int
    write: int


class DiskMeter:
    """Measures the disk throughput of this process and the processes that its main thread has started.

    Bytes that the page cache serves, and file systems that count nothing (many network file systems), are not seen.
    """

    def __init__(self) -> None:
        self._children: list[str] = []
        self._found_seconds = -_FIND_CHILDREN_SECONDS
        self._before: dict[str, DiskBytes] = {}
        self._before_seconds = time.monotonic()
        self._before = self._read()

    def take(self) -> tuple[float, float] | None:
        """Returns bytes read and written per second since the last call; None where the kernel does not count."""
        now, now_seconds = self._read(), time.monotonic()
        seconds = now_seconds - self._before_seconds
        before, self._before, self._before_seconds = self._before, now, now_seconds
        if not now or seconds <= 0:
            return None
        zero = DiskBytes(0, 0)
        deltas = [(after, before.get(process, zero)) for process, after in now.items()]
        # A process number may be used again: then the counts begin again, too.
        read = sum(after.read - first.read if after.read >= first.read else after.read for after, first in deltas)
        write = sum(after.write - first.write if after.write >= first.write else after.write for after, first in deltas)
        return read / seconds, write / seconds

    def _read(self) -> dict[str, DiskBytes]:
        counts = {process: read_disk_bytes(process) for process in ("self", *self._find_children())}
        return {process: count for process, count in counts.items() if count is not None}

    def _find_children(self) -> list[str]:
        if time.monotonic() - self._found_seconds >= _FIND_CHILDREN_SECONDS:
            self._found_seconds = time.monotonic()
            try:
                self._children = (_PROC / f"self/task/{os.getpid()}/children").read_text("ascii").split()
            except OSError:
                self._children = []
        return self._children


def read_disk_bytes(process: str) -> DiskBytes | None:
    """Returns the counts of a process; None if it is gone, belongs to another user, or is not counted."""
    try:
        lines = (_PROC / process / "io").read_text("ascii").splitlines()
        counts = dict(line.split(": ", 1) for line in lines)
        return DiskBytes(int(counts["read_bytes"]), int(counts["write_bytes"]))
    except (OSError, ValueError, KeyError):
        return None
