"""What the layers of a decoder keep of earlier tokens, so that a new token need not compute them again.

B  sequences of a micro-batch     L  slots of a sequence, one for each token
"""

import copy
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.functional import pad

from genesis.base.device import send
from genesis.model.attend.metadata import CachedTokens


class CacheTensor(NamedTuple):
    """A tensor that a layer keeps for each sequence."""

    shape: tuple[int, ...]
    """The sizes for one token, or of the whole state."""
    is_state: bool = False
    """Whether each token replaces the tensor, as in a recurrence; otherwise each token has a slot of its own."""
    dtype: torch.dtype | None = None
    """None for the dtype of the model."""

    def sizes(self, num_rows: int, num_slots: int) -> tuple[int, ...]:
        """Returns the shape for several sequences."""
        return (num_rows, *self.shape) if self.is_state else (num_rows, num_slots, *self.shape)

    def count_bytes(self, num_rows: int, num_slots: int, element_bytes: int) -> int:
        """Returns the bytes for several sequences of a model whose elements have that many bytes."""
        itemsize = element_bytes if self.dtype is None else self.dtype.itemsize
        return torch.Size(self.sizes(num_rows, num_slots)).numel() * itemsize


@dataclass
class Stack:
    """One kind of cached tensor of all layers that have it: one tensor, so that a row is copied by one kernel."""

    kind: CacheTensor
    layers: list[int]
    data: Tensor
    """The first dimension belongs to `layers`, the second to the rows, the third to the slots, if it has slots."""


