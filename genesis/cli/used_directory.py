"""Refuses a run in a directory with checkpoints that it would not continue: no run starts over unasked."""

from pathlib import Path

from genesis.base.errors import UserError
from genesis_callbacks.checkpoint import list_checkpoints


def check_continues(directory: Path, start: Path | None, on_existing: str) -> None:
    """Refuses to leave checkpoints behind, as the callback would do, but before anything is built.

    Args:
        directory: The directory of this run's checkpoints.
        start: The checkpoint that the run starts from; None for none.
        on_existing: The option of the callback.

    Raises:
        UserError: There are checkpoints, and `start` is none of them.
    """
    is_own = start is not None and start.parent.resolve() == directory
    if not is_own and on_existing == "refuse" and list_checkpoints(directory):
        raise UserError(
            f"{directory.parent} already has checkpoints; resume it with --ckpt_path latest, or start over in another "
            "--run_dir, or here with --checkpoint.on_existing start_over, which moves them aside"
        )


def check_fork(run_dir: Path, wanted: str | None) -> None:
    """Refuses a fork without a start, or in a directory with checkpoints.

    Raises:
        UserError: The name of the fork, or what is wanted, has to change.
    """
    if wanted is None:
        raise UserError("--fork needs a checkpoint to start from; give one by --ckpt_path, or latest")
    if list_checkpoints(run_dir):
        raise UserError(
            f"the fork {run_dir} already has checkpoints; to resume it, replace --fork by "
            f"--run_dir {run_dir} --ckpt_path latest"
        )
