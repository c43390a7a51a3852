"""Finds checkpoints: which are committed, which is the latest, and which run holds the directory."""

import contextlib
import fcntl
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError, DirectoryInUseError
from ..base.files import find_irregular_kind
from ..base.locks import PrivateDescriptor, lock_file
from ..base.manifest import Manifest, read_manifest
from ..base.run_directory import (
    CHECKPOINTS_NAME,
    LOCK_NAME,
    is_checkpoint_name,
    is_staging_name,
    step_of,
)
from ..base.safe_read import reading
from ..base.untrusted import open_descriptor
from .commit import discard, quarantine, remove_empty_trash
from .verify import VerifyLevel, verify

_ORPHAN_POLL_SECONDS = 0.05
_MOMENT_SECONDS = 1.0
_PROCESS_ID = re.compile("[1-9][0-9]{0,9}")
_UNKNOWN_HOLDER = "unknown"
# `find_holder` holds a shared lock for less time than this, which must not make a new run fail.
_GLANCE_SECONDS = 0.1


class QuarantineWarning(UserWarning):
    """A checkpoint is damaged and was quarantined; the message has its name and the reason."""


class DirectoryLock:
    """Holds a checkpoint directory for one run, by an advisory lock that ends with the process.

    Processes that the owner forks do not hold the lock: when the owner is gone, the directory is free at once. Rank 0
    takes the lock, without communication.

    Raises:
        DirectoryInUseError: Another live run holds the directory.
        CheckpointError: The path of the lock is not a regular file.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        path = directory / LOCK_NAME
        with contextlib.suppress(FileNotFoundError):
            _check_is_file(path, path.stat())
        self._descriptor = PrivateDescriptor(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        number = self._descriptor.number
        deadline_seconds = time.monotonic() + _GLANCE_SECONDS
        while not _try_lock(number, fcntl.LOCK_EX, directory):
            if time.monotonic() > deadline_seconds:
                holder = _read_holder(number)
                self._descriptor.close()
                raise _in_use(directory, holder)
            time.sleep(_GLANCE_SECONDS / 10)
        # The id is for messages only, the lock decides: a reader that comes between these two lines finds no id, and
        # names the holder as unknown.
        os.ftruncate(number, 0)
        os.pwrite(number, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Releases the lock and removes an empty trash; a second call does nothing."""
        # The lock file stays. A run that had opened the file before a removal would lock the removed file, another run
        # a new one, and both would own the directory.
        if self._descriptor.number >= 0:
            remove_empty_trash(self._directory)
        self._descriptor.close()


def _try_lock(descriptor: int, kind: int, reported: Path | None = None) -> bool:
    try:
        lock_file(descriptor, kind | fcntl.LOCK_NB, reported)
    except BlockingIOError:
        return False
    return True


def _check_is_file(path: Path, found: os.stat_result) -> None:
    kind = find_irregular_kind(found.st_mode)
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}, but must be the lock file of a run: remove it")


def _read_holder(descriptor: int) -> str:
    """Returns the process id in a lock file if that process is alive, else "unknown"."""
    # The owner may be on another node or in another container, where its id means another process or none.
    text = os.pread(descriptor, 64, 0).decode("ascii", errors="replace").strip()
    if not _PROCESS_ID.fullmatch(text):
        return _UNKNOWN_HOLDER
    try:
        os.kill(int(text), 0)
    except (ProcessLookupError, OverflowError):
        return _UNKNOWN_HOLDER
    except PermissionError:  # another user's process
        pass
    return text


def _in_use(directory: Path, holder: str) -> DirectoryInUseError:
    process = f"process {holder}" if holder != _UNKNOWN_HOLDER else "its process is unknown"
    return DirectoryInUseError(f"{directory} is in use by another run ({process}): stop it, or give this run its own")


def find_holder(directory: Path) -> str | None:
    """Returns the other process that holds a checkpoint directory for a live run; None if there is no such process.

    Any process may call this function; it does not communicate. A holder without a valid process id is "unknown".

    Raises:
        CheckpointError: The path of the lock is not a regular file.
    """
    path = directory / LOCK_NAME
    try:
        _check_is_file(path, path.stat())
        descriptor = open_descriptor(path)
    except FileNotFoundError:
        return None
    try:
        # A shared lock, so that two processes that call this function do not take each other for a run.
        holder = None if _try_lock(descriptor, fcntl.LOCK_SH) else _read_holder(descriptor)
    finally:
        os.close(descriptor)
    return None if holder == str(os.getpid()) else holder


def check_not_in_use(directory: Path) -> None:
    """Refuses a checkpoint directory that another live run holds, without locking it.

    Raises:
        DirectoryInUseError: Another live run holds the directory; the message has the process id.
    """
    holder = find_holder(directory)
    if holder is not None:
        raise _in_use(directory, holder)


def checkpoints_in(path: Path | str) -> Path:
    """Returns the directory of `step-*` for `path`, which is a run's directory or the directory of `step-*` itself."""
    path = Path(path)
    inner = path / CHECKPOINTS_NAME
    return inner if inner.is_dir() else path


def list_committed(directory: Path | str) -> list[tuple[Path, Manifest]]:
    """Returns the committed checkpoints of a run, or directly in `directory`, oldest first in the lineage.

    Checkpoints without a valid marker and manifest are left out; other files are not read. No communication.
    """
    directory = checkpoints_in(directory)
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if is_checkpoint_name(path.name) and path.is_dir():
            try:
                found.append((path, read_manifest(path)))
            except CheckpointError:
                continue
    return sorted(found, key=lambda item: (item[1].sequence, item[1].step, item[0].name))


