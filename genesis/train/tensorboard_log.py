"""TensorBoard's logger for runs that are resumed: all attempts are one curve, and each step has one value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger as LightningTensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from genesis.base.errors import UserError
from genesis.base.run_directory import find_tensorboard_version

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
except ImportError:  # an extra
    Event = None


class TensorBoardLogger(LightningTensorBoardLogger):
    """Writes into the newest version of a run, where Lightning's logger would begin another one with each start.

    A killed run may have logged beyond its last checkpoint. Before its first value, each attempt marks that values of
    this step and later ones were written before it, so that TensorBoard and its readers leave those out.

    Args:
        save_dir: The run's directory.
        name: The directory in it.
        version: Another version than the newest.
        kwargs: What Lightning's logger and `SummaryWriter` take.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(
        self, save_dir: str | Path, name: str = "tensorboard", version: int | str | None = None, **kwargs: Any
    ) -> None:
        if Event is None:
            raise UserError("the logger TensorBoard is not installed here; pip install 'genesis-lm[tensorboard]'")
        if version is None:
            version = find_tensorboard_version(Path(save_dir) / name) or 0
        super().__init__(save_dir=save_dir, name=name, version=version, **kwargs)
        self._has_begun = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes `metrics`, the first time after the mark, so that a kill right after the call loses none of them."""
        if not self._has_begun and step is not None:
            self._has_begun = True
            self.experiment.file_writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        super().log_metrics(metrics, step)
        # The writer holds values back for minutes. A resume does not repeat those before the last checkpoint.
        self.experiment.flush()
