"""A 64-bit digest of a tensor that adds up over any sharding.

The digest is the sum, modulo 2**64, of `word[i] * (2 * i + 1)`: the words are the elements' bit patterns as unsigned
32-bit words (narrower elements are widened, wider ones are several words, least significant first), and `i` counts
words in the *global* tensor in row-major order. The digest depends on the order of the elements. The digests of the
chunks that tile a tensor sum to the digest of the tensor, so that digests can be compared across shardings and world
sizes without gathering tensors.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DIGEST_MODULUS = 1 << 64
_WORD_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint32, 16: torch.uint32}
_CPU_BLOCK_WORDS = 1 << 15  # fits the caches of a core
# Large enough to fill a GPU, and small enough to stay allocated for the whole run: three buffers of 8 bytes per word.
_DEVICE_BLOCK_WORDS = 1 << 20
_SUMS_PER_BLOCK = 3


def _words(chunk: Tensor) -> Tensor:
    flat = chunk.detach().contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():  # flags outside of the elements' bits change the values
        flat = flat.resolve_conj().resolve_neg()
    return flat.view(_WORD_DTYPES[flat.element_size()])


def _num_contiguous_dims(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the number of trailing dims over which a chunk is one run of the global tensor's row-major order."""
    dims = 0
    for whole, part in zip(reversed(shape), reversed(sizes), strict=True):
        dims += 1
        if whole != part:
            break
    return dims


def _run_starts(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], run_dims: int) -> Tensor:
    """Returns the global element index at which each contiguous run of the chunk begins."""
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
    # Torch has few operations for uint64, so each sum is taken in int64. There an overflow wraps, which is arithmetic
    # modulo 2**64 read as a signed number. The caller reduces the Python integer, which may be negative, once more.
    total = 0
    for first in range(0, len(words), block_words):
        size = min(block_words, len(words) - first)
        block[:size].copy_(words[first : first + size])
        total += int(torch.dot(block[:size], weights[:size]))
        total += 2 * (start_word + first) * int(block[:size].sum())
    return total


