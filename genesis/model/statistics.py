"""Sums the parts' statistics over the micro-batches of a window, and names the numbers of the sums."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from genesis.model.part import Statistics

LOSS_SUM: Final = "loss_sum"
"""The last component of the name of an auxiliary loss."""


def list_auxiliary_losses(statistics: Mapping[str, Statistics]) -> list[Tensor]:
    """Returns the auxiliary losses of the parts, each in nats, a sum over the tokens of one forward."""
    return [part.loss_sum for part in statistics.values() if part.loss_sum is not None]


def add_statistics(sums: dict[str, Tensor], statistics: Mapping[str, Statistics]) -> None:
    """Adds one forward's statistics to `sums`, float64 tensors by the names of part and figure. Does not wait.

    Args:
        sums: The sums of the previous forwards, changed in place.
        statistics: The statistics by the canonical names of parts, as the decoder returns them.
    """
    for part, reported in statistics.items():
        auxiliary = {} if reported.loss_sum is None else {LOSS_SUM: reported.loss_sum}
        for name, value in {**reported.counts, **auxiliary}.items():
            # float64 counts exactly; float32 loses single tokens from 2**24 on.
            key, added = f"{part}.{name}", value.detach().to(torch.float64)
            sums[key] = sums[key] + added if key in sums else added


def name_figures(sums: Mapping[str, Tensor]) -> list[str]:
    """Returns the name of each number in `sums`; elements of a vector have their index at the end.

    Example:
        >>> name_figures({"blocks.0.feed_forward.loss_sum": torch.zeros(()), "a.load_tokens": torch.zeros(2)})
        ['blocks.0.feed_forward.loss_sum', 'a.load_tokens.0', 'a.load_tokens.1']
    """
    return [
        name if value.ndim == 0 else f"{name}.{index}" for name, value in sums.items() for index in range(value.numel())
    ]
