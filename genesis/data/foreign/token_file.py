"""A token file of another tool, as the readers of formats describe it: runs of tokens and document ends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis_callbacks.base.untrusted import check_file, open_file

TOKEN_DTYPES: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
"""Types that tokens may have on disk, as numpy names them."""
ENDS_PER_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class Run:
    """Contiguous tokens in a file, at least one."""

    byte_offset: int
    num_tokens: int


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens.

    Args:
        path: The file.
        file_bytes: The file's size.
        dtype: The type of its tokens, one of `TOKEN_DTYPES`.
        runs: The runs of tokens, in order.
        read_ends: Yields the document ends in blocks, counted in tokens over all runs; no document extends over two
            runs. None if the format has no document ends.
    """

    path: Path
    file_bytes: int
    dtype: str
    runs: tuple[Run, ...]
    read_ends: Callable[[], Iterator[NDArray[np.int64]]] | None

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of all runs."""
        return sum(run.num_tokens for run in self.runs)


def one_run(byte_offset: int, num_tokens: int) -> tuple[Run, ...]:
    """Returns the runs of a file with contiguous tokens."""
    return (Run(byte_offset, num_tokens),) if num_tokens else ()


def file_size(path: Path) -> int:
    """Returns a file's size.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return check_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct the path") from None


def map_array(path: Path, dtype: str, byte_offset: int, count: int) -> NDArray[np.integer]:
    """Returns a part of a file as a memory-mapped array."""
    if not count:
        return np.empty(0, dtype)
    with open_file(path) as file:
        return np.memmap(file, dtype=dtype, mode="r", offset=byte_offset, shape=(count,))