def _digest_many_runs(words: Tensor, start_words: Tensor) -> int:
    """Returns the sum over runs of equal length; products wrap in int64, which is arithmetic modulo 2**64."""
    run_words = len(words) // len(start_words)
    columns = min(run_words, _CPU_BLOCK_WORDS)
    rows = max(1, _CPU_BLOCK_WORDS // columns)
    weights = torch.arange(columns, dtype=torch.int64) * 2 + 1
    runs = words.view(len(start_words), run_words)
    total = torch.zeros((), dtype=torch.int64)
    for row in range(0, len(start_words), rows):
        for column in range(0, run_words, columns):
            block = runs[row : row + rows, column : column + columns].to(torch.int64)
            total += (block * weights[: block.shape[1]]).sum()
            total += (block.sum(dim=1) * (start_words[row : row + rows] + column) * 2).sum()
    return int(total)


def digest_chunk(chunk: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Returns the summand of `chunk` in the digest of its tensor.

    The digest is computed on the chunk's device. Each call waits for the device once and allocates a scratch there: for
    many chunks use one `DigestScratch`. No communication.

    Args:
        chunk: A plain tensor, the part that begins at `offsets`.
        shape: Shape of the global tensor.
        offsets: Offset per tensor dim, in elements.
    """
    if chunk.numel() == 0:
        return 0
    if chunk.device.type != "cpu":
        num_words = chunk.numel() * -(-chunk.element_size() // 4)
        scratch = DigestScratch(chunk.device, min(num_words, _DEVICE_BLOCK_WORDS))
        return scratch.digest_all([(chunk, shape, offsets)])[0]
    sizes = tuple(chunk.shape)
    words = _words(chunk)
    words_per_element = len(words) // chunk.numel()
    start_words = _run_starts(shape, offsets, sizes, _num_contiguous_dims(shape, sizes)) * words_per_element
    if len(start_words) == 1:
        total = _digest_one_run(words, int(start_words[0]))
    else:
        total = _digest_many_runs(words, start_words)
    return total % DIGEST_MODULUS


def digest_tensor(tensor: Tensor) -> int:
    """Returns the digest of a whole plain tensor."""
    return digest_chunk(tensor, tuple(tensor.shape), (0,) * tensor.dim())


# ---- on an accelerator


@dataclass(frozen=True)
class _Block:
    """Some rows of a chunk's runs, and some of their columns, whose rows begin at equal distances in the global tensor.

    Attributes:
        row: The first row, counted over all of the chunk's runs.
        start_word: Global index of the first row's first word.
        stride_words: Distance from a row's first word to the next row's.
    """

    row: int
    num_rows: int
    column: int
    num_columns: int
    start_word: int
    stride_words: int

    def total(self, by_column: int, plain: int, by_row: int) -> int:
        """Returns the digest of the block from three sums over its words.

        The weight of the word in column j of row k is `(2 * j + 1) + 2 * start + 2 * stride * k`.

        Args:
            by_column: Sum of the words times `2 * j + 1`.
            plain: Sum of the words.
            by_row: Sum of the words times `2 * k + 1`, if there are several rows.
        """
        total = by_column + 2 * self.start_word * plain
        return total if self.num_rows == 1 else total + self.stride_words * (by_row - plain)


def _plan_blocks(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], words_per_element: int, block_words: int
) -> Iterator[_Block]:
    run_dims = _num_contiguous_dims(shape, sizes)
    num_outer = len(shape) - run_dims
    strides = [math.prod(shape[dim + 1 :]) for dim in range(num_outer)]
    # Runs begin at equal distances along the last dim outside of a run, and along the dims before it that it fills.
    first = max(0, num_outer - 1)
    while first > 0 and sizes[first] == shape[first]:
        first -= 1
    num_runs = math.prod(sizes[first:num_outer])
    stride_words = (strides[-1] if strides else 0) * words_per_element
    run_words = math.prod(sizes[num_outer:]) * words_per_element
    start = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    columns = min(run_words, block_words)
    rows = max(1, block_words // columns)
    for number, index in enumerate(itertools.product(*(range(size) for size in sizes[:first]))):
        begin = start + sum(place * stride for place, stride in zip(index, strides, strict=False))
        for row in range(0, num_runs, rows):
            for column in range(0, run_words, columns):
                yield _Block(
                    number * num_runs + row,
                    min(rows, num_runs - row),
                    column,
                    min(columns, run_words - column),
                    begin * words_per_element + row * stride_words + column,
                    stride_words,
                )


class DigestScratch:
    """Memory on a device for the digests of tensors of any size; it is allocated once.

    Not thread-safe; one stream at a time uses the object.

    Args:
        device: The device of the tensors.
        num_words: Number of words that are summed at a time.

    Raises:
        torch.OutOfMemoryError: The device lacks memory for the scratch.
    """

    def __init__(self, device: torch.device, num_words: int = _DEVICE_BLOCK_WORDS) -> None:
        self._num_words = num_words
        self._block = torch.empty(num_words, dtype=torch.int64, device=device)
        self._product = torch.empty_like(self._block)
        self._weights = torch.arange(num_words, dtype=torch.int64, device=device).mul_(2).add_(1)
        self._sums = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """The size of the scratch on the device."""
        return sum(one.nbytes for one in (self._block, self._product, self._weights, self._sums))

    def digest_all(self, chunks: Iterable[tuple[Tensor, Sequence[int], Sequence[int]]]) -> list[int]:
        """Returns the result of `digest_chunk` for each (chunk, shape, offsets). It waits for the device once.

        Raises:
            torch.OutOfMemoryError: A chunk is not contiguous, and the device lacks memory for a contiguous copy.
        """
        work = [self._plan(chunk, shape, offsets) for chunk, shape, offsets in chunks]
        num_blocks = sum(len(blocks) for _, blocks in work)
        if len(self._sums) < _SUMS_PER_BLOCK * num_blocks:
            self._sums = torch.empty(_SUMS_PER_BLOCK * num_blocks, dtype=torch.int64, device=self._sums.device)
        number = 0
        for runs, blocks in work:
            for block in blocks:
                self._sum_block(runs, block, _SUMS_PER_BLOCK * number)
                number += 1
        sums = iter(self._sums[: _SUMS_PER_BLOCK * num_blocks].cpu().tolist())
        return [
            sum(block.total(next(sums), next(sums), next(sums)) for block in blocks) % DIGEST_MODULUS
            for _, blocks in work
        ]

    def _plan(self, chunk: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> tuple[Tensor, list[_Block]]:
        """Returns a chunk's words, one run of the global tensor per row, and the blocks in which they are summed."""
        if chunk.numel() == 0:
            return chunk, []
        words = _words(chunk)
        words_per_element = len(words) // chunk.numel()
        blocks = list(_plan_blocks(shape, offsets, chunk.shape, words_per_element, self._num_words))
        num_outer = chunk.dim() - _num_contiguous_dims(shape, chunk.shape)
        return words.view(-1, math.prod(chunk.shape[num_outer:]) * words_per_element), blocks

    def _sum_block(self, runs: Tensor, block: _Block, first: int) -> None:
        """Starts the three sums of a block; the products wrap in int64, which is arithmetic modulo 2**64."""
        rows, columns, sums = block.num_rows, block.num_columns, self._sums
        wide = self._block[: rows * columns].view(rows, columns)
        product = self._product[: rows * columns].view(rows, columns)
        wide.copy_(runs[block.row : block.row + rows, block.column : block.column + columns])
        torch.mul(wide, self._weights[:columns], out=product)
        torch.sum(product.view(-1), 0, out=sums[first])
        torch.sum(wide.view(-1), 0, out=sums[first + 1])
        if rows > 1:
            by_row = self._product[:rows]
            torch.sum(wide, 1, out=by_row)
            torch.sum(by_row.mul_(self._weights[:rows]), 0, out=sums[first + 2])
