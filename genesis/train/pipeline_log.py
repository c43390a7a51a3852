"""Logs how long the ranks of a pipeline wait for each other.

    logged                       unit and meaning
    parallel/bubble_share        share of the time of windows in which ranks did not compute, mean over all ranks since
                                 the last log line: waits, transfers between stages, and what uneven stages cost
    parallel/bubble_share_ideal  the same by the formula for stages that take the same time, without transfers

With a pipeline alone. A resumed run counts from its own start. Does it communicate? Two reductions of a number over
gloo in each step of the log. On a device it reads events that are over, and waits for none.
"""

import lightning.pytorch as pl

from genesis.strategies.pipeline import StageClock
from genesis.train.logged_values import is_log_step, log_exactly
from genesis_callbacks.host_group import HostGroup


class PipelineLog(pl.Callback):
    """Logs the bubble of a pipeline every `log_every_n_steps`.

    Args:
        clock: The strategy's.
    """

    def __init__(self, clock: StageClock) -> None:
        super().__init__()
        self._clock, self._group = clock, HostGroup()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Logs at the steps of the log, once every rank has passed a window."""
        if not is_log_step(trainer):
            return
        times = self._clock.take()
        num_windows = max(1, times.num_windows)
        own = (times.busy / num_windows, float(times.num_windows > 0))
        # The ranks end their last backwards one after the other; the one that ends last has seen the whole window.
        whole = self._group.max((round(1e9 * times.whole / num_windows),))
        busy, num_ranks = self._group.sum_floats(own).wait()
        (nanoseconds,) = whole.wait()
        if num_ranks == trainer.world_size and nanoseconds:
            share = 1.0 - busy / num_ranks / (nanoseconds / 1e9)
            values = {"parallel/bubble_share": share, "parallel/bubble_share_ideal": self._clock.ideal_share}
            log_exactly(pl_module, values)
