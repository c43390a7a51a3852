"""How many blocks of keys a kernel of attention sees in a document: what a comparison of two runs on a GPU is worth.

Kernels compute attention block by block of keys. The backward of some adds the gradients of the queries from all
blocks, in the order in which the blocks happen to end. The sum of two numbers is the same in any order, so that two
runs with short documents are equal whatever the kernel does.
"""

from typing import Final

KEY_BLOCK: Final = 128
"""Tokens in a block of keys, of the kernels with the largest blocks."""

ENOUGH_BLOCKS: Final = 4
"""Blocks with which sums in another order differ within a few steps."""


def count_key_blocks(num_tokens: int) -> int:
    """Returns the number of blocks of keys in a document of `num_tokens` tokens."""
    return -(-num_tokens // KEY_BLOCK)
