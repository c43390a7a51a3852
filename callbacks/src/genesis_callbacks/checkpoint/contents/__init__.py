"""Reads the content of a checkpoint of any origin, without running any code that is in it.

A module for each format finds the tensors and where their bytes lie; `finite.py` reads the bytes. To add a format: a
reader in a module of its own, its name in `CheckpointFormat`, and its line in `read.py`. Nothing here communicates.
"""

from .finite import find_non_finite
from .read import find_format, read_contents
from .stored import CheckpointFormat, Contents, StateByKey, StoredBlock, StoredTensor, measure

__all__ = [
    "CheckpointFormat",
    "Contents",
    "StateByKey",
    "StoredBlock",
    "StoredTensor",
    "find_format",
    "find_non_finite",
    "measure",
    "read_contents",
]
