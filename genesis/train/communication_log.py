"""Logs what ranks that share work send each other, by axis.

    logged                          unit and meaning
    communication/AXIS_sent_bytes   bytes that rank 0 sends along an axis in a window of training, mean since the last
                                    log line: the least with which the collectives can be done
    communication/AXIS_calls        the collectives and transfers in which it does, likewise

AXIS is `tensor`, `context` or `pipeline`; an axis of one rank is left out, and so are `tensor` and `context` with
compiled blocks, in which collectives cannot be counted. Not in it are the exchanges of experts, and the gathers and
reductions of FSDP2 and DDP, whose bytes `genesis plan` prints. Does it communicate? No, and it waits for no device.
"""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from genesis.strategies.axis_traffic import AxisTraffic
from genesis.train.logged_values import is_log_step, log_exactly


class CommunicationLog(pl.Callback):
    """Logs the traffic of a strategy's axes every `log_every_n_steps`. A resumed run counts from its own start.

    Args:
        traffic: The strategy's, by axis.
    """

    def __init__(self, traffic: Mapping[str, AxisTraffic]) -> None:
        super().__init__()
        self._traffic = traffic
        self._num_windows = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to count the window."""
        for traffic in self._traffic.values():
            traffic.is_counting = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the count of the window, before a validation; logs at the steps of the log."""
        self._num_windows += 1
        for traffic in self._traffic.values():
            traffic.is_counting = False
        if not is_log_step(trainer):
            return
        values = {}
        for axis, traffic in self._traffic.items():
            sent = traffic.take()
            values[f"communication/{axis}_sent_bytes"] = sent.num_bytes / self._num_windows
            values[f"communication/{axis}_calls"] = sent.num_calls / self._num_windows
        self._num_windows = 0
        log_exactly(pl_module, values)
