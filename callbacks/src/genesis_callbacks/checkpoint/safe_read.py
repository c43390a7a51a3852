"""Reads the files of a checkpoint, which are not trusted: anybody may have made them, and a disk may have changed them.

Only regular files are opened, so that no read waits for a FIFO or wakes a device; symbolic links are followed, because
stores of models are made of them. Sizes, depth and memory are bounded. An operating system's refusal (rights, a
failing disk, a mount that is gone) is an `UnreadableCheckpointError`: it proves nothing about the checkpoint. No code
in a file runs.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from genesis_callbacks.files import find_irregular_kind

from .errors import CorruptCheckpointError, UnreadableCheckpointError

MAX_DOCUMENT_BYTES = 256 << 20
"""Of `manifest.json` and `state.json`. A save that would need more fails."""
MAX_NOTE_BYTES = 64 << 10
"""Of small files: a commit marker, the mark of the best."""
MAX_JSON_DEPTH = 100
MAX_JSON_MEMORY_BYTES = 512 << 20
"""Of the objects that a JSON text becomes in memory, by an upper bound."""
MAX_PICKLE_BYTES = 32 << 20
MAX_PICKLE_MEMORY_BYTES = 768 << 20
"""Of the objects that a pickle becomes, by an upper bound. Metadata of 100,000 chunks needs 400 to 600 MB of it."""
_SPARSE_BYTES = 64 << 20
_SPARSE_SHARE = 1000
_MAX_EXTENTS = 10_000
_READ_BYTES = 1 << 20
_PROVES_DAMAGE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG, errno.ENODEV}
)
"""Errors about names and links: they are the same for every user and at every attempt, so they prove damage."""
# The memory of Python's objects, rounded up: a text of 256 MiB like "[[],[],..." would take gigabytes.
_BYTES_BY_CHARACTER = ((b"{", 240), (b"[", 64), (b",", 64), (b":", 64))
# Opcodes of pickles that make an object, or keep one: they cost far more memory than their bytes have.
_BYTES_BY_OPCODE: Final = (
    *((b"]", 72), (b"}", 72), (b"(", 120), (b"\x85", 56), (b"\x86", 64), (b"\x87", 72), (b"\x8f", 224), (b"\x91", 224)),
    *((b"\x94", 136), (b"r", 136), (b"X", 64), (b"\x8c", 64), (b"M", 40), (b"J", 40), (b"C", 48), (b"Q", 1024)),
)
_BYTES_OF_OTHER_OPCODE = 8  # a place on the stack


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into what it says about the checkpoint that `path` belongs to.

    Raises:
        CorruptCheckpointError: The file is missing, or something else stands at its place.
        UnreadableCheckpointError: It cannot be read for a reason outside of the checkpoint.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _PROVES_DAMAGE:
            what = "is missing" if error.errno == errno.ENOENT else f"is not a file: {error.strerror}"
            raise CorruptCheckpointError(f"{path} {what}") from error
        raise UnreadableCheckpointError(
            f"{path} cannot be read ({error.strerror or error}), so that nobody knows whether its checkpoint is whole: "
            "it stays where it is; make the file readable (rights, mount, disk), or move the checkpoint away to go on "
            "without it"
        ) from error


def open_regular(path: Path) -> int:
    """Returns a descriptor of the regular file at `path`, for reading from its beginning; the caller closes it.

    Raises:
        CorruptCheckpointError: It is missing, is not a regular file, or consists of holes.
        UnreadableCheckpointError: It cannot be opened.
    """
    with reading(path):
        # Checked before the open, which alone has effects on some devices, and after it, because the path may have been
        # replaced in between. O_NONBLOCK: a FIFO that took the path's place would block the open for ever.
        _check_regular(path, path.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            _check_regular(path, found)
            _check_not_sparse(path, descriptor, found.st_size)
            os.lseek(descriptor, 0, os.SEEK_SET)  # the search for holes has moved the position
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def _check_regular(path: Path, found: os.stat_result) -> None:
    kind = find_irregular_kind(found.st_mode)
    if kind is not None:
        raise CorruptCheckpointError(f"{path} is {kind} where a file must be")


def _check_not_sparse(path: Path, descriptor: int, num_bytes: int) -> None:
    """Refuses a large file that is almost all hole: no save writes such a file, and reading it would take hours."""
    if num_bytes < _SPARSE_BYTES:
        return
    num_found, position = 0, 0
    for _ in range(_MAX_EXTENTS):
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a file system that cannot say where its holes are
                return
            raise CorruptCheckpointError(
                f"{path} has {num_bytes} bytes, of which only {num_found} are on the disk: the rest is a hole"
            ) from error
        num_found += position - start
        if num_found * _SPARSE_SHARE > num_bytes:
            return


def read_file(path: Path, max_bytes: int) -> bytes:
    """Returns what the regular file at `path` holds.

    Raises:
        CorruptCheckpointError: It is missing, is not a regular file, or is larger than `max_bytes`.
        UnreadableCheckpointError: It cannot be read.
    """
    descriptor = open_regular(path)
    try:
        with reading(path):
            blocks, num_bytes = [], os.fstat(descriptor).st_size
            if num_bytes <= max_bytes:
                # Counted again: the file may grow after `fstat`, and the bound has to hold all the same.
                num_bytes = 0
                while num_bytes <= max_bytes and (block := os.read(descriptor, _READ_BYTES)):
                    blocks.append(block)
                    num_bytes += len(block)
    finally:
        os.close(descriptor)
    if num_bytes > max_bytes:
        raise CorruptCheckpointError(f"{path} has {num_bytes} bytes or more, which is too large for it: {max_bytes}")
    return b"".join(blocks)


def parse_json(data: bytes, name: str) -> Any:
    """Returns what a JSON text holds.

    Args:
        data: The text.
        name: What it is, for messages.

    Raises:
        CorruptCheckpointError: It is not JSON, has a number that is not finite, or is nested too deeply or too large.
    """
    check_json_size(data, name)
    try:
        content = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name} is not JSON that this version reads: {error}") from error
    _check_depth(content, name)
    return content


def check_json_size(data: bytes, name: str) -> None:
    """Checks that a JSON text is not too large to be read back.

    Raises:
        CorruptCheckpointError: It is.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CorruptCheckpointError(f"{name} has {len(data)} bytes, more than the {MAX_DOCUMENT_BYTES} that are read")
    # Characters inside strings count, too: the bound is too high for them, but one pass over the bytes is enough.
    needed = sum(data.count(character) * num_bytes for character, num_bytes in _BYTES_BY_CHARACTER)
    if needed > MAX_JSON_MEMORY_BYTES:
        raise CorruptCheckpointError(
            f"{name} would take up to {needed} bytes of memory, more than the {MAX_JSON_MEMORY_BYTES} that are allowed"
        )


