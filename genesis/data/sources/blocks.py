"""Reads the bytes of a file: decompressed, in blocks, and cut into records at a delimiter."""

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

import pyarrow as pa
import zstandard

from genesis.data.cache import open_copy
from genesis.data.remote import RemoteFile
from genesis.data.sources.binary import find_binary
from genesis.data.sources.entry import DamagedFileError
from genesis.data.sources.files import InputFile, Span, compression_of
from genesis.data.store import is_url
from genesis_callbacks.base.untrusted import open_file

DAMAGE: Final = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, pa.ArrowException)
"""Exceptions that readers raise for truncated and damaged files."""

_BLOCK_BYTES: Final = 1 << 20
_COMPRESSED_BLOCK_BYTES: Final = 1 << 16
_HEAD_BYTES: Final = 1 << 12
_ZST_SKIPPABLE: Final = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a frame without data, with which a file of Zstandard may begin."""
_COMPRESSION_MAGIC: Final = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}


@contextmanager
def open_local(found: InputFile) -> Iterator[Path]:
    """Yields the path of the file on the local disk; a cached copy that turns out to be damaged is removed."""
    if not is_url(found.path):
        yield Path(found.path)
        return
    with open_copy(RemoteFile(found.path, found.num_bytes, found.identity)) as path:
        try:
            yield path
        except (*DAMAGE, OSError):
            path.unlink(missing_ok=True)
            raise


def read_blocks(found: InputFile, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yields the file's decompressed bytes from `start` on, and how much of the file itself has been read."""
    compression = compression_of(found.path)
    with open_local(found) as path, open_file(path) as file:
        file.seek(start)
        if compression == ".gz":
            with gzip.open(file) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    yield block, file.tell()
        elif compression == ".zst":
            yield from _read_zst_blocks(file)
        else:
            while block := file.read(_BLOCK_BYTES):
                yield block, file.tell()


class Delimiter(NamedTuple):
    """The bytes between two records, and a pattern that also matches the line breaks of other systems in them."""

    plain: bytes
    pattern: re.Pattern[bytes] | None = None

    @classmethod
    def of(cls, separator: str) -> Self:
        """Returns the delimiter of a text between documents, of which a line break matches LF and CR LF."""
        plain = separator.encode().replace(b"\r\n", b"\n")
        pattern = re.compile(b"\r?\n".join(map(re.escape, plain.split(b"\n")))) if b"\n" in plain else None
        return cls(plain, pattern)

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes, at most."""
        return len(self.plain) + (self.plain.count(b"\n") if self.pattern is not None else 0)

    @property
    def can_cut(self) -> bool:
        """Returns whether a file may be divided anywhere, because occurrences cannot overlap."""
        return not any(
            form.startswith(form[-length:])
            for form in (self.plain, self.plain.replace(b"\n", b"\r\n"))
            for length in range(1, len(form))
        )

    def is_in(self, data: bytes) -> bool:
        """Returns whether the delimiter occurs in `data`."""
        return self.plain in data or (self.pattern is not None and b"\r" in data and bool(self.pattern.search(data)))

    def split(self, data: bytes) -> list[tuple[bytes, int]]:
        """Returns the parts of `data`, each with the number of bytes of the delimiter after it, the last with 0."""
        if self.pattern is None or b"\r" not in data:
            *parts, last = data.split(self.plain)
            return [*((part, len(self.plain)) for part in parts), (last, 0)]
        found, begin = [], 0
        for match in self.pattern.finditer(data):
            found.append((data[begin : match.start()], match.end() - match.start()))
            begin = match.end()
        return [*found, (data[begin:], 0)]


class Record(NamedTuple):
    """A record of a span.

    Args:
        start: Its offset in the text of the file.
        data: Its bytes, without the delimiter.
        end: The offset of the next record.
        position: Number of bytes of the span that were read for it.
    """

    start: int
    data: bytes
    end: int
    position: int


def split_records(span: Span, delimiter: Delimiter, start: int) -> Iterator[Record]:
    """Yields the records that begin in the span, from the one at `start` on.

    An uncompressed file is read from `start` on, a compressed one from its beginning.
    """
    is_compressed = compression_of(span.file.path) is not None
    first = max(span.start, start)
    if first >= span.end and not is_compressed:
        return
    begin = 0 if is_compressed else max(0, first - delimiter.num_bytes)
    for record in _split(read_blocks(span.file, begin), delimiter, begin):
        if record.start >= span.end and not is_compressed:
            return
        if record.start >= first:  # else it begins before the span, or before `start`
            yield record._replace(position=record.position - span.start)


def read_head(found: InputFile) -> bytes:
    """Returns the first bytes of a file, decompressed.

    Raises:
        UserError: The file is not compressed in the way that its name says.
    """
    compression = compression_of(found.path)
    with open_local(found) as path, open_file(path) as file:
        head = file.read(_HEAD_BYTES)
    if compression is None or not head:
        return head
    if not head.startswith(_COMPRESSION_MAGIC[compression]) and head[1:4] != _ZST_SKIPPABLE:
        what = find_binary(head) or "not compressed; remove the ending"
        raise DamagedFileError(f"{found.path} is named {compression}, and is {what}")
    return next(read_blocks(found), (b"", 0))[0]


def refuse_binary(found: InputFile) -> None:
    """Refuses a file that is no text.

    Raises:
        DamagedFileError: It is compressed, binary, or text in UTF-16; the line has the remedy.
    """
    what = find_binary(read_head(found))
    if what is not None:
        raise DamagedFileError(f"{found.path} is {what}")


def _read_zst_blocks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    # zstandard's stream reader treats a truncated frame as the end of the data; a decompression object reports it.
    frame = zstandard.ZstdDecompressor().decompressobj()
    is_between_frames = True
    while data := file.read(_COMPRESSED_BLOCK_BYTES):
        while data:
            yield frame.decompress(data), file.tell()
            is_between_frames = frame.eof
            data = frame.unused_data
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if not is_between_frames:
        raise EOFError("the compressed data ends in the middle of a frame")


def _split(blocks: Iterator[tuple[bytes, int]], delimiter: Delimiter, offset: int) -> Iterator[Record]:
    pending: list[bytes] = []
    tail = b""
    position = offset
    for block, position in blocks:
        pending.append(block)
        reach = tail + block
        tail = reach[len(reach) - delimiter.num_bytes + 1 :]
        if not delimiter.is_in(reach):
            continue
        *records, (rest, _) = delimiter.split(b"".join(pending))
        for data, num_bytes in records:
            end = offset + len(data) + num_bytes
            yield Record(offset, data, end, position)
            offset = end
        pending = [rest]
        tail = rest[max(0, len(rest) - delimiter.num_bytes + 1) :]
    if rest := b"".join(pending):
        yield Record(offset, rest, offset + len(rest) + len(delimiter.plain), position)
