"""Reads a run's events: all of them at once, or as they arrive. Imports no torch; safe beside a run that writes.

    read_events(Path("runs/a"))              what happened so far, all ranks and commands merged by time
    EventFollower(Path("runs/a")).poll()     what has happened since the last call

A torn last line is not an event, whether a kill tore it or its writer is about to finish it. Files may come from any
source: everything but regular files is skipped, and so are lines that hold no event. Memory and time are bounded.
"""

import heapq
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .errors import UserError
from .events import MAX_LINE_BYTES, Event, decode_event
from .run_directory import RunDirectory
from .untrusted import RefusedFileError, open_descriptor

__all__ = ["EventFollower", "read_events"]

MAX_READ_BYTES: Final = 16 << 20
"""Of all files together, by one call: where there is more, the oldest events of each file are left out."""
MAX_FILES: Final = 1 << 14

_FILE_NAME: Final = re.compile(r"rank-\d{1,7}\.jsonl|commands\.jsonl|supervisor\.jsonl")


def read_events(run_dir: Path | str) -> list[Event]:
    """Returns the events of a run, merged by time; an empty list if there are none.

    Events of one file keep their order, whatever the clock did. Any process may call it; it does not communicate.

    Args:
        run_dir: The run's directory.

    Raises:
        UserError: A file of events cannot be read.
    """
    follower = EventFollower(run_dir)
    follower.skip_all_but(MAX_READ_BYTES)
    return follower.poll()


def share_budget(sizes: Sequence[int], total: int) -> list[int]:
    """Returns how much of each file is read: the small ones whole, the large ones as much as the others leave. Pure.

    Example:
        >>> share_budget([500, 10, 90, 500], 300)
        [100, 10, 90, 100]
    """
    shares = [0] * len(sizes)
    left = total
    for done, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[index] = min(sizes[index], left // (len(sizes) - done))
        left -= shares[index]
    return shares


class EventFollower:
    """Returns the events of a run as they arrive.

    Args:
        run_dir: The run's directory; it need not exist yet.
        is_from_now: Whether the events that are there already are left out.

    Example:
        >>> EventFollower(Path("no/such/run")).poll()
        []
    """

    def __init__(self, run_dir: Path | str, *, is_from_now: bool = False) -> None:
        self._run_dir = Path(run_dir)
        self._positions: dict[Path, _Position] = {}
        if is_from_now:
            self.skip_all_but(0)

    def skip_all_but(self, max_bytes: int) -> None:
        """Leaves out what is there already, but for the newest events of each file, of a limited size together."""
        found = {path: stat for path in _list_files(self._run_dir) if (stat := _look_at(path)) is not None}
        shares = share_budget([stat.st_size for stat in found.values()], max_bytes)
        for (path, stat), share in zip(found.items(), shares, strict=True):
            # Where this cuts a line, its end is no event.
            self._positions[path] = _Position(stat.st_ino, stat.st_size - share)

    def poll(self) -> list[Event]:
        """Returns the events since the last call, merged by time. It never waits.

        Raises:
            UserError: A file of events cannot be read.
        """
        paths = _list_files(self._run_dir)
        new_bytes = [self._count_new(path) for path in paths]
        shares = share_budget(new_bytes, MAX_READ_BYTES)  # the rest comes with the next call
        return _merge(
            [_decode_lines(self._read_new(path, share)) for path, share in zip(paths, shares, strict=True) if share]
        )

    def _count_new(self, path: Path) -> int:
        found = _look_at(path)
        return 0 if found is None else found.st_size - self._find_start(path, found)

    def _find_start(self, path: Path, found: os.stat_result) -> int:
        before = self._positions.get(path)
        # Another inode is another file, and a shorter file was cut: all of its content is new.
        return before.offset if before is not None and before.is_in(found) else 0

    def _read_new(self, path: Path, max_bytes: int) -> bytes:
        descriptor = _open_regular(path)
        if descriptor is None:
            return b""
        try:
            found = os.fstat(descriptor)
            start = self._find_start(path, found)
            data = os.pread(descriptor, max_bytes, start)
        finally:
            os.close(descriptor)
        # The position stays before an unfinished line, so that the next poll reads it whole.
        num_whole = data.rfind(b"\n") + 1
        if num_whole == 0 and len(data) > MAX_LINE_BYTES:
            num_whole = len(data)  # no line of this package is as long: skip it instead of reading it for ever
        self._positions[path] = _Position(found.st_ino, start + num_whole)
        return data[:num_whole]


class _Position(NamedTuple):
    inode: int
    offset: int

    def is_in(self, found: os.stat_result) -> bool:
        return found.st_ino == self.inode and found.st_size >= self.offset


def _list_files(run_dir: Path) -> list[Path]:
    try:
        with os.scandir(RunDirectory(run_dir).events) as entries:
            names = sorted(entry.name for entry in entries if _FILE_NAME.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{RunDirectory(run_dir).events} cannot be read: {error.strerror}") from error
    return [RunDirectory(run_dir).events / name for name in names[:MAX_FILES]]


def _open_regular(path: Path) -> int | None:
    """Returns a descriptor for reading; None where there is no regular file (any more)."""
    try:
        return open_descriptor(path)
    except (FileNotFoundError, RefusedFileError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _look_at(path: Path) -> os.stat_result | None:
    """Returns a file's status; None for one that is gone."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}; make it readable, or remove it")


def _decode_lines(data: bytes) -> list[Event]:
    decoded = (decode_event(line) for line in data.split(b"\n") if line)
    return [event for event in decoded if event is not None]


def _merge(files: Iterable[list[Event]]) -> list[Event]:
    keyed = heapq.merge(*(_keyed(number, events) for number, events in enumerate(files)))
    return [event for _, _, _, event in keyed]


def _keyed(number: int, events: Iterable[Event]) -> Iterator[tuple[float, int, int, Event]]:
    """Yields each event after its key: its time, or that of an earlier one of the file if a clock went back."""
    latest = -float("inf")
    for place, event in enumerate(events):
        latest = max(latest, event.time_seconds)
        yield latest, number, place, event