def list_checkpoints(directory: Path | str) -> list[Path]:
    """Returns the paths of a run's checkpoints by their names alone, damaged ones too, lowest step first."""
    directory = checkpoints_in(directory)
    if not directory.is_dir():
        return []
    with reading(directory):
        return sorted(path for path in directory.iterdir() if is_checkpoint_name(path.name) and path.is_dir())


def describe_existing(directory: Path) -> str | None:
    """Returns the line with which a run that would not continue a directory's checkpoints is refused; None if none.

    It names both ways, so that no run starts from scratch unasked.
    """
    found = list_checkpoints(directory)
    if not found:
        return None
    return (
        f"{directory.parent} already has checkpoints, the newest {found[-1].name}, which this run would not continue: "
        'continue with ckpt_path="latest"; or start over in another run_dir, or in this one with '
        'on_existing="start_over", which moves them aside'
    )


def _order(path: Path) -> tuple[int, int]:
    """Returns a checkpoint's position in the lineage; the position of an unreadable manifest is after all others."""
    # If it came last in the search, damage of the newest checkpoint would go unreported.
    step = step_of(path.name)
    try:
        return read_manifest(path).sequence, step
    except CheckpointError:
        return sys.maxsize, step


def find_latest(
    directory: Path | str, *, level: VerifyLevel = "deep", quarantine_bad: bool = True, places: Sequence[Path] = ()
) -> Path | None:
    """Returns the newest committed checkpoint that verifies, or None if there are no checkpoints.

    "Newest" follows the lineage, not the step. A checkpoint that does not verify is renamed to `quarantined-...` and
    named in a `QuarantineWarning`; the checkpoint before it is tried next. A checkpoint that another process renames
    during the search is passed over in silence, because that process reports it. No communication.

    Args:
        directory: A run's directory, or its directory of `step-*`.
        level: How much is verified; only "deep" finds content that a restore refuses although all hashes are right.
        quarantine_bad: Whether to rename bad checkpoints; False only skips them, with the same warning.
        places: Further directories in which to look for the base of a checkpoint.

    Raises:
        BaseCheckpointError: The newest checkpoint needs a base that is missing, has changed, or is damaged. All
            checkpoints are kept: with its base the newest one is complete.
        CorruptCheckpointError: There are checkpoints and none verifies. They are kept: only the user may start again.
        UnreadableCheckpointError: A checkpoint that may be the newest cannot be read. All are kept: another disk, mount
            or user may read it, and only the user can decide to continue from an older one.
    """
    directory = checkpoints_in(directory)
    candidates = list_checkpoints(directory)
    bad: dict[Path, CorruptCheckpointError] = {}
    for path in sorted(candidates, key=_order, reverse=True):
        try:
            verify(path, level, places=places)
        except CheckpointError as error:
            if not path.exists():
                # Another rank searches at the same time and has quarantined it.
                continue
            if not isinstance(error, CorruptCheckpointError):
                raise
            bad[path] = error
        else:
            # Only now: if no checkpoint is whole, or an error ends this search, nothing has been renamed.
            _handle_bad(bad, quarantine_bad)
            return path
    if bad:
        newest, reason = next(iter(bad.items()))
        raise CorruptCheckpointError(
            f"none of the {numbered(len(bad), 'checkpoints')} in {directory} verifies ({newest.name}: {reason}); "
            "restore one from a copy, or start again in another directory"
        )
    return None


def _handle_bad(bad: dict[Path, CorruptCheckpointError], is_wanted: bool) -> None:
    for path, error in bad.items():
        where = f"quarantined as {quarantine(path, error, rank=0).name}" if is_wanted else "passed over"
        warnings.warn(f"{path.name} does not verify and is {where}: {error}", QuarantineWarning, stacklevel=3)


def wait_for_orphans(directory: Path, limit_seconds: float, *, is_reported: bool = True) -> list[str]:
    """Waits for writers without a trainer that still save into `directory`; returns the names where writers remain.

    A writer holds a lock on its staging directory. After the limit `remove_abandoned` moves that directory away, so
    that a late rename finds nothing. No communication.

    Args:
        directory: Holds the checkpoints.
        limit_seconds: Limit of the wait for all writers together.
        is_reported: Whether a wait of more than a moment is reported on standard error.
    """
    deadline_seconds = time.monotonic() + limit_seconds
    held = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not is_staging_name(path.name):
            continue
        moment_seconds = min(deadline_seconds, time.monotonic() + _MOMENT_SECONDS)
        if _becomes_free(path, moment_seconds):
            continue
        if is_reported:
            sys.stderr.write(
                f"genesis-callbacks: waiting up to {limit_seconds:g} s for the writer of an earlier run, which still "
                f"saves {path}\n"
            )
            sys.stderr.flush()
        if not _becomes_free(path, deadline_seconds):
            held.append(path.name)
    return held


def _becomes_free(path: Path, deadline_seconds: float) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # committed or discarded in the meantime
    try:
        while True:
            try:
                lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_seconds:
                    return False
                time.sleep(_ORPHAN_POLL_SECONDS)
            else:
                return True  # every writer holds a shared lock, so an exclusive one proves that all are gone
    finally:
        os.close(descriptor)


def remove_abandoned(directory: Path) -> list[str]:
    """Discards the staging directories of interrupted saves; returns their names. Only the lock's holder calls it."""
    abandoned = [path for path in sorted(directory.iterdir()) if is_staging_name(path.name) and path.is_dir()]
    for path in abandoned:
        discard(path)
    return [path.name for path in abandoned]
