"""The logger of Weights & Biases for runs that are resumed: all attempts have one id."""

from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

from genesis.base.errors import UserError
from genesis.base.run_directory import find_wandb_run


class WandbLogger(LightningWandbLogger):
    """Continues the W&B run whose files lie in the run's directory, where Lightning's logger would make another run.

    Online, W&B opens the run of this id again. Offline each attempt writes a directory of its own, and W&B makes one
    run of those with the same id when they are uploaded. A resumed run logs the steps again that a killed one logged
    beyond its last checkpoint; the later values are those of the run.

    Args:
        save_dir: The run's directory.
        id: Another id than that of the newest files; None for theirs, or a new one where there are none.
        offline: Whether to write files only.
        kwargs: What Lightning's logger and `wandb.init` take.
    """

    def __init__(self, save_dir: str | Path, id: str | None = None, offline: bool = False, **kwargs: Any) -> None:
        found = find_wandb_run(Path(save_dir))
        if id is None and kwargs.get("version") is None and found is not None:
            id = found.id
        if offline:
            kwargs.setdefault("resume", None)  # W&B warns that it ignores the option
        super().__init__(save_dir=save_dir, id=id, offline=offline, **kwargs)

    @property
    def experiment(self) -> Any:
        """Returns the run of W&B, which the first access on rank 0 starts.

        Raises:
            UserError: W&B refuses an option of the logger or a variable of the environment, or cannot be reached.
        """
        # By its name, because W&B need not be installed. A variable of a wrong type is a ValueError of pydantic's.
        refusals: tuple[type[Exception], ...] = (ValueError, import_module("wandb.errors").Error)
        try:
            return super().experiment
        except refusals as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"W&B cannot start a run ({reason}): correct trainer.logger or the environment's WANDB_ variables"
            ) from error
