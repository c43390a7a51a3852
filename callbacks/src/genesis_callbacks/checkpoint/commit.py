"""Makes a save visible, and moves directories away: the only module that renames directories.

A staging directory becomes a checkpoint by one rename, after everything in it is on the disk; the rename is then
forced to the disk as well. No directory is ever renamed over an existing one. Only rank 0 calls these functions; they
do not communicate.
"""

import contextlib
import os
import shutil
from pathlib import Path

from ..base.checkpoint_errors import SaveFailedError
from ..base.events import EventLog
from ..base.files import sync_directory
from ..base.hashing import HashAlgorithm, hash_bytes
from ..base.run_directory import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    TRASH_NAME,
    RunDirectory,
    is_checkpoint_name,
    is_staging_name,
    step_of,
)
from .durable_file import write_file

QUARANTINE_PREFIX = "quarantined-"
SUPERSEDED_PREFIX = "superseded-"


def _rename_new(source: Path, target: Path, *, is_undone: bool = False) -> None:
    """Renames durably; with `is_undone`, renames back if the disk does not confirm the rename."""
    # os.rename would silently replace an empty directory.
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    os.rename(source, target)  # noqa: PTH104 - the syscall by its name: fault tests wrap it
    try:
        sync_directory(target.parent)
    except OSError:
        # The new name may be in memory only: a power loss could bring back either. The staging name is the safe one,
        # since a restart discards it.
        if is_undone:
            os.rename(target, source)  # noqa: PTH104 - as above
        raise
    # The target's directory came first: a power loss in between must not lose the entry from both.
    if source.parent != target.parent:
        sync_directory(source.parent)


def _free_name(parent: Path, name: str) -> Path:
    candidate = parent / name
    number = 1
    while candidate.exists():
        number += 1
        candidate = parent / f"{name}-{number}"
    return candidate


def commit(staging: Path, final: Path, manifest: bytes, algorithm: HashAlgorithm) -> str:
    """Writes the encoded manifest and the marker into `staging`, makes it `final`, and returns the manifest's hash.

    Raises:
        SaveFailedError: A checkpoint of that name exists.
        OSError: The disk is full, or cannot be written.
    """
    # Each sync makes one step durable before the next begins: shards and manifest, then the marker that vouches for the
    # manifest, then the rename. Without the syncs the disk could store the marker first, and a power loss would leave a
    # marked checkpoint without its files. A kill before the rename leaves a staging directory, which a restart
    # discards; a kill after it leaves a complete checkpoint.
    if final.exists():
        raise SaveFailedError(f"{final} exists already, and a checkpoint is never overwritten")
    write_file(staging / MANIFEST_NAME, manifest, algorithm=algorithm)
    manifest_hash = f"{algorithm}:{hash_bytes(manifest, algorithm)}"
    sync_directory(staging)
    write_file(staging / COMMITTED_NAME, manifest_hash.encode(), algorithm=algorithm)
    sync_directory(staging)
    _rename_new(staging, final, is_undone=True)  # a save that is reported as failed must not be visible
    return manifest_hash


def discard(path: Path) -> None:
    """Moves a directory to the trash beside it, then deletes it.

    A directory in the trash never counts as a checkpoint, so that a kill during the deletion does no harm; the next
    deletion removes the rest.
    """
    trash = path.parent / TRASH_NAME
    try:
        trash.mkdir(exist_ok=True)
    except OSError:
        if not is_staging_name(path.name):
            raise
        # A full disk has no room for another directory. The files of an unfinished save are of no use, so that they can
        # be deleted in place, which makes room. A kill in this loop leaves a staging directory, never a checkpoint.
        for file in path.iterdir():
            file.unlink()
        trash.mkdir(exist_ok=True)
    _rename_new(path, _free_name(trash, path.name))
    empty_trash(path.parent)


def empty_trash(directory: Path) -> None:
    """Deletes the content of a checkpoint directory's trash; files that cannot be deleted stay there."""
    trash = directory / TRASH_NAME
    if trash.is_dir():
        for path in trash.iterdir():
            if path.is_symlink():  # a checkpoint that was moved to another disk; what it leads to is not ours
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def remove_empty_trash(directory: Path) -> None:
    """Removes the trash of a checkpoint directory if it is empty. The holder of the directory's lock calls it."""
    with contextlib.suppress(OSError):  # there is no trash, or it is not empty
        (directory / TRASH_NAME).rmdir()


def quarantine(path: Path, reason: Exception | str, *, rank: int | None) -> Path:
    """Renames a checkpoint that does not verify, so that no reader finds it, and returns its new path.

    If the checkpoint belongs to a run, the run's events record the quarantine.

    Args:
        path: The checkpoint.
        reason: Why it does not verify.
        rank: The rank that renames it; None for a command outside of training.
    """
    target = _free_name(path.parent, QUARANTINE_PREFIX + path.name)
    _rename_new(path, target)
    run = RunDirectory.holding(path.parent)
    if run is not None:
        EventLog(run.path, rank).write(
            "quarantined",
            step=step_of(path.name) if is_checkpoint_name(path.name) else None,
            checkpoint=path,
            error=reason if isinstance(reason, Exception) else None,
            text=f"quarantined as {target.name}: {reason}",
        )
    return target


def supersede(paths: list[Path]) -> Path | None:
    """Moves checkpoints that a run does not descend from to a `superseded-<n>`, and returns that directory."""
    if not paths:
        return None
    parent = paths[0].parent
    number = 1
    while (parent / f"{SUPERSEDED_PREFIX}{number}").exists():
        number += 1
    target = parent / f"{SUPERSEDED_PREFIX}{number}"
    target.mkdir()
    for path in paths:
        # A kill in this loop leaves some of them in place; the next call moves those to a directory of its own.
        _rename_new(path, target / path.name)
    return target
