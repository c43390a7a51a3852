"""The blocks of named tensors that a rank holds, as saves, restores and initialisation know them. No communication."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from genesis_callbacks.base.errors import numbered

from .checkpoint_errors import UnsupportedStateError

__all__ = ["LocalShard", "TensorShard", "local_shards"]

TensorKind = Literal["parameter", "buffer", "optimizer", "state"]


@dataclass(frozen=True)
class TensorShard:
    """The description of a block of a named tensor that some rank holds; it can be sent to other ranks."""

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class LocalShard:
    """A part with its live data, which shares memory with its tensor."""

    part: TensorShard
    data: Tensor


def local_shards(name: str, tensor: Tensor, kind: TensorKind) -> list[LocalShard]:
    """Returns the blocks of `tensor` that this rank holds; empty blocks are left out. No communication.

    Raises:
        UnsupportedStateError: The tensor cannot be saved as it is: sparse, quantized, or with a pending reduction.
    """
    # These have no plain elements in row-major order, which is all that a shard and its digest can hold.
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedStateError(f"{name}: only dense, materialised tensors can be saved, not {tensor.type()}")
    try:
        chunks = local_chunks(tensor)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedStateError(f"{name}: {error}") from error
    shape = tuple(tensor.shape)
    # An empty tensor keeps its empty block; otherwise the checkpoint would lack the tensor.
    is_empty = math.prod(shape) == 0
    return [
        LocalShard(TensorShard(name, kind, shape, tensor.dtype, offsets, sizes), data)
        for offsets, sizes, data in chunks
        if is_empty or math.prod(sizes) > 0
    ]


def local_chunks(tensor: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """Returns (offsets, sizes, data) of this rank's elements: all of a plain tensor, the shard of a DTensor.

    The data shares memory with the live tensor. No communication.

    Raises:
        ValueError: The tensor waits for a reduction (a Partial placement), or its shard is no single block.
    """
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape), tensor.detach())]
    chunks: Any = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch gives it no types
    local = tensor.to_local().detach()
    if len(chunks) != 1:
        raise ValueError(f"a local shard of {numbered(len(chunks), 'blocks')}: only single blocks can be saved")
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    if tuple(local.shape) != sizes:
        raise ValueError(f"a local shard of shape {tuple(local.shape)} , but its placement requires {sizes}")
    return [(offsets, sizes, local)]
