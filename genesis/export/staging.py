"""Creates a directory atomically: under a staging name, which is renamed at the end."""

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from genesis.base.errors import UserError
from genesis_callbacks.base.files import sync_directory
from genesis_callbacks.base.locks import lock_file
from genesis_callbacks.base.run_directory import COMMITTED_NAME


@contextmanager
def staged(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yields a new directory next to `out` that is renamed to `out` at the end, or deleted after an error.

    What a killed process has left for the same `out` is deleted first; it has `.staging-` in its name.

    Args:
        out: The final path.
        num_bytes: Approximate size of the content.

    Raises:
        UserError: `out` already exists or lies in a checkpoint, or the disk has too little space.
    """
    check_is_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    _delete_leftovers(out)
    check_space(out, num_bytes)
    staging = out.parent / f"{out.name}.staging-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        with _open_directory(staging) as descriptor:
            lock_file(descriptor, fcntl.LOCK_EX)
            yield staging
            check_is_new(out)
            staging.rename(out)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk of {out.parent} ran full while {out} was written: free space, or choose another disk"
            ) from None
        raise
    sync_directory(out.parent)


@contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _delete_leftovers(out: Path) -> None:
    for left_over in out.parent.glob(f"{glob.escape(out.name)}.staging-????????"):
        with suppress(OSError), _open_directory(left_over) as descriptor:
            lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its process lives
            shutil.rmtree(left_over)


def check_space(out: Path, num_bytes: int) -> None:
    """Checks that there is space for `out`, whose directory need not exist.

    Raises:
        UserError: The disk has too little space.
    """
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise UserError(
            f"{out} needs {num_bytes:,} bytes, but {place} has {free:,} free: free space, or choose another disk"
        )


def check_is_new(out: Path) -> None:
    """Checks that `out` does not exist, and does not lie in a checkpoint.

    Raises:
        UserError: `out` exists, or lies in a checkpoint, which would take it along when it is removed.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists and is not overwritten: give another name, or delete it")
    for parent in out.resolve().parents:
        if (parent / COMMITTED_NAME).exists():
            raise UserError(
                f"{out} lies in the checkpoint {parent}, which is removed with all that it holds: give a path outside"
            )
