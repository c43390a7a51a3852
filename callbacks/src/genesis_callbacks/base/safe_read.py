"""Reads the files of a checkpoint, which are untrusted: an attacker may have written them, or a disk changed them.

Files are opened by `genesis_callbacks.base.untrusted`: regular ones alone, also behind links. Sizes, depth and memory
are bounded. If the operating system refuses access (permissions, a failing disk, a missing mount), the error is an
`UnreadableCheckpointError`, because the state of the checkpoint is unknown. No code in a file runs.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from . import untrusted
from .checkpoint_errors import CorruptCheckpointError, UnreadableCheckpointError
from .json_text import load_json

MAX_DOCUMENT_BYTES = untrusted.MAX_DOCUMENT_BYTES
"""Size limit of `manifest.json` and `state.json`. A save that needs more fails."""
MAX_NOTE_BYTES = 64 << 10
"""Size limit of small files, such as a commit marker or the mark of the best checkpoint."""
MAX_JSON_DEPTH = 100
MAX_JSON_MEMORY_BYTES = 512 << 20
"""Limit of the memory of the objects in a JSON text, estimated by an upper bound."""
MAX_PICKLE_BYTES = 32 << 20
MAX_PICKLE_MEMORY_BYTES = 768 << 20
"""Limit of the memory of the objects in a pickle, estimated by an upper bound: 400 to 600 MB for 100,000 chunks."""
_SPARSE_BYTES = 64 << 20
_SPARSE_SHARE = 1000
_MAX_EXTENTS = 10_000
_PROVES_DAMAGE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG, errno.ENODEV}
)
"""Errors about names and links: every user gets them at every attempt, so they prove damage."""
# The memory of Python's objects, rounded up: a text of 256 MiB like "[[],[],..." would take gigabytes.
_BYTES_BY_CHARACTER = ((b"{", 240), (b"[", 64), (b",", 64), (b":", 64))
# Opcodes of pickles that create or store an object: they need far more memory than the bytes of the opcode.
_BYTES_BY_OPCODE: Final = (
    *((b"]", 72), (b"}", 72), (b"(", 120), (b"\x85", 56), (b"\x86", 64), (b"\x87", 72), (b"\x8f", 224), (b"\x91", 224)),
    *((b"\x94", 136), (b"r", 136), (b"X", 64), (b"\x8c", 64), (b"M", 40), (b"J", 40), (b"C", 48), (b"Q", 1024)),
)
_BYTES_OF_OTHER_OPCODE = 8  # one entry of the stack


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into an error about the checkpoint that `path` belongs to.

    Raises:
        CorruptCheckpointError: The file is missing, or its path is not a file.
        UnreadableCheckpointError: The file cannot be read for a reason outside of the checkpoint.
    """
    try:
        yield
    except untrusted.RefusedFileError as error:
        raise CorruptCheckpointError(f"{path} {error.strerror}") from error
    except OSError as error:
        if error.errno in _PROVES_DAMAGE:
            what = "is missing" if error.errno == errno.ENOENT else f"is not a file: {error.strerror}"
            raise CorruptCheckpointError(f"{path} {what}") from error
        raise UnreadableCheckpointError(
            f"{path} cannot be read ({error.strerror or error}), so that the state of its checkpoint is unknown: "
            "nothing was changed; make the file readable (permissions, mount, disk), or move the checkpoint away to "
            "continue without it"
        ) from error


def open_regular(path: Path) -> int:
    """Returns a descriptor of the regular file at `path`, for reading from its beginning; the caller closes it.

    Raises:
        CorruptCheckpointError: The file is missing, is not a regular file, or consists of holes.
        UnreadableCheckpointError: The file cannot be opened.
    """
    with reading(path):
        descriptor = untrusted.open_descriptor(path)
        try:
            _check_not_sparse(path, descriptor, os.fstat(descriptor).st_size)
            os.lseek(descriptor, 0, os.SEEK_SET)  # the search for holes moved the file position
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def _check_not_sparse(path: Path, descriptor: int, num_bytes: int) -> None:
    """Refuses a large file that is mostly a hole: no save writes such a file, and reading it could take hours."""
    if num_bytes < _SPARSE_BYTES:
        return
    num_found, position = 0, 0
    for _ in range(_MAX_EXTENTS):
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system does not report holes
                return
            raise CorruptCheckpointError(
                f"{path} has {num_bytes} bytes, of which only {num_found} are on the disk: the rest is a hole"
            ) from error
        num_found += position - start
        if num_found * _SPARSE_SHARE > num_bytes:
            return


def read_file(path: Path, max_bytes: int) -> bytes:
    """Returns the content of the regular file at `path`.

    Raises:
        CorruptCheckpointError: The file is missing, is not a regular file, or is larger than `max_bytes`.
        UnreadableCheckpointError: The file cannot be read.
    """
    with reading(path):
        return untrusted.read_file(path, max_bytes)


def parse_json(data: bytes, name: str) -> Any:
    """Returns the content of a JSON text.

    Args:
        data: The text.
        name: Name of the text, for messages.

    Raises:
        CorruptCheckpointError: The text is not JSON, has a number that is not finite, or is too deep or too large.
    """
    check_json_size(data, name)
    try:
        content = load_json(data, _refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name} is not JSON that this version reads: {error}") from error
    _check_depth(content, name)
    return content


def check_json_size(data: bytes, name: str) -> None:
    """Checks that a JSON text is not too large to be read back.

    Raises:
        CorruptCheckpointError: The text is too large.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CorruptCheckpointError(f"{name} has {len(data)} bytes, more than the limit of {MAX_DOCUMENT_BYTES}")
    # Characters inside strings count as well: the estimate is too high for them, but needs one pass over the bytes.
    needed = sum(data.count(character) * num_bytes for character, num_bytes in _BYTES_BY_CHARACTER)
    if needed > MAX_JSON_MEMORY_BYTES:
        raise CorruptCheckpointError(
            f"{name} would take up to {needed} bytes of memory, more than the {MAX_JSON_MEMORY_BYTES} that are allowed"
        )


def check_pickle_size(data: bytes, name: str, *, object_bytes: int, max_memory_bytes: int) -> None:
    """Checks the memory that a pickle needs, before any of it is loaded. Bytes of text in it count as opcodes, too.

    The estimate is an upper bound only if constructors do not copy their arguments.

    Args:
        data: The pickle.
        name: Name of the pickle, for messages.
        object_bytes: Memory of one instance that a constructor returns.
        max_memory_bytes: Limit of the memory.

    Raises:
        CorruptCheckpointError: The pickle needs too much memory.
    """
    costs = dict((*_BYTES_BY_OPCODE, (b"R", object_bytes), (b"\x81", object_bytes)))
    needed = _BYTES_OF_OTHER_OPCODE * len(data)
    needed += sum((num_bytes - _BYTES_OF_OTHER_OPCODE) * data.count(opcode) for opcode, num_bytes in costs.items())
    if needed > max_memory_bytes:
        raise CorruptCheckpointError(
            f"{name} would take up to {needed} bytes of memory, more than the {max_memory_bytes} that are allowed"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(content: Any, name: str) -> None:
    # Level by level and not by recursion: deep content would reach Python's recursion limit.
    level = [content]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        if not level:
            return
    raise CorruptCheckpointError(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep")


def _items(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
