"""Hashes of files and bytes, under the name of their algorithm."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import blake3

from . import untrusted

HashAlgorithm = Literal["blake3", "sha256"]
_BLOCK_BYTES = 1 << 20


class Hasher(Protocol):
    """Hashes bytes piece by piece."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Adds the next bytes."""

    def hexdigest(self) -> str:
        """Returns the hash of all bytes so far."""


def build_hasher(algorithm: HashAlgorithm) -> Hasher:
    """Returns a new hasher.

    Raises:
        ValueError: The algorithm is not one that this version knows.
    """
    if algorithm == "blake3":
        return blake3.blake3()
    if algorithm == "sha256":
        return hashlib.sha256()
    raise ValueError(f"unknown hash algorithm {algorithm!r}: this version knows blake3 and sha256")


def hash_bytes(data: bytes, algorithm: HashAlgorithm) -> str:
    """Returns the hexadecimal hash of `data`."""
    hasher = build_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()


def hash_descriptor(
    descriptor: int, algorithm: HashAlgorithm, report: Callable[[int], None] = lambda num_bytes: None
) -> str:
    """Returns the hexadecimal hash of an open file, from its current position to its end.

    `report` is called with the number of bytes after each block.
    """
    hasher = build_hasher(algorithm)
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    while num_bytes := os.readv(descriptor, [buffer]):
        hasher.update(buffer[:num_bytes])
        report(num_bytes)
    return hasher.hexdigest()


def hash_file(path: Path, algorithm: HashAlgorithm) -> str:
    """Returns the hexadecimal hash of the content of the file at `path`."""
    with untrusted.open_file(path, buffering=0) as file:
        return hash_descriptor(file.fileno(), algorithm)
