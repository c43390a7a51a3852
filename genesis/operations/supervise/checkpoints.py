"""What the supervisor knows of a run's checkpoints and does with them: names and commit markers alone, no torch."""

import fcntl
import os
import time
from pathlib import Path

from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.state import write_fresh_seconds
from genesis_callbacks.base.locks import lock_file
from genesis_callbacks.base.run_directory import COMMITTED_NAME, LOCK_NAME, is_checkpoint_name, step_of
from genesis_callbacks.base.untrusted import open_descriptor
from genesis_callbacks.checkpoint import list_committed
from genesis_callbacks.checkpoint.commit import supersede


def list_markers(run_dir: Path) -> dict[int, Path]:
    """Returns the commit markers of a run's committed checkpoints by step, oldest first."""
    directory = RunDirectory(run_dir).checkpoints
    try:
        names = [path.name for path in directory.iterdir() if is_checkpoint_name(path.name)]
    except OSError:  # there is no directory yet
        return {}
    markers = {step_of(name): directory / name / COMMITTED_NAME for name in names}
    return {step: markers[step] for step in sorted(markers) if markers[step].is_file()}


def list_steps(run_dir: Path) -> list[int]:
    """Returns the steps of the committed checkpoints of a run, oldest first; the next start verifies them."""
    return list(list_markers(run_dir))


def newest_step(run_dir: Path) -> int:
    """Returns the step of the newest committed checkpoint; 0 for none."""
    return max(list_markers(run_dir), default=0)


def commit_seconds(marker: Path) -> float | None:
    """Returns the Unix time of a commit; None if the checkpoint has been removed meanwhile."""
    try:
        return marker.stat().st_mtime
    except OSError:
        return None


def is_held(run_dir: Path) -> bool:
    """Returns whether a process on this machine holds the run's checkpoints."""
    try:
        descriptor = open_descriptor(RunDirectory(run_dir).checkpoints / LOCK_NAME)
    except OSError:
        return False
    try:
        # A shared lock, for a moment only: a fit that starts meanwhile tries for longer than that.
        lock_file(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a lock that this process may not have
        return False
    finally:
        os.close(descriptor)
    return False


def move_aside(run_dir: Path) -> None:
    """Moves all committed checkpoints of a run into a `superseded-N`, for `--on_drift fresh`."""
    # The note comes first: without it a mirror would bring back what is moved aside.
    write_fresh_seconds(run_dir, time.time())
    supersede([path for path, _ in list_committed(run_dir)])