def check_pickle_size(data: bytes, name: str, *, object_bytes: int, max_memory_bytes: int) -> None:
    """Checks that a pickle is not too large to be loaded, before any of it is. Text in it counts as opcodes, too.

    The bound holds for an unpickler that keeps to what each opcode makes: a constructor that copies its arguments
    breaks it.

    Args:
        data: The pickle.
        name: What it is, for messages.
        object_bytes: What one instance takes that a constructor returns.
        max_memory_bytes: What it may become.

    Raises:
        CorruptCheckpointError: It is too large.
    """
    costs = np.full(256, _BYTES_OF_OTHER_OPCODE, np.int64)
    for opcode, num_bytes in (*_BYTES_BY_OPCODE, (b"R", object_bytes), (b"\x81", object_bytes)):
        costs[opcode[0]] = num_bytes
    needed = sum(
        int(np.bincount(np.frombuffer(data[start : start + _READ_BYTES], np.uint8), minlength=256) @ costs)
        for start in range(0, len(data), _READ_BYTES)
    )
    if needed > max_memory_bytes:
        raise CorruptCheckpointError(
            f"{name} would take up to {needed} bytes of memory, more than the {max_memory_bytes} that are allowed"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _check_depth(content: Any, name: str) -> None:
    # Level by level and not by recursion, whose own limit the content could reach.
    level = [content]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        if not level:
            return
    raise CorruptCheckpointError(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep")


def _items(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
