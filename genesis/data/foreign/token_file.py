"""What the reader of a foreign format says of one file: where its tokens lie, and where documents end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from genesis.errors import UserError

TOKEN_DTYPES: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
"""Types that tokens may have on disk, as numpy names them."""
ENDS_PER_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class Run:
    """Tokens that lie one after another in a file, at least one."""

    byte_offset: int
    num_tokens: int


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens.

    Args:
        path: The file.
        file_bytes: Its size.
        dtype: Of its tokens: one of `TOKEN_DTYPES`.
        runs: In their order.
        read_ends: Yields the documents' ends in blocks, counted in tokens over all runs; no document reaches from one
            run into the next. None where the format does not say where documents end.
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
    """Returns the runs of a file whose tokens lie one after another."""
    return (Run(byte_offset, num_tokens),) if num_tokens else ()


def file_size(path: Path) -> int:
    """Returns a file's size.

    Raises:
        UserError: It can't be read.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); mend the path") from None


def map_array(path: Path, dtype: str, byte_offset: int, count: int) -> NDArray[np.integer]:
    """Returns a part of a file as an array that is read from disk where it is used."""
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=byte_offset, shape=(count,))
