"""The denominator of MFU: the peak of a fit's devices in the type of its matrix products."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from genesis.device import is_host, name_device
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis_callbacks.device_peaks import PeakType, compute_mfu, read_peak_flops


def choose_peak_type(precision: str | None) -> PeakType:
    """Returns the type of the peak for a Trainer's precision under torch's current settings for matrix products."""
    if precision in ("bf16-mixed", "bf16-true"):
        return "bfloat16"
    if precision == "16-mixed":
        return "float16"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tfloat32"


class MFUMeter:
    """Computes the MFU of a fit on this rank's device, if the device's peak is known. No communication.

    Args:
        trainer: The Trainer, whose strategy has set up the device.
        decoder: The model.
        adapter: The trained adapters; None if the whole model is trained.
    """

    def __init__(self, trainer: pl.Trainer, decoder: DecoderConfig, adapter: AdapterConfig | None = None) -> None:
        device = trainer.strategy.root_device
        self._decoder, self._adapter = decoder, adapter
        self._flops_per_token: dict[int, float] = {}
        self._peak: float | None = None
        if is_host(device.type):
            return
        name = name_device(device.type, device.index or 0)
        peak_type = choose_peak_type(trainer.precision)
        self._peak = read_peak_flops(name, peak_type)
        if self._peak is None:
            rank_zero_info(f"the peak of {name!r} for products of {peak_type} is not known: train/mfu is not logged")

    def measure(self, tokens_per_second: float, seq_len: int) -> dict[str, float]:
        """Returns the MFU of this rank's device by its metric key; empty if the peak is unknown.

        Args:
            tokens_per_second: The tokens of this rank per second, including those without a label, which cost the same.
            seq_len: The length of the sequences.
        """
        if self._peak is None:
            return {}
        if seq_len not in self._flops_per_token:
            self._flops_per_token[seq_len] = count_flops_per_token(self._decoder, seq_len, self._adapter)
        return {"train/mfu": compute_mfu(tokens_per_second, self._flops_per_token[seq_len], self._peak)}
