"""A 64-bit digest of a tensor that adds up over any sharding.

The digest is the sum, modulo 2**64, of `word[i] * (2 * i + 1)`: the words are the elements' bit patterns as unsigned
32-bit words (narrower elements are widened, wider ones are several words, least significant first), and `i` counts
words in the *global* tensor in row-major order. It depends on the order, and the digests of the chunks that tile a
tensor sum to the digest of the tensor, so that it can be compared across shardings and world sizes without gathering
anything.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DIGEST_MODULUS = 1 << 64
_WORD_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint32, 16: torch.uint32}
# Fits the caches of a CPU core; on other devices fewer and larger kernels are better.
_CPU_BLOCK_WORDS = 1 << 15
_DEVICE_BLOCK_WORDS = 1 << 24


def _words(chunk: Tensor) -> Tensor:
    flat = chunk.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_WORD_DTYPES[flat.element_size()])


def _num_contiguous_dims(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Trailing tensor dims over which a chunk is one run of the global tensor's row-major order."""
    dims = 0
    for whole, part in zip(reversed(shape), reversed(sizes), strict=True):
        dims += 1
        if whole != part:
            break
    return dims


def _run_starts(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], run_dims: int) -> Tensor:
    """Global element index at which each contiguous run of the chunk begins."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    starts = torch.tensor([start], dtype=torch.int64)
    for dim in range(len(shape) - run_dims):
        steps = torch.arange(sizes[dim], dtype=torch.int64) * strides[dim]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts


def _digest_one_run(words: Tensor, start_word: int) -> int:
    block_words = min(len(words), _CPU_BLOCK_WORDS)
    weights = torch.arange(block_words, dtype=torch.int64) * 2 + 1
    block = torch.empty(block_words, dtype=torch.int64)
    total = 0
    for first in range(0, len(words), block_words):
        size = min(block_words, len(words) - first)
        block[:size].copy_(words[first : first + size])
        total += int(torch.dot(block[:size], weights[:size]))
        total += 2 * (start_word + first) * int(block[:size].sum())
    return total


def _digest_many_runs(words: Tensor, start_words: Tensor) -> int:
    """Sums over runs of equal length; the products wrap in int64, which is arithmetic modulo 2**64."""
    run_words = len(words) // len(start_words)
    start_words = start_words.to(words.device)
    block_words = _CPU_BLOCK_WORDS if words.device.type == "cpu" else _DEVICE_BLOCK_WORDS
    columns = min(run_words, block_words)
    rows = max(1, block_words // columns)
    weights = torch.arange(columns, dtype=torch.int64, device=words.device) * 2 + 1
    runs = words.view(len(start_words), run_words)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for row in range(0, len(start_words), rows):
        for column in range(0, run_words, columns):
            block = runs[row : row + rows, column : column + columns].to(torch.int64)
            total += (block * weights[: block.shape[1]]).sum()
            total += (block.sum(dim=1) * (start_words[row : row + rows] + column) * 2).sum()
    return int(total)


def digest_chunk(chunk: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Returns the digest that `chunk` adds to the tensor of which it is a part.

    It is computed where the chunk lives. One synchronisation with the device; no communication.

    Args:
        chunk: A plain tensor, the part that begins at `offsets`.
        shape: The global tensor's.
        offsets: One per tensor dim, in elements.
    """
    if chunk.numel() == 0:
        return 0
    sizes = tuple(chunk.shape)
    words = _words(chunk)
    words_per_element = len(words) // chunk.numel()
    start_words = _run_starts(shape, offsets, sizes, _num_contiguous_dims(shape, sizes)) * words_per_element
    if len(start_words) == 1 and words.device.type == "cpu":
        total = _digest_one_run(words, int(start_words[0]))
    else:
        total = _digest_many_runs(words, start_words)
    return total % DIGEST_MODULUS


def digest_tensor(tensor: Tensor) -> int:
    """Returns the digest of a whole plain tensor."""
    return digest_chunk(tensor, tuple(tensor.shape), (0,) * tensor.dim())
