"""What a change of the global batch suggests for AdamW's rate."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RateProposal:
    """AdamW's options for another global batch.

    Args:
        factor: New global batch over the old one.
        lr: Learning rate.
        betas: Decay of the moments; None where the rule has no valid one, because the batch grows too much.
        eps: Added to the root of the second moment.

    References:
        Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, arXiv:2205.10287, definition
        5.3: the square-root scaling rule.
    """

    factor: float
    lr: float
    betas: tuple[float, float] | None
    eps: float


def scale_rate(lr: float, betas: tuple[float, float], eps: float, *, old_batch: int, new_batch: int) -> RateProposal:
    """Returns AdamW's options after the global batch has changed from `old_batch` to `new_batch`.

    Example:
        >>> scale_rate(3e-4, (0.9, 0.95), 1e-8, old_batch=128, new_batch=512).lr
        0.0006
    """
    factor = new_batch / old_batch
    scaled = (1.0 - factor * (1.0 - betas[0]), 1.0 - factor * (1.0 - betas[1]))
    is_valid = all(0.0 <= beta < 1.0 for beta in scaled)
    return RateProposal(factor, lr * math.sqrt(factor), scaled if is_valid else None, eps / math.sqrt(factor))
