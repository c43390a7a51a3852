"""Writes pickles of many records of one form: `pickle` would take an object and some microseconds for each.

A record is a list of pieces: opcodes that all rows have, and columns with a number for each row. numpy then puts the
numbers of all rows between the opcodes. `pickletools` describes the opcodes; those here are of protocol 2, which every
unpickler reads.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Piece = bytes | NDArray[Any]
_PROTOCOL: Final = 2
_HEADER: Final = bytes([0x80, _PROTOCOL])


def encode(value: Any) -> bytes:
    """Returns the opcodes that make a value, which refer to nothing before them."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=_PROTOCOL)
    pickler.fast = True  # stores nothing in the memo, whose numbers `RowPickler` gives out
    pickler.dump(value)
    return stream.getvalue().removeprefix(_HEADER).removesuffix(pickle.STOP)


class RowPickler:
    """Makes the pieces of one pickle, and what it refers to by number: classes, and names of attributes and files."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._known: dict[Any, NDArray[np.uint32]] = {}

    def share(self, value: Any) -> bytes:
        """Returns the opcode that refers to a value, which must be hashable; the pickle makes it once."""
        return pickle.LONG_BINGET + self.share_all((value,)).tobytes()

    def share_all(self, values: Sequence[Any]) -> NDArray[np.uint32]:
        """Returns the numbers of some values, for `refer`."""
        if values not in self._known:
            first = len(self._parts)
            numbers = np.arange(first, first + len(values), dtype="<u4")
            for value, number in zip(values, numbers, strict=True):
                self._parts.append(encode(value) + pickle.LONG_BINPUT + number.tobytes() + pickle.POP)
            self._known[values] = numbers
        return self._known[values]

    def record(self, kind: type, **attributes: Sequence[Piece]) -> list[Piece]:
        """Returns the pieces of an object with attributes and no arguments, as `pickle` makes it."""
        inner = [piece for name, pieces in attributes.items() for piece in (self.share(name), *pieces)]
        begin = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
        return [self.share(kind) + begin, *inner, pickle.SETITEMS + pickle.BUILD]

    def call(self, function: type, numbers: NDArray[np.int64]) -> list[Piece]:
        """Returns the pieces of a call with one argument, a tuple of numbers: `[row, number]`."""
        inner = [piece for column in numbers.T for piece in count(column)]
        return [self.share(function) + pickle.MARK, *inner, pickle.TUPLE + pickle.TUPLE1 + pickle.REDUCE]

    def finish(self, value: Sequence[Piece]) -> bytes:
        """Returns the pickle of a value."""
        return b"".join((_HEADER, *self._parts, fill(value, 1), pickle.STOP))


def refer(numbers: NDArray[np.uint32]) -> list[Piece]:
    """Returns the pieces that refer to shared values by their numbers, one for each row."""
    return [pickle.LONG_BINGET, numbers]


def count(numbers: NDArray[np.int64]) -> list[Piece]:
    """Returns the pieces of a whole number in each row."""
    if not numbers.size or (numbers.min() >= -(1 << 31) and numbers.max() < 1 << 31):
        return [pickle.BININT, numbers.astype("<i4")]
    return [pickle.LONG1 + b"\x08", numbers.astype("<i8")]


def fill(pieces: Sequence[Piece], num_rows: int) -> bytes:
    """Returns the opcodes of all rows, one after the other."""
    kinds = [f"V{len(piece)}" if isinstance(piece, bytes) else piece.dtype for piece in pieces]
    rows = np.empty(num_rows, dtype=[(f"f{number}", kind) for number, kind in enumerate(kinds)])
    for number, piece in enumerate(pieces):
        rows[f"f{number}"] = np.void(piece) if isinstance(piece, bytes) else piece
    return rows.tobytes()


def as_list(items: bytes) -> bytes:
    """Returns the opcodes of a list, given those of its items."""
    return pickle.EMPTY_LIST + pickle.MARK + items + pickle.APPENDS


def as_dict(entries: bytes) -> bytes:
    """Returns the opcodes of a dict, given those of its keys, each followed by its value."""
    return pickle.EMPTY_DICT + pickle.MARK + entries + pickle.SETITEMS
