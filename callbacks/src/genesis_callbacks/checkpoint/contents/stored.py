"""The content of a checkpoint of any format: its tensors and the location of their bytes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

CheckpointFormat = Literal["genesis", "torch", "dcp", "safetensors"]


@dataclass(frozen=True)
class StoredBlock:
    """The location of some bytes of a tensor.

    Attributes:
        file: Path of the file, relative to the checkpoint's directory; absolute for a file of the checkpoint's base.
        offset: Offset of the first byte.
        num_bytes: Number of bytes.
        is_archive: Whether the bytes are an archive of `torch.save` and not the plain elements.
    """

    file: str
    offset: int
    num_bytes: int
    is_archive: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: its global shape, dtype, and the location of its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[StoredBlock, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


StateByKey = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint.

    Attributes:
        path: The file or directory.
        format: The format of the checkpoint.
        model: Name to tensor; the names are the checkpoint's, without the name of the container.
        optimizers: Number of the optimizer to parameter (its name, or its number in the groups' order) to key to
            tensor.
        num_bytes: Size of all files.
        step: The global step that the checkpoint records; None if it records none.
        problems: The reasons why the checkpoint is incomplete, each in a short sentence.
    """

    path: Path
    format: CheckpointFormat
    model: Mapping[str, StoredTensor]
    optimizers: Mapping[int, Mapping[str | int, StateByKey]] = field(default_factory=dict)
    num_bytes: int = 0
    step: int | None = None
    problems: tuple[str, ...] = ()

    def named_tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yields every tensor of model and optimizers with a readable name."""
        yield from self.model.items()
        for index, parameters in self.optimizers.items():
            for parameter, state in parameters.items():
                for key, tensor in state.items():
                    yield f"optimizer {index}, {parameter}, {key}", tensor


def measure(path: Path) -> int:
    """Returns the size of the file at `path`, or of all files directly in the directory at `path`."""
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    return path.stat().st_size
