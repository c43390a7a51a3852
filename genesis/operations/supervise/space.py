"""Waits until a disk that was full has space again."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from genesis.base.errors import RunEndedError
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.stops import StopRequests

_PROBE_NAME: Final = ".space.staging"
_POLL_SECONDS: Final = 1.0
_LEAST_BYTES: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def wait_for_space(run_dir: Path, limit_seconds: float, stops: StopRequests, report: Callable[[str], None]) -> None:
    """Waits until the next checkpoint fits on the disk, or a stop is requested.

    Raises:
        RunEndedError: It still does not after the limit.
    """
    needed_bytes = max(_LEAST_BYTES, _measure_largest(RunDirectory(run_dir).checkpoints))
    began_seconds = time.monotonic()
    has_reported = False
    while not has_space(run_dir, needed_bytes) and stops.find() is None:
        if not has_reported:
            has_reported = True
            report(f"waiting for: {needed_bytes / 2**20:.0f} MiB of disk space for {run_dir}")
        if time.monotonic() - began_seconds > limit_seconds:
            raise RunEndedError(
                f"the disk of {run_dir} is still full after {limit_seconds:g} s: free {needed_bytes / 2**20:.0f} MiB"
            )
        stops.wait(_POLL_SECONDS)


def has_space(run_dir: Path, num_bytes: int) -> bool:
    """Returns whether so many bytes can be written; a quota does not show in the number of free bytes."""
    if shutil.disk_usage(run_dir).free < num_bytes:
        return False
    path = RunDirectory(run_dir).supervisor / _PROBE_NAME
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _FULL:  # no space for a name
            return False
        raise
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno in _FULL:
            return False
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)  # the supervisor of another node may have removed it
    return True


def _measure_largest(checkpoints: Path) -> int:
    """Returns the bytes of the largest checkpoint, which the next one will be like."""
    sizes = [0]
    if checkpoints.is_dir():
        for folder in checkpoints.iterdir():
            if folder.is_dir():
                sizes.append(sum(file.stat().st_size for file in folder.iterdir() if file.is_file()))
    return max(sizes)
