"""What the supervisor knows of a run's checkpoints: names and commit markers alone, without torch."""

from pathlib import Path

from genesis.base.run_directory import RunDirectory
from genesis_callbacks.base.run_directory import COMMITTED_NAME, is_checkpoint_name, step_of


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
