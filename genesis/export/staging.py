"""A directory that is there when it is whole: made under another name, and renamed at the end."""

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
    """Gives a new directory beside `out` that becomes `out` at the end, or is deleted where something went wrong.

    What a kill leaves has `.staging-` in its name and can be deleted.

    Args:
        out: Where it is to be.
        num_bytes: What it will hold, about.

    Raises:
        UserError: There is something at `out`, or the disk has no room, or runs full.
    """
    check_is_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise UserError(
            f"{out} needs {num_bytes:,} bytes, and {out.parent} has {free:,} left: make room, or go elsewhere"
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
                f"the disk of {out.parent} ran full while {out} was written: make room, or go elsewhere"
            ) from None
        raise
    sync_directory(out.parent)


def check_is_new(out: Path) -> None:
    """Refuses to write over anything.

    Raises:
        UserError: There is something at `out`.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} is there already, and nothing is written over: give another name, or delete it")
