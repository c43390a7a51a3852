"""Cuts a JSON file into the objects that are its records: those of one array, or objects that follow one another."""

import re
from collections.abc import Iterator
from typing import Final

from genesis.data.sources.blocks import Record, check_record_bytes, read_blocks
from genesis.data.sources.entry import DamagedFileError
from genesis.data.sources.files import Span

_TOKEN: Final = re.compile(rb'["{}\[\]]')
_TEXT: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""What stands between the quotes of a text; an escape at the end of the data, which is not whole yet, is left."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def split_values(span: Span, start: int) -> Iterator[Record]:
    """Yields the values of a file from the one at offset `start` on; memory is bounded by the largest value.

    Raises:
        DamagedFileError: The file is no such sequence, or has no end.
    """
    values = _Values(span)
    for block, position in read_blocks(span.file):
        for begin, data in values.take(block):
            if begin >= start:
                yield Record(begin, data, begin + len(data), position)
    values.check_end()


class _Values:
    """What was read of a file and is not a whole value yet.

    Places count from the beginning of the data: `_at`, where the search goes on, `_begin` of a value, and `_quote` of a
    text that has no end yet.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._data = b""
        self._offset = 0
        self._at = 0
        self._depth = 0
        self._begin: int | None = None
        self._quote: int | None = None
        self._num_values = 0
        self._is_array: bool | None = None
        self._is_over = False

    def take(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields the offset and the bytes of each value that ends in the next block."""
        self._data += block
        if self._offset == 0 and self._begin is None and self._data.startswith(_BYTE_ORDER_MARK):
            self._skip(len(_BYTE_ORDER_MARK))
        used = 0
        while token := self._find_token():
            first, begin = token
            if self._begin is None:
                is_last = first == b"]" and self._is_array is True
                has_comma = self._is_array and self._num_values and not is_last and not self._is_over
                self._check_gap(self._data[used:begin], used, b"," if has_comma else b"")
                if self._is_over:
                    raise self._refuse(first, begin)
                used = self._at
                if is_last or (first == b"[" and self._is_array is None):
                    self._is_array, self._is_over = True, is_last
                    continue
                self._is_array = bool(self._is_array)
                self._begin = begin
            self._depth += (first in b"{[") - (first in b"}]")
            if self._depth <= 0:
                self._num_values += 1
                check_record_bytes(self._span.file, self._offset + self._begin, self._at - self._begin)
                yield self._offset + self._begin, self._data[self._begin : self._at]
                self._begin, self._depth, used = None, 0, self._at
        gap = self._data[used : len(self._data) if self._quote is None else self._quote]
        if self._begin is None and gap.strip() != b",":  # a comma before a value that is to come
            self._check_gap(gap, used, b"")
        self._skip(used if self._begin is None else self._begin)
        check_record_bytes(self._span.file, self._offset, len(self._data))

    def _find_token(self) -> tuple[bytes, int] | None:
        """Returns the next bracket, or the quote of the next whole text, and its place; None at the end of the data."""
        if self._quote is None:
            token = _TOKEN.search(self._data, self._at)
            self._at = len(self._data) if token is None else token.end()
            if token is None:
                return None
            if token[0] != b'"':
                return token[0], token.start()
            self._quote = token.start()
        match = _TEXT.match(self._data, self._at)
        assert match is not None, "it matches no bytes, too"
        self._at = match.end()
        if self._data[self._at : self._at + 1] != b'"':
            return None
        self._at, begin, self._quote = self._at + 1, self._quote, None
        return b'"', begin

    def check_end(self) -> None:
        """Checks that the file ends where its values do."""
        if self._begin is not None or (self._is_array and not self._is_over):
            raise DamagedFileError(f"{self._span.file.path} is truncated: its JSON has no end; fetch it again")
        self._check_gap(self._data, 0, b"")

    def _skip(self, num_bytes: int) -> None:
        self._data = self._data[num_bytes:]
        self._offset += num_bytes
        self._at = max(0, self._at - num_bytes)
        self._begin = None if self._begin is None else self._begin - num_bytes
        self._quote = None if self._quote is None else self._quote - num_bytes

    def _check_gap(self, gap: bytes, place: int, wanted: bytes) -> None:
        if (found := gap.strip()) != wanted:
            raise self._refuse(found, place)

    def _refuse(self, found: bytes, place: int) -> DamagedFileError:
        """Returns the error about what stands beside the values; a value itself is checked when it is parsed."""
        shown = found[:40].decode(errors="replace")
        return DamagedFileError(
            f"{self._span.file.path}, offset {self._offset + place}: {shown!r} is no part of an array of JSON "
            "objects, nor of objects that follow one another; correct it, or set format: text to learn the file itself"
        )