class KVCache:
    """What was computed of the tokens that were already given to the model: keys and values, latents, or states.

    Sequences of a batch may have different lengths: pad them on the right and call `expect` with the lengths without
    padding, then `advance` with the same lengths after the forward. Slots of padding are overwritten before any token
    can attend to them, and states skip padding. The lengths are also known on the host, so that no forward waits for
    the device.

    Args:
        layers: What each layer keeps.
        num_rows: The number of sequences.
        num_slots: The number of tokens of a sequence that fit.
        device: The device.
        dtype: The dtype of the model.
    """

    def __init__(
        self,
        layers: Sequence[tuple[CacheTensor, ...]],
        num_rows: int,
        num_slots: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        alike: dict[tuple[CacheTensor, ...], list[int]] = {}
        for layer, kinds in enumerate(layers):
            alike.setdefault(kinds, []).append(layer)
        self.stacks = [
            Stack(kind, of_kind, _zeros(shape, device, kind.dtype or dtype))
            for kinds, of_kind in alike.items()
            for kind in kinds
            for shape in [(len(of_kind), *kind.sizes(num_rows, num_slots))]
        ]
        self.num_slots = num_slots
        self._num_layers, self._device = len(layers), torch.device(device)
        self._num_new: Tensor | None = None
        self._num_shared = 0
        self._set_lengths(torch.zeros(num_rows, dtype=torch.int64))

    def _set_lengths(self, lengths: Int64[Tensor, " B"]) -> None:
        self.host_lengths = lengths
        self.lengths: Int64[Tensor, " B"] = send(lengths, self._device)
        self._is_on_host = self._device.type == "cpu"  # where host and device share a tensor

    @property
    def has_states(self) -> bool:
        """Whether some layer has a state, which cannot go back to an earlier token."""
        return any(stack.kind.is_state for stack in self.stacks)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(stack.data.nbytes for stack in self.stacks)

    @property
    def cached(self) -> CachedTokens:
        """The numbers of tokens in the cache."""
        shortest, longest = self.host_lengths.aminmax()
        return CachedTokens(self.lengths, int(shortest), int(longest), self.num_slots, self._num_new)

    def of_layers(self) -> list[tuple[Tensor, ...]]:
        """Returns the tensors that each layer reads and writes, in the order in which its mixer lists them."""
        given: list[tuple[Tensor, ...]] = [()] * self._num_layers
        for stack in self.stacks:
            for index, layer in enumerate(stack.layers):
                # By index, because a view from an iteration over a tensor must not be written to.
                given[layer] += (stack.data[index],)
        return given

    def expect(self, num_tokens: Int64[Tensor, " B"]) -> None:
        """Sets how many tokens of each sequence in the next forward are not padding; without a call, all of them.

        Args:
            num_tokens: The numbers, on the host.
        """
        self._num_new = send(num_tokens, self._device)

    def advance(self, num_tokens: Int64[Tensor, " B"] | int) -> None:
        """Adds the tokens of the last forward to each sequence's length.

        Args:
            num_tokens: The number of new tokens of each sequence, on the host.
        """
        self._num_new = None
        self.host_lengths += num_tokens
        if not self._is_on_host:
            if isinstance(num_tokens, Tensor):
                num_tokens = send(num_tokens, self._device)
            self.lengths += num_tokens

    def _with_data(self, data: Sequence[Tensor]) -> "KVCache":
        part = copy.copy(self)
        part.stacks = [Stack(stack.kind, stack.layers, one) for stack, one in zip(self.stacks, data, strict=True)]
        return part

    def view(self, start: int, stop: int) -> "KVCache":
        """Returns the cache of the sequences from `start` to `stop`, which shares memory with this one."""
        part = self._with_data([stack.data[:, start:stop] for stack in self.stacks])
        part.lengths, part.host_lengths = self.lengths[start:stop], self.host_lengths[start:stop]
        return part

    def branch(self, parents: Sequence[int], lengths: Sequence[int], num_slots: int) -> "KVCache":
        """Returns a cache of its own whose sequences begin as sequences of this one.

        Args:
            parents: For each new sequence, the sequence of this cache that it continues.
            lengths: The number of tokens of its parent that each new sequence keeps.
            num_slots: The number of tokens of a sequence that fit into the new cache.
        """
        assert not self.has_states, "a state cannot go back to an earlier token"
        copies = []
        for stack in self.stacks:
            # On a CPU this copy is many times as fast as an index into a part of the slots.
            copied = torch.stack([stack.data[:, row, :num_slots] for row in parents], dim=1)
            num_missing = num_slots - copied.shape[2]
            sides = (*(0, 0) * len(stack.kind.shape), 0, num_missing)
            copies.append(pad(copied, sides) if num_missing > 0 else copied)
        cache = self._with_data(copies)
        cache.num_slots, cache._num_new, cache._num_shared = num_slots, None, 0
        cache._set_lengths(torch.tensor(lengths, dtype=torch.int64))
        return cache

    def copy_slots(self, start: int, stop: int) -> list[Tensor]:
        """Returns a copy of what the first sequence has for the tokens from `start` to `stop`, where it ends.

        That is the slots of these tokens, and each state whole.
        """
        return [
            (stack.data[:, 0] if stack.kind.is_state else stack.data[:, 0, start:stop]).clone() for stack in self.stacks
        ]

    def put_slots(self, start: int, stop: int, copies: Sequence[Tensor]) -> None:
        """Gives the first sequence what `copy_slots` returned of a sequence with the same tokens up to `stop`."""
        for stack, copied in zip(self.stacks, copies, strict=True):
            (stack.data[:, 0] if stack.kind.is_state else stack.data[:, 0, start:stop]).copy_(copied)

    def share(self) -> None:
        """Copies the tokens of the first sequence to all others; from now on every new sequence starts after them."""
        assert not self.has_states, "a state cannot go back to where a sequence starts"
        self._num_shared = int(self.host_lengths[0])
        for stack in self.stacks:
            stack.data[:, 1:, : self._num_shared] = stack.data[:, :1, : self._num_shared]
        self.lengths.fill_(self._num_shared)
        self.host_lengths.fill_(self._num_shared)

    def copy_row(self, source: int, target: int) -> None:
        """Copies sequence `source` over sequence `target`."""
        length = int(self.host_lengths[source])
        for stack in self.stacks:
            if stack.kind.is_state:
                stack.data[:, target] = stack.data[:, source]
            else:  # only the slots in use: the rest of a row may be long, and is overwritten before it is read
                stack.data[:, target, :length] = stack.data[:, source, :length]
        self._set_length(target, length)

    def free_row(self, row: int, *, is_number: bool = True) -> None:
        """Makes room for a new sequence, which starts at the first slot, or after the tokens that all share.

        Args:
            row: The row of the sequence that ends.
            is_number: Whether all that it has in the cache is finite. A mask gives old values a weight of zero, and
                zero times NaN would be NaN.
        """
        for stack in self.stacks:
            if stack.kind.is_state:
                stack.data[:, row] = 0.0
            elif not is_number:
                stack.data[:, row, self._num_shared :] = 0.0
        self._set_length(row, self._num_shared)

    def _set_length(self, row: int, length: int) -> None:
        self.lengths[row].fill_(length)
        self.host_lengths[row] = length


def _zeros(shape: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Returns zeros, which on a CPU take memory page by page as they are overwritten: most texts are short."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not num_bytes:
        return torch.zeros(shape, device=device, dtype=dtype)
    # torch.zeros would write all of them. Private: a forked process has a copy.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
