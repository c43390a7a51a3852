"""Reads the content of a checkpoint of any origin, without running any code that is in it.

Each format has a module that finds the tensors and the location of their bytes; `finite.py` reads the bytes. To add a
format, write its reader in a new module, and add its name to `CheckpointFormat` and to `read.py`. No function here
communicates.
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
