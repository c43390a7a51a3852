"""What the data loader gives to the training step: the accumulation window.

B  sequences of one micro-batch on one rank     S  tokens of one sequence
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from genesis.loss import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "MicroBatch", "AccumulationWindow"]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward consume on one rank.

    `labels[b, s]` is the token that follows `input_ids[b, s]` in its document, or `IGNORE_INDEX`.
    `document_ids` counts from 0 within each row; attention and positions never cross a change of it.
    """

    input_ids: Int64[Tensor, "B S"]
    labels: Int64[Tensor, "B S"]
    document_ids: Int32[Tensor, "B S"]

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the same micro-batch on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            document_ids=self.document_ids.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        """Returns the same micro-batch in page-locked memory."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            document_ids=self.document_ids.pin_memory(),
        )


@dataclass(frozen=True)
class AccumulationWindow:
    """This rank's micro-batches between two optimizer steps.

    Args:
        micro_batches: In the order in which they run.
        num_valid_tokens: Labels of this rank's micro-batches that are not `IGNORE_INDEX`.
        num_bytes: UTF-8 bytes of text behind those labels, for bits per byte.
        data_position: Global sequences consumed once this window is (all ranks' rows).
    """

    micro_batches: tuple[MicroBatch, ...]
    num_valid_tokens: int
    num_bytes: int
    data_position: int

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the same window with its tensors on `device`."""
        return replace(self, micro_batches=tuple(m.to(device, non_blocking) for m in self.micro_batches))

    def pin_memory(self) -> Self:
        """Returns the same window with its tensors in page-locked memory."""
        return replace(self, micro_batches=tuple(m.pin_memory() for m in self.micro_batches))
