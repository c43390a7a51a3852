"""Creates a directory atomically: under a staging name, which is renamed at the end."""

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from genesis.errors import UserError
from genesis_callbacks.files import sync_directory


@contextmanager
def staged(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yields a new directory next to `out` that is renamed to `out` at the end, or deleted after an error.

    The leftovers of a killed process have `.staging-` in their names and can be deleted.

    Args:
        out: The final path.
        num_bytes: Approximate size of the content.

    Raises:
        UserError: `out` already exists, or the disk has too little space.
    """
    check_is_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise UserError(
            f"{out} needs {num_bytes:,} bytes, but {out.parent} has {free:,} free: free space, or choose another disk"
        )
    staging = out.parent / f"{out.name}.staging-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
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


def check_is_new(out: Path) -> None:
    """Checks that `out` does not exist.

    Raises:
        UserError: `out` exists.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists and is not overwritten: give another name, or delete it")
