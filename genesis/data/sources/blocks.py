"""Reads the bytes of a file: decompressed, in blocks, and cut into records at a delimiter."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa
import zstandard

from genesis.data.cache import open_copy
from genesis.data.remote import RemoteFile
from genesis.data.sources.files import InputFile, Span, compression_of
from genesis.data.store import is_url

DAMAGE: Final = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, pa.ArrowException)
"""Exceptions that readers raise for truncated and damaged files."""

_BLOCK_BYTES: Final = 1 << 20
_COMPRESSED_BLOCK_BYTES: Final = 1 << 16


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
    with open_local(found) as path, path.open("rb") as file:
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


def can_cut(delimiter: bytes | None) -> bool:
    """Returns whether a file may be divided anywhere, because occurrences of its delimiter cannot overlap."""
    return delimiter is not None and not any(
        delimiter.startswith(delimiter[-length:]) for length in range(1, len(delimiter))
    )


def split_records(span: Span, delimiter: bytes, start: int) -> Iterator[tuple[int, bytes, int]]:
    """Yields (offset, record, position) of the records that begin in the span, from the one at `start` on.

    An uncompressed file is read from `start` on, a compressed one from its beginning. A record does not
    include its delimiter; `position` is the number of bytes of the span that were read for it.
    """
    is_compressed = compression_of(span.file.path) is not None
    first = max(span.start, start)
    if first >= span.end and not is_compressed:
        return
    begin = 0 if is_compressed else max(0, first - len(delimiter))
    records = _split(read_blocks(span.file, begin), delimiter, begin)
    for offset, record, position in records:
        if offset >= span.end and not is_compressed:
            return
        if offset >= first:  # else it begins before the span, or before `start`
            yield offset, record, position - span.start


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


def _split(blocks: Iterator[tuple[bytes, int]], delimiter: bytes, offset: int) -> Iterator[tuple[int, bytes, int]]:
    pending: list[bytes] = []
    tail = b""
    position = offset
    for block, position in blocks:
        pending.append(block)
        reach = tail + block
        tail = reach[len(reach) - len(delimiter) + 1 :]
        if delimiter not in reach:
            continue
        *records, rest = b"".join(pending).split(delimiter)
        for record in records:
            yield offset, record, position
            offset += len(record) + len(delimiter)
        pending = [rest]
        tail = rest[max(0, len(rest) - len(delimiter) + 1) :]
    if rest := b"".join(pending):
        yield offset, rest, position
