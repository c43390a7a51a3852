"""The accumulation window, which the data loader gives to the training step.

B  sequences of one micro-batch on one rank     S  tokens of one sequence
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from genesis.model.loss import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "MicroBatch", "AccumulationWindow"]


@dataclass(frozen=True)
class MicroBatch:
    """The tensors that one forward and backward consume on one rank.

    `labels[b, s]` is the token that follows `input_ids[b, s]` in its document, or `IGNORE_INDEX`.
    `document_ids` counts from 0 within each row; attention and positions never cross a change of the id.
    `document_offsets`, which loaders provide, has the starts of the documents in the flattened rows and the end of the
    last one. If the model computed the offsets from `document_ids`, the host would wait for the device.
    `extra` has what an objective needs beside the labels, by name.
    """

    input_ids: Int64[Tensor, "B S"]
    labels: Int64[Tensor, "B S"]
    document_ids: Int32[Tensor, "B S"]
    document_offsets: Int32[Tensor, " num_documents+1"] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names of their fields; those of `extra` as `extra.NAME`."""
        named = {name: getattr(self, name) for name in _TENSOR_FIELDS}
        named |= {f"{_EXTRA}{name}": tensor for name, tensor in self.extra.items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Returns the micro-batch with other tensors, named as in `tensors`."""
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_EXTRA)}
        extra = {name.removeprefix(_EXTRA): tensor for name, tensor in tensors.items() if name.startswith(_EXTRA)}
        return replace(self, **own, extra=extra)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the same micro-batch on `device`."""
        return self.with_tensors(
            {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors.items()}
        )


_EXTRA: Final = "extra."
_TENSOR_FIELDS: Final = tuple(name for name in MicroBatch.__dataclass_fields__ if name != "extra")


@dataclass(frozen=True)
class AccumulationWindow:
    """This rank's micro-batches between two optimizer steps.

    Args:
        micro_batches: The micro-batches, in the order in which they run.
        num_valid_tokens: Number of labels in this rank's micro-batches that are not `IGNORE_INDEX`.
        num_bytes: Number of UTF-8 bytes of text behind those labels, for bits per byte.
        data_position: Global sequences consumed after this window, over all ranks.
        document_lengths: Lengths of the documents and of the padding in these micro-batches, on the host; None if
            unknown.
        num_units: Numbers of other units than tokens in these micro-batches, such as pairs, by name.
        packed: The buffers of `pin_memory`, one per type: all tensors of the micro-batches, one after another.
        is_skipped: Whether the window stands for a global batch that is skipped (`data.skip_positions`); the same on
            all ranks.
        figures: In a validation without micro-batches, the sums to log, such as rewards, by name.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_valid_tokens: int
    num_bytes: int
    data_position: int
    num_units: Mapping[str, int] = field(default_factory=dict)
    is_skipped: bool = False
    document_lengths: np.ndarray[Any, np.dtype[np.int64]] | None = field(default=None, repr=False, compare=False)
    packed: tuple[Tensor, ...] | None = field(default=None, repr=False, compare=False)
    figures: Mapping[str, float] = field(default_factory=dict)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns the same window with its tensors on `device`; page-locked memory needs only one copy per type."""
        if self.packed is None:
            return replace(self, micro_batches=tuple(m.to(device, non_blocking) for m in self.micro_batches))
        return self._unpack(tuple(tensor.to(device, non_blocking=non_blocking) for tensor in self.packed), None)

    def pin_memory(self) -> Self:
        """Returns the same window with its tensors in page-locked memory."""
        of_type: dict[torch.dtype, list[Tensor]] = {}
        for micro_batch in self.micro_batches:
            for tensor in micro_batch.tensors.values():
                of_type.setdefault(tensor.dtype, []).append(tensor.flatten())
        packed = tuple(torch.cat(tensors).pin_memory() for tensors in of_type.values())
        return self._unpack(packed, packed)

    def _unpack(self, flat: tuple[Tensor, ...], packed: tuple[Tensor, ...] | None) -> Self:
        """Returns this window with views of `flat` as its tensors, in the order of `pin_memory`."""
        left = {tensor.dtype: tensor for tensor in flat}
        micro_batches = []
        for micro_batch in self.micro_batches:
            views = {}
            for name, tensor in micro_batch.tensors.items():
                own, left[tensor.dtype] = left[tensor.dtype].tensor_split([tensor.numel()])
                views[name] = own.view(tensor.shape)
            micro_batches.append(micro_batch.with_tensors(views))
        return replace(self, micro_batches=tuple(micro_batches), packed=packed)
