"""Finds the checkpoints that appear on the disk, for `CheckpointVerification`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .checkpoint.contents import find_format
from .checkpoint.manifest import is_staging_name

Holding = Literal["all", "weights"]
Fingerprint = tuple[tuple[str, int, int, int], ...]

PATIENCE_SECONDS = 60.0
"""How long a checkpoint that was announced may take to appear, and one that grows to end at the fit's end."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to be looked at, and what it is meant to hold; None goes by its format."""

    path: Path
    holding: Holding | None


Found = tuple[SavedCheckpoint, str | None]
"""A checkpoint, and what is wrong with it already."""


def take_fingerprint(path: Path) -> Fingerprint | None:
    """Returns what changes when a file, or one in a directory, is written; None where nothing is to be seen."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return None
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _looks_like_checkpoint(path: Path) -> bool:
    try:
        return find_format(path) is not None
    except OSError:
        return False  # it has just gone


class CheckpointWatch:
    """Finds checkpoints that are new: those that callbacks announce, and those that appear in a directory.

    Args:
        directory: Where others write; None for nowhere.
        holding: What they write there.
        poll_seconds: How often the disk is looked at when nobody announced anything; what lies in `directory` is
            complete when it did not change for so long.
    """

    def __init__(self, directory: Path | None, holding: Holding | None, poll_seconds: float) -> None:
        self._directory, self._holding, self._poll_seconds = directory, holding, poll_seconds
        self._known: dict[Path, Fingerprint | None] = {}
        self._growing: dict[Path, tuple[Fingerprint | None, float]] = {}
        self._awaited: dict[SavedCheckpoint, float] = {}
        self._look_seconds = 0.0
        for path in self._list_directory():
            self._known[path] = take_fingerprint(path)

    def ignore_present(self, announced: Sequence[SavedCheckpoint]) -> None:
        """Takes what was announced before training began as known: an earlier run saved it."""
        for path in {path for saved in announced for path in (saved.path, saved.path.resolve())}:
            self._known[path] = take_fingerprint(path)

    def find_new(self, announced: Sequence[SavedCheckpoint], *, is_last: bool) -> Iterator[Found]:
        """Yields what has been saved since the last call, each with what is wrong already.

        Looks at the disk when something new is announced, and otherwise every `poll_seconds`.
        """
        is_due = is_last or self.is_due
        now_seconds = time.monotonic()
        if is_due:
            self._look_seconds = now_seconds
        for saved in dict.fromkeys(announced):
            if is_due or saved.path not in self._known:
                yield from self._look_at(saved, now_seconds)
        for saved in list(self._awaited):
            if is_due and saved not in announced:
                yield from self._look_at(saved, now_seconds)
        yield from self._give_up(announced, now_seconds, is_last=is_last)
        if is_due:
            yield from self._find_settled(now_seconds)

    def _look_at(self, saved: SavedCheckpoint, now_seconds: float) -> Iterator[Found]:
        fingerprint = take_fingerprint(saved.path)
        if fingerprint is not None:
            self._awaited.pop(saved, None)
            if fingerprint != self._known.get(saved.path):
                self._known[saved.path] = fingerprint
                yield from self._resolve(saved)
        elif saved.path not in self._known:  # one that was there and is gone was removed
            self._awaited.setdefault(saved, now_seconds)

    def _give_up(self, announced: Sequence[SavedCheckpoint], now_seconds: float, *, is_last: bool) -> Iterator[Found]:
        """Yields what should have appeared by now; what nobody speaks of any more was removed before it was seen."""
        for saved, since_seconds in list(self._awaited.items()):
            if is_last or now_seconds - since_seconds > PATIENCE_SECONDS:
                del self._awaited[saved]
                self._known[saved.path] = None
                if saved in announced:
                    yield saved, "was announced as saved and is not there"

    def _resolve(self, saved: SavedCheckpoint) -> Iterator[Found]:
        """Yields it, unless it is a link to what is known already."""
        path = saved.path.resolve()
        if path == saved.path:
            yield saved, None
        elif (real := take_fingerprint(path)) != self._known.get(path):
            self._known[path] = real
            yield SavedCheckpoint(path, saved.holding), None

    def _list_directory(self) -> list[Path]:
        if self._directory is None or not self._directory.is_dir():
            return []
        paths = [path for path in self._directory.iterdir() if not path.name.startswith(".")]
        return [path for path in paths if not is_staging_name(path.name) and _looks_like_checkpoint(path)]

    def _find_settled(self, now_seconds: float) -> Iterator[Found]:
        growing, self._growing = self._growing, {}
        for path in self._list_directory():
            fingerprint = take_fingerprint(path)
            if fingerprint == self._known.get(path):
                continue
            before, since_seconds = growing.get(path, (None, now_seconds))
            if fingerprint != before:
                self._growing[path] = (fingerprint, now_seconds)
            elif now_seconds - since_seconds < self._poll_seconds:
                self._growing[path] = (fingerprint, since_seconds)
            else:
                self._known[path] = fingerprint
                yield SavedCheckpoint(path, self._holding), None

    def forget(self, path: Path) -> None:
        """Looks at it again: it was written while it was read."""
        self._known[path] = ()

    @property
    def is_due(self) -> bool:
        """Whether the disk was not looked at for `poll_seconds`."""
        return time.monotonic() - self._look_seconds >= self._poll_seconds

    @property
    def growing(self) -> list[str]:
        """What in the directory may still be written, by name."""
        return sorted(path.name for path in self._growing)
