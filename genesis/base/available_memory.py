"""Measures the memory that is available to this process, and gives back what it has freed."""

import contextlib
import ctypes
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Returns the number of bytes that this process can use without swapping, also in a container; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    limit = _read_container_limit()
    return available if limit is None else min(available, limit)


def give_back_memory() -> None:
    """Gives the memory that this process has freed back to the system; without glibc it has no effect.

    The allocator keeps what was freed between other objects: a hundred megabytes after some large texts.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _read_container_limit() -> int | None:
    """Returns the bytes below the container's limit, plus droppable caches; None without a limit or a known layout."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(0, int(limit) - int(used["anon"]))
    except (OSError, KeyError, ValueError):
        return None
