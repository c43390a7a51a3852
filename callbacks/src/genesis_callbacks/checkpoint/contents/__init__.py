"""Reads the content of a checkpoint of any origin, without running any code that is in it.

Each format has a module that finds the tensors and the location of their bytes; `finite.py` reads the bytes. To add a
format, write its reader in a new module, and add its name to `CheckpointFormat` and to `_READERS`. No function here
communicates.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ...base.checkpoint_errors import CheckpointError, CorruptCheckpointError
from ...base.manifest import DCP_METADATA_NAME
from ...base.run_directory import COMMITTED_NAME, MANIFEST_NAME, is_checkpoint_name
from ..tensor_places import TensorPlaces
from ..verify import verify
from .dcp_format import LIGHTNING_META_NAME, read_dcp
from .finite import find_non_finite
from .safetensors_format import read_safetensors
from .stored import CheckpointFormat, Contents, StateByKey, StoredBlock, StoredTensor, measure
from .torch_format import TORCH_SUFFIXES, read_torch

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


def read_genesis(path: Path) -> Contents:
    """Returns the content of a checkpoint of this package.

    Raises:
        BaseCheckpointError: The base that holds some of its tensors is missing, has changed, or lacks a file.
        CorruptCheckpointError: A file is missing, or its size differs from the manifest's.
    """
    manifest = verify(path, "quick")
    places = TensorPlaces(path, manifest)
    tensors: dict[str, StoredTensor] = {}
    for name, record in manifest.tensors.items():
        itemsize, place = record.torch_dtype.itemsize, places.locate(name)
        # A file in a base has an absolute path, which stays the same when it is joined to the checkpoint's directory.
        directory = Path() if place.named_by is None else place.path.absolute()
        blocks = [
            StoredBlock(str(directory / chunk.file), chunk.data_offset, math.prod(chunk.sizes) * itemsize)
            for chunk in place.record.chunks
        ]
        tensors[name] = StoredTensor(record.shape, record.torch_dtype, tuple(blocks))
    optimizers: dict[int, dict[str | int, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if head == "optimizer":
            index, _, rest = rest.partition(".")
            parameter, _, key = rest.rpartition(".")
            optimizers[int(index)][parameter][key] = tensor
    model = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    return Contents(path, "genesis", model, optimizers, measure(path), manifest.step)


_READERS: Final[Mapping[CheckpointFormat, Callable[[Path], Contents]]] = {
    "genesis": read_genesis,
    "torch": read_torch,
    "dcp": read_dcp,
    "safetensors": read_safetensors,
}


def find_format(path: Path) -> CheckpointFormat | None:
    """Returns the format of the checkpoint at `path`, decided by file names alone; None if there is no known format."""
    if path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "torch" if path.suffix in TORCH_SUFFIXES else None
    if not path.is_dir():
        return None
    names = {entry.name for entry in path.iterdir()}
    if names & {MANIFEST_NAME, COMMITTED_NAME} or is_checkpoint_name(path.resolve().name):
        return "genesis"
    if names & {DCP_METADATA_NAME, LIGHTNING_META_NAME} or any(name.endswith(".distcp") for name in names):
        return "dcp"
    is_safetensors = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    return "safetensors" if is_safetensors else None


def read_contents(path: Path | str) -> Contents:
    """Returns the content of the checkpoint at `path`. Any process may call it; no code in the checkpoint runs.

    Raises:
        CheckpointError: There is no checkpoint, or it contains objects that are not plain data.
        CorruptCheckpointError: The checkpoint is so damaged that its content is unknown.
        OSError: The checkpoint cannot be read.
    """
    path = Path(path)
    kind = find_format(path)
    if kind is None:
        raise CheckpointError(
            f"{path} is not a checkpoint of a known format: give a directory of genesis, DCP or safetensors, or a file "
            f"that ends in .safetensors, {', '.join(TORCH_SUFFIXES)}"
        )
    try:
        return _READERS[kind](path)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged file can have any type where a number or name is expected
        reason = (str(error).splitlines() or [""])[0]
        raise CorruptCheckpointError(
            f"{path} is not a valid checkpoint of its format: {type(error).__name__}: {reason}"
        ) from error
