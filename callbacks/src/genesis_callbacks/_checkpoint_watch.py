"""Finds the checkpoints that appear on the disk, for `CheckpointVerification`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .base.run_directory import is_staging_name
from .checkpoint.contents import find_format

Holding = Literal["all", "weights"]
Fingerprint = tuple[tuple[str, int, int, int], ...]

PATIENCE_SECONDS = 60.0
"""How long an announced checkpoint may take to appear, and how long a growing one may take after the fit's end."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to be verified, and what it is meant to hold; with None its format decides."""

    path: Path
    holding: Holding | None


Found = tuple[SavedCheckpoint, str | None]
"""A checkpoint, and what is wrong with it already."""


def take_fingerprint(path: Path) -> Fingerprint | None:
    """Returns values that change when a file, or one in a directory, is written; None if the path does not exist."""
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
        return False  # retention may remove a checkpoint between the listing and this look


class CheckpointWatch:
    """Finds new checkpoints: those that callbacks announce, and those that appear in a directory.

    Args:
        directory: Where other code writes checkpoints; None for no such directory.
        holding: What that code writes there.
        poll_seconds: Interval of disk checks when no callback announced a checkpoint. A checkpoint in `directory`
            counts as complete when it did not change for so long.
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
        """Marks checkpoints that were announced before training began as known: an earlier run saved them."""
        for path in {path for saved in announced for path in (saved.path, saved.path.resolve())}:
            self._known[path] = take_fingerprint(path)

    def find_new(self, announced: Sequence[SavedCheckpoint], *, is_last: bool) -> Iterator[Found]:
        """Yields the checkpoints that were saved since the last call, each with a problem that is known already.

        It reads the disk when a new checkpoint is announced, and otherwise every `poll_seconds`.
        """
        is_due = is_last or self.is_due
        now_seconds = time.monotonic()
        if is_due:
            self._look_seconds = now_seconds
        for saved in dict.fromkeys(announced):
            if is_due or saved.path not in self._known:
                yield from self._look_at(saved, now_seconds)
        # `announced` holds only the newest few of a callback; an awaited one may have left that list meanwhile.
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
        elif saved.path not in self._known:  # a known checkpoint that is gone was removed by retention
            self._awaited.setdefault(saved, now_seconds)

    def _give_up(self, announced: Sequence[SavedCheckpoint], now_seconds: float, *, is_last: bool) -> Iterator[Found]:
        """Yields checkpoints that should have appeared by now.

        A checkpoint that is no longer announced was removed before it was seen, which is no problem.
        """
        for saved, since_seconds in list(self._awaited.items()):
            if is_last or now_seconds - since_seconds > PATIENCE_SECONDS:
                del self._awaited[saved]
                self._known[saved.path] = None
                if saved in announced:
                    yield saved, "was reported as saved but does not exist"

    def _resolve(self, saved: SavedCheckpoint) -> Iterator[Found]:
        """Yields the checkpoint, unless it is a link to a known one."""
        path = saved.path.resolve()  # ModelCheckpoint's save_last="link" makes such links
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
        # Foreign code announces nothing, and many formats write in place: only a pause shows that a save has ended.
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
        """Makes a later call yield the checkpoint again, because it was written while it was read."""
        self._known[path] = ()  # no fingerprint equals an empty one, so the next look finds a change

    @property
    def is_due(self) -> bool:
        """Whether the disk was not looked at for `poll_seconds`."""
        return time.monotonic() - self._look_seconds >= self._poll_seconds

    @property
    def growing(self) -> list[str]:
        """Names of the checkpoints in the directory that may still be written."""
        return sorted(path.name for path in self._growing)
