"""Opens files that a stranger may have made, and makes paths of names that a stranger's file lists.

    open_file(path)          a regular file, to read
    read_file(path)          the content of a regular file of limited size
    read_text(path)          the same as text
    check_file(path)         for a library that takes a path: its kind and its size
    check_no_hole(path, fd)  a large open file, before it is read: it is on the disk
    check_directory(path)    for a library that takes a directory: the kind of everything in it
    path_below(root, name)   the path of a listed name: below its root, also behind links

A FIFO would block its reader for ever, and a device such as /dev/zero has no end: only regular files are opened,
without waiting, and never more of them is read than the caller's limit. Links are followed, because stores of models
consist of them; what counts is the kind of the open descriptor. The error is a `RefusedFileError` that names the file.

The descriptors of the process itself are the exception, because only a user gives them: /dev/stdin, and /dev/fd/N as
a shell writes for `--config <(command)`. `read_file` and `read_text` read them as they are, up to the limit, and so
/dev/null by this name. Other readers refuse them: data is read several times, and by processes without the descriptor.

`tests/test_untrusted_readers.py` finds code that opens files in another way. No communication; imports no torch.
"""

import errno
import io
import os
import re
import unicodedata
from pathlib import Path
from typing import BinaryIO, Final

from .errors import UserError, naming, printable
from .files import RefusedFileError, check_regular

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "MAX_TEXT_BYTES",
    "RefusedFileError",
    "check_directory",
    "check_file",
    "check_no_hole",
    "find_name_fault",
    "open_descriptor",
    "open_file",
    "path_below",
    "read_file",
    "read_text",
]

MAX_TEXT_BYTES: Final = 16 << 20
"""Limit of what a person or a program writes whole: recipes, options, templates, records, reports, states."""
MAX_DOCUMENT_BYTES: Final = 256 << 20
"""Limit of what grows with a model or a corpus: manifests, indexes, tokenizers."""

HOLE_BYTES: Final = 64 << 20
"""The size from which a file must be on the disk."""
_HOLE_SHARE: Final = 1000
_MAX_EXTENTS: Final = 10_000
_READ_BYTES: Final = 1 << 20
_MAX_NAME_BYTES: Final = 255  # of a part on Linux's file systems, and of all parts together here
_MAX_SHOWN: Final = 80
_GIVEN_BY_USERS: Final = re.compile(r"/dev/null|/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")
_FAULTS: Final = (
    (re.compile(r"\\|^.:"), "is a path of Windows"),
    (re.compile(r"^/"), "is an absolute path"),
    (re.compile(r"(?:^|/)\.\.(?:/|$)"), "leads upwards"),
    (re.compile(r"(?:^|/)\.?(?:/|$)"), "has an empty part"),
    (re.compile(r"(?:^|/)~"), "has a part that begins with ~"),
    # With any suffix, too, some systems take these names for devices.
    (re.compile(r"(?:^|/)(?:con|prn|aux|nul|com\d|lpt\d)(?:[./]|$)", re.IGNORECASE), "is the name of a device"),
)


