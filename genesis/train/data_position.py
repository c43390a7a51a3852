"""The callback that advances the position of a run's data, logs consumption, and ends the run when the data end.

logged                       unit and meaning
data/epochs_SOURCE           epochs of the source: its consumed sequences, with skipped ones, divided by all its
                             sequences; for a stream, the read spans of its files divided by all spans
data/tokens_SOURCE           tokens consumed from the source, without padding and without skipped windows
data/prompts_SOURCE          prompts of the source that were answered and trained (`data.prompts`)
data/bad_documents_SOURCE    streams only: documents skipped because they could not be read
data/blank_documents_SOURCE  streams only: documents dropped because they are only white space
data/damaged_spans_SOURCE    streams only: spans of damaged files whose rest was skipped
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from genesis.base.errors import UserError, numbered
from genesis.data.training_data import TrainingData
from genesis.data.window import AccumulationWindow
from genesis.strategies.layout import layout_strategy
from genesis.train.logged_values import is_log_step
from genesis.train.planned_steps import count_steps_left


class MoveDataPosition(pl.Callback):
    """Advances the data's position when a window has been trained. The data module puts it before all other callbacks.

    So a callback that saves at `on_train_batch_end` saves the position after the window. The callback has no state. All
    ranks compute the same position by themselves, or from sums that the module has already computed. A stream's figures
    are summed over ranks when they are logged.

    Args:
        data: The training data.
        sets_max_steps: Whether the Trainer's number of steps follows from the data.
    """

    def __init__(self, data: TrainingData, *, sets_max_steps: bool = False) -> None:
        self.data = data
        self._sets_max_steps = sets_max_steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warns if the data are too short for the length of training; ends a run whose data have already ended."""
        num_left = count_steps_left(self.data)
        if num_left is not None:
            num_steps = trainer.global_step + num_left
            if trainer.min_steps and trainer.min_steps > num_steps:
                raise UserError(
                    f"trainer.min_steps is {trainer.min_steps}, but data.max_epochs ends the data after "
                    f"{numbered(num_steps, 'steps')}; lower min_steps or raise max_epochs"
                )
            if self._sets_max_steps:
                # After a resume with another batch size the same data give another number of steps.
                trainer.fit_loop.epoch_loop.max_steps = num_steps
            elif trainer.max_steps > num_steps:
                rank_zero_info(
                    f"data.max_epochs ends the data after {numbered(num_steps, 'steps')} of trainer.max_steps "
                    f"{trainer.max_steps}"
                )
        self._stop_at_the_end(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Advances the position."""
        has_tokens = getattr(pl_module, "has_valid_tokens", True)
        note = self.data.advance(batch, has_tokens=has_tokens)
        if note is not None:
            rank_zero_info(note)
        if batch.is_skipped:
            first = batch.data_position - self.data.options.global_batch_size
            rank_zero_info(
                f"step {trainer.global_step} trained on nothing: its data are skipped, positions {first} to "
                f"{batch.data_position - 1}"
            )
        self._stop_at_the_end(trainer)
        if is_log_step(trainer) or trainer.should_stop:
            pl_module.log_dict(self._metrics(trainer), on_step=True, on_epoch=False, batch_size=1)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends a stream's workers."""
        self.data.close()

    def _stop_at_the_end(self, trainer: pl.Trainer) -> None:
        reason = self.data.find_end()
        if reason is not None:
            rank_zero_info(reason)
            trainer.should_stop = True

    def _metrics(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        group = layout_strategy(trainer.strategy).layout.token_group
        consumed = self.data.sum_usage(lambda values: group.sum(values).wait())
        # As float64 on the CPU: Lightning would move a number to the device, as a float32.
        return {
            f"data/{what}_{name}": torch.tensor(value, dtype=torch.float64)
            for name, figures in consumed.items()
            for what, value in figures.items()
        }
