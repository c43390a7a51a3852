"""Logs what offload moves between the device, the host's memory and its disk, and what that costs.

    logged                       unit and meaning
    offload/to_device_bytes      bytes that went to the device, mean of a step on this rank
    offload/to_host_bytes        bytes that came from the device, likewise
    offload/idle_ms              time of a step in which the device waited for these transfers; on the CPU their time
    offload/disk_read_bytes      bytes that were read from the disk, mean of a step on this rank
    offload/disk_written_bytes   bytes that were written to the disk, likewise
    offload/disk_wait_ms         time of a step in which training waited for the disk

With an offload alone, and those of the disk with `optimizer_offload_directory`. With `cpu_offload`, `idle_ms` also has
the gathers behind the copies of parameters, and the time of the updates on the host; on the CPU nothing moves. Figures
are those of rank 0. Does it communicate? No. It reads events that are over, and waits for none.
"""

from typing import Any

import lightning.pytorch as pl

from genesis.optim.transfers import Traffic
from genesis.train.logged_values import is_log_step, log_exactly


class OffloadLog(pl.Callback):
    """Logs the traffic of a strategy every `log_every_n_steps`. A resumed run counts from its own start.

    Args:
        traffic: The strategy's.
        has_disk: Whether a disk is a part of it.
    """

    def __init__(self, traffic: Traffic, *, has_disk: bool = False) -> None:
        super().__init__()
        self._traffic, self._has_disk = traffic, has_disk
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
        values = {
            "offload/to_device_bytes": moved.to_device_bytes,
            "offload/to_host_bytes": moved.to_host_bytes,
            "offload/idle_ms": moved.idle_seconds * 1e3,
        }
        if self._has_disk:
            values |= {
                "offload/disk_read_bytes": moved.disk_read_bytes,
                "offload/disk_written_bytes": moved.disk_written_bytes,
                "offload/disk_wait_ms": moved.disk_wait_seconds * 1e3,
            }
        log_exactly(pl_module, {name: value / num_steps for name, value in values.items()})