def open_descriptor(path: str | os.PathLike[str], *, may_be_given: bool = False) -> int:
    """Returns a descriptor of the regular file at `path`, for reading; the caller closes it.

    Args:
        path: The file.
        may_be_given: Whether it may also be a descriptor of this process, which can be read once.

    Raises:
        OSError: The file cannot be opened, or is no regular file; the error names it.
    """
    name = os.fspath(path)
    if "\0" in name:  # for which Python raises no OSError
        raise RefusedFileError(errno.EINVAL, "has a null character in its name", printable(name))
    if _GIVEN_BY_USERS.fullmatch(name):
        if not may_be_given:
            raise RefusedFileError(errno.EINVAL, "is no file that can be read again, or by another process", name)
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    # Before the open, because opening some devices has effects, and after it, because the path may have been replaced.
    check_regular(name, os.stat(name))  # noqa: PTH116 - a text is as good as a path here
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_regular(name, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: str | os.PathLike[str], *, buffering: int = -1) -> BinaryIO:
    """Opens the regular file at `path` to read its bytes.

    Raises:
        OSError: As of `open_descriptor`.
    """
    return open(open_descriptor(path), "rb", buffering)


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Returns the content of the regular file at `path`.

    Raises:
        OSError: As of `open_descriptor`, or the file has more than `max_bytes`, also if it grew while it was read.
    """
    descriptor = open_descriptor(path, may_be_given=True)
    try:
        num_bytes = os.fstat(descriptor).st_size
        _check_size(path, num_bytes, max_bytes)
        # One byte more than the size: a file that does not grow is read at once, and then there is nothing more.
        blocks, num_bytes, wanted = [], 0, num_bytes + 1
        with naming(Path(path)):
            while block := os.read(descriptor, min(wanted, max_bytes + 1 - num_bytes)):
                blocks.append(block)
                num_bytes += len(block)
                _check_size(path, num_bytes, max_bytes)
                wanted = _READ_BYTES
    finally:
        os.close(descriptor)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES, *, errors: str = "strict") -> str:
    """Returns the text in the regular file at `path`, which is UTF-8; every line ends with a line feed.

    Raises:
        OSError: As of `read_file`.
        UnicodeDecodeError: The file is not UTF-8, and `errors` is strict.
    """
    return io.TextIOWrapper(io.BytesIO(read_file(path, max_bytes)), encoding="utf-8", errors=errors).read()


def check_file(path: str | os.PathLike[str], max_bytes: int | None = None, *, may_be_given: bool = False) -> int:
    """Checks a file that a library opens by its path, and returns the file's size in bytes.

    Args:
        path: The file.
        max_bytes: The largest size; None if any is good.
        may_be_given: As for `open_descriptor`.

    Raises:
        OSError: As of `read_file`.
    """
    descriptor = open_descriptor(path, may_be_given=may_be_given)
    try:
        num_bytes = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if max_bytes is not None:
        _check_size(path, num_bytes, max_bytes)
    return num_bytes


def check_no_hole(path: str | os.PathLike[str], descriptor: int) -> None:
    """Checks that at least a thousandth of a large file is on the disk; the position goes to the beginning.

    Nobody writes such a file, and to read its zeros could take hours.

    Raises:
        OSError: The file is mostly a hole; the error names it.
    """
    num_bytes = os.fstat(descriptor).st_size
    num_found = position = 0
    try:
        for _ in range(_MAX_EXTENTS if num_bytes >= HOLE_BYTES else 0):
            try:
                start = os.lseek(descriptor, position, os.SEEK_DATA)
                position = os.lseek(descriptor, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # the file system does not report holes
                    return
                raise RefusedFileError(
                    errno.EINVAL,
                    f"has {num_bytes:,} bytes, of which only {num_found:,} are on the disk: the rest is a hole",
                    os.fspath(path),
                ) from None
            num_found += position - start
            if num_found * _HOLE_SHARE > num_bytes:
                return
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def check_directory(path: Path) -> None:
    """Checks that all entries of a directory and of its directories are regular files or directories, behind links.

    For a library that takes the directory of a model. A link that leads nowhere is left to the library.

    Raises:
        OSError: An entry is something else; the error names it.
    """
    for entry in (*path.glob("*"), *path.glob("*/*")):
        if entry.exists() and not entry.is_dir():
            check_regular(str(entry), entry.stat())


def _check_size(path: str | os.PathLike[str], num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RefusedFileError(
            errno.EMSGSIZE, f"has more than {max_bytes:,} bytes, the limit of such a file", os.fspath(path)
        )


def path_below(root: Path, name: object, source: object) -> Path:
    """Returns the path of a name that a file lists, below `root`. The file need not exist.

    A name is relative, with slashes. What has another meaning somewhere is refused: an absolute path, `..`, an empty
    part, `~`, a null or another character that cannot be printed, a separator or a drive of Windows, the name of a
    device, more than 255 bytes. So is a name that leads out of `root` through a link, except in a snapshot of Hugging
    Face's cache, whose links lead to `blobs` of the same model.

    Args:
        root: The directory that the names are relative to.
        name: The name, which may be anything.
        source: The file that lists the name, and the key in it, for the message.

    Raises:
        UserError: The name is refused.
    """
    fault = find_name_fault(name)
    if fault is None:
        assert isinstance(name, str)
        found = root / name
        homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
        try:
            end = found.resolve()
            if any(end.is_relative_to(home.resolve()) for home in homes):
                return found
            fault = f"leads out of {root} through a link"
        except (OSError, RuntimeError) as error:  # a loop of links
            fault = f"leads nowhere ({getattr(error, 'strerror', None) or error})"
    shown = printable(repr(name)[:_MAX_SHOWN])
    raise UserError(
        f"{printable(str(source))} lists {shown}, which {fault}: only a file below {root} is read or written; remove "
        "the entry, or put the file there"
    )


def find_name_fault(name: object) -> str | None:
    """Returns why a name is refused by `path_below` wherever its root is, as "leads upwards"; None if it is not."""
    if not isinstance(name, str):
        return "is no text"
    if any(unicodedata.category(character).startswith("C") for character in name):
        return "has characters that cannot be printed"
    if len(name.encode()) > _MAX_NAME_BYTES:
        return f"has more than {_MAX_NAME_BYTES} bytes"
    return next((fault for pattern, fault in _FAULTS if pattern.search(name)), None)
