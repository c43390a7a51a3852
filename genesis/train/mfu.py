"""The denominator of MFU: what the devices of a fit could compute at most, in the type that the fit multiplies."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from genesis.device import is_host, name_device
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis_callbacks.device_peaks import PeakType, compute_mfu, read_peak_flops


def choose_peak_type(precision: str | None) -> PeakType:
    """Returns which peak counts under a precision, as the Trainer names it and torch multiplies now."""
    if precision in ("bf16-mixed", "bf16-true"):
        return "bfloat16"
    if precision == "16-mixed":
        return "float16"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tfloat32"


class MFUMeter:
    """Computes the MFU of a fit on this rank's device, if the device's peak is known. No communication.

    Args:
        trainer: Whose strategy has set the device up.
        decoder: What trains.
        adapter: The adapters that train in its place; None where all of it trains.
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
        """Returns the MFU of this rank's device by its metric key; nothing where the peak is not known.

        Args:
            tokens_per_second: Of this rank, those without a label included, which cost the same.
            seq_len: Length of the sequences.
        """
        if self._peak is None:
            return {}
        if seq_len not in self._flops_per_token:
            self._flops_per_token[seq_len] = count_flops_per_token(self._decoder, seq_len, self._adapter)
        return {"train/mfu": compute_mfu(tokens_per_second, self._flops_per_token[seq_len], self._peak)}
