"""Decides which save is due. All functions are pure except `read_moment`, which reads the Trainer."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import Trainer

from genesis_callbacks.base.errors import numbered

from ._save_options import SaveOptions
from .checkpoint.ranks import Ranks

_NOTHING = [0, 0, 0]


@dataclass(frozen=True)
class Moment:
    """The state of training at the end of an accumulation window.

    Attributes:
        step: Windows attempted.
        max_steps: The step at which training ends; -1 for no limit.
        epoch: The current epoch, from 0.
        max_epochs: The number of epochs after which training ends; None or -1 for no limit.
        is_last_batch: Whether the window ended its epoch.
        should_stop: Whether training was asked to stop.
    """

    step: int
    max_steps: int
    epoch: int
    max_epochs: int | None
    is_last_batch: bool
    should_stop: bool

    @property
    def is_last_window(self) -> bool:
        """Whether training is known to end here; a stop that a later hook decides is not known yet."""
        # An end that is missed here costs no checkpoint: `FitSession.finish` saves the last step when training ends.
        if self.should_stop or (self.max_steps != -1 and self.step >= self.max_steps):
            return True
        is_last_epoch = self.max_epochs not in (None, -1) and self.epoch + 1 >= (self.max_epochs or 0)
        return is_last_epoch and self.is_last_batch


def read_moment(trainer: Trainer) -> Moment:
    """Returns the Trainer's state."""
    return Moment(
        trainer.global_step,
        trainer.max_steps,
        trainer.current_epoch,
        trainer.max_epochs,
        trainer.is_last_batch,
        trainer.should_stop,
    )


@dataclass(frozen=True)
class Vote:
    """A rank's vote at the end of a window; the ranks agree on the maximum of each number.

    Attributes:
        signal_number: The signal that the rank received, 0 for none.
        is_minute_due: Whether `every_n_minutes` has passed; rank 0's clock counts.
        outcome: The state of the save in flight, as `SavePipeline.poll` codes it.
    """

    signal_number: int
    is_minute_due: bool
    outcome: int


def is_save_due(moment: Moment, vote: Vote, options: SaveOptions) -> bool:
    """Returns whether this window's end is to be saved."""
    # Every term is the same on all ranks: a save that one rank begins alone would wait for the others' parts.
    steps, epochs = options.every_n_steps, options.every_n_epochs
    is_step_due = steps is not None and moment.step % steps == 0
    is_epoch_due = epochs is not None and moment.is_last_batch and (moment.epoch + 1) % epochs == 0
    is_end_due = options.save_at_end and moment.is_last_window
    return bool(vote.signal_number) or vote.is_minute_due or is_step_due or is_epoch_due or is_end_due


def describe_interval(every_n_steps: int | None, batches_per_step: int, num_optimizers: int = 1) -> str | None:
    """Returns a notice on the unit of `every_n_steps`, where a reader might take it for batches; otherwise None.

    Example:
        >>> describe_interval(500, 4)
        'Saves every 500 optimizer steps, which are 2,000 batches with accumulate_grad_batches=4.'
    """
    if every_n_steps is not None and num_optimizers > 1:
        return (
            f"Saves when the steps of all {numbered(num_optimizers, 'optimizers')} together are a multiple of "
            f"{every_n_steps:,}: Lightning's global step counts the steps of each."
        )
    if every_n_steps is None or batches_per_step == 1:
        return None
    return (
        f"Saves every {numbered(every_n_steps, 'optimizer steps')}, which are "
        f"{numbered(every_n_steps * batches_per_step, 'batches')} with accumulate_grad_batches={batches_per_step}."
    )


class VoteExchange:
    """Agrees on votes among all ranks, once for each window.

    Every rank calls `exchange` at the same windows. It communicates over the engine's own group.

    Args:
        ranks: The run's.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: Callable[[], list[int]] | None = None

    def exchange(self, ours: Vote) -> Vote:
        """Returns what all ranks agree on: with one rank its vote of now, otherwise the votes of the window before."""
        if self._ranks.world_size == 1:
            return ours
        # One window late by design: the reduction of the last window has ended long ago, so no rank waits for the
        # slowest one here. All ranks read the result at the same window, so they act on it in the same place.
        agreed = self._pending() if self._pending is not None else _NOTHING
        self._pending = self._ranks.start_maximum([ours.signal_number, int(ours.is_minute_due), ours.outcome])
        signal_number, minutes, outcome = agreed
        return Vote(signal_number, bool(minutes), outcome)

    def finish(self) -> None:
        """Waits for the exchange that is under way, whose result is no longer needed."""
        # Every rank has started it. A rank that dropped it would destroy its group while others still reduce.
        if self._pending is not None:
            self._pending()
            self._pending = None

    def abandon(self) -> None:
        """Drops the exchange that is under way without a wait: other ranks may be gone."""
        self._pending = None
