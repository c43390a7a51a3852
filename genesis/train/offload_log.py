"""Logs what offload moves between the device and the host's memory, and what that costs.

    logged                       unit and meaning
    offload/to_device_bytes      bytes that went to the device, mean of a step on this rank
    offload/to_host_bytes        bytes that came from the device, likewise
    offload/idle_ms              time of a step in which the device waited for these transfers; on the CPU their time

With `optimizer_offload` or `activation_offload` alone; FSDP2's own `cpu_offload` counts nothing. Figures are those of
rank 0. Does it communicate? No. It reads events that are over, and waits for none.
"""

from typing import Any

import lightning.pytorch as pl

from genesis.train.logged_values import is_log_step, log_exactly
from genesis.transfers import Traffic


class OffloadLog(pl.Callback):
    """Logs the traffic of a strategy every `log_every_n_steps`. A resumed run counts from its own start.

    Args:
        traffic: The strategy's.
    """

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic
        self._last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to count."""
        self._traffic.take()
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs at the steps of the log."""
        num_steps = trainer.global_step - self._last_step
        if not is_log_step(trainer) or num_steps <= 0:
            return
        moved = self._traffic.take()
        self._last_step = trainer.global_step
        log_exactly(
            pl_module,
            {
                "offload/to_device_bytes": moved.to_device_bytes / num_steps,
                "offload/to_host_bytes": moved.to_host_bytes / num_steps,
                "offload/idle_ms": moved.idle_seconds * 1e3 / num_steps,
            },
        )
