"""Keys and values of beginnings of prompts, so that a beginning that several prompts share is computed once.

A prompt is read in blocks of `BLOCK_TOKENS` tokens, each by a forward of its own, whether it is stored or not. What a
block has in the cache therefore follows from its tokens and those before it, bit for bit, and a stored block is what
the forward would compute.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from torch import Tensor

BLOCK_TOKENS: Final = 256
"""Tokens of a block: enough that a forward of one row is as fast as a longer one."""


def name_blocks(prompt: Sequence[int], scope: str = "") -> list[bytes]:
    """Returns a name for each whole block of a prompt that has a token after it, which gives the first logits.

    Args:
        prompt: The ids.
        scope: Prompts of another scope have other names for the same tokens.
    """
    names: list[bytes] = []
    before = hashlib.sha256(scope.encode()).digest()
    ids = np.asarray(prompt, np.int64)
    for start in range(0, len(prompt) - BLOCK_TOKENS, BLOCK_TOKENS):
        before = hashlib.sha256(before + ids[start : start + BLOCK_TOKENS].tobytes()).digest()
        names.append(before)
    return names


class PrefixStore:
    """Blocks of one model by their names, on the model's device. Only one thread may use it at a time.

    Blocks that were not used for the longest time give way, the last of a prompt first: a block is useless without
    those before it.

    Args:
        max_bytes: The size of all blocks.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, list[Tensor]] = (
            OrderedDict()
        )  # the oldest first; each is older than the one before it in a prompt
        self.num_bytes = 0

    def find(self, names: Sequence[bytes]) -> list[list[Tensor]]:
        """Returns the blocks that are stored, up to the first that is not."""
        found = list(takewhile(self._blocks.__contains__, names))
        self._use(found)
        return [self._blocks[name] for name in found]

    def add(self, names: Sequence[bytes], block: list[Tensor]) -> bool:
        """Stores a block, which must not be changed, and returns whether there was room beside those before it.

        Args:
            names: The names of a prompt's blocks, up to this one.
            block: The block.
        """
        if not all(name in self._blocks for name in names[:-1]):
            return False
        if names[-1] not in self._blocks:
            num_bytes = _count_bytes(block)
            if num_bytes > self._max_bytes:
                return False
            self._use(names[:-1])
            while self.num_bytes + num_bytes > self._max_bytes:
                if len(self._blocks) == len(names) - 1:  # only those before it are left
                    return False
                _, oldest = self._blocks.popitem(last=False)
                self.num_bytes -= _count_bytes(oldest)
            self._blocks[names[-1]] = block
            self.num_bytes += num_bytes
        self._use(names)
        return True

    def clear(self) -> None:
        """Drops all blocks."""
        self._blocks.clear()
        self.num_bytes = 0

    def _use(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._blocks.move_to_end(name)


def _count_bytes(block: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in block)
