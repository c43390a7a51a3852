"""Reads, writes and hashes the files of a tokenizer, independent of their format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from blake3 import blake3

from genesis.base.errors import UserError
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES
from genesis_callbacks.base.untrusted import read_file as read_bounded

TRAIN_REMEDY: Final = "create one with `genesis tokenizer train`"


def read_files(directory: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Returns the content of the files `names` of a directory.

    Raises:
        UserError: A file cannot be read, is not a regular file, or is too large for a tokenizer.
    """
    return {name: read_file(directory / name) for name in names}


def read_file(path: Path) -> bytes:
    """Returns the content of a tokenizer's file.

    Raises:
        UserError: The file cannot be read, is not a regular file, or is too large for a tokenizer.
    """
    try:
        return read_bounded(path, MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path} ({error.strerror}); {TRAIN_REMEDY}") from None


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Writes a tokenizer's files into a directory, each atomically; the files are durable when this returns.

    Raises:
        OSError: The disk is full, or the directory cannot be written.
    """
    for name, content in files.items():
        replace_file(directory / name, content)


def hash_files(files: Mapping[str, bytes]) -> str:
    """Returns the identity of a tokenizer: the BLAKE3 hex digest of its file, or of its files' names and digests."""
    digests = {name: blake3(content).hexdigest() for name, content in files.items()}
    if len(digests) == 1:
        return next(iter(digests.values()))
    return blake3("".join(f"{name}\n{digest}\n" for name, digest in sorted(digests.items())).encode()).hexdigest()
