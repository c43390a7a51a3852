"""What the supervisor knows of a run's checkpoints and does with them: names and commit markers alone, no torch."""

import time
from pathlib import Path

from genesis.run_directory import RunDirectory
from genesis.supervise.state import write_fresh_seconds
from genesis_callbacks.checkpoint import list_committed, supersede
from genesis_callbacks.run_directory import COMMITTED_NAME, is_checkpoint_name, step_of


def list_steps(run_dir: Path) -> list[int]:
    """Returns the steps of the committed checkpoints of a run, oldest first; the next start verifies them."""
    directory = RunDirectory(run_dir).checkpoints
    try:
        names = [path.name for path in directory.iterdir() if is_checkpoint_name(path.name)]
    except OSError:
        return []
    return sorted(step_of(name) for name in names if (directory / name / COMMITTED_NAME).is_file())


def newest_step(run_dir: Path) -> int:
    """Returns the step of the newest committed checkpoint; 0 for none."""
    return max(list_steps(run_dir), default=0)


def move_aside(run_dir: Path) -> None:
    """Moves all committed checkpoints of a run into a `superseded-N`, for `--on_drift fresh`."""
    # The note comes first: without it a mirror would bring back what is moved aside.
    write_fresh_seconds(run_dir, time.time())
    supersede([path for path, _ in list_committed(run_dir)])
