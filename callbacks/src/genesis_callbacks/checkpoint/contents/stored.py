"""What a checkpoint of any format holds: its tensors and where their bytes lie."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

CheckpointFormat = Literal["genesis", "torch", "dcp", "safetensors"]


@dataclass(frozen=True)
class StoredBlock:
    """Where bytes of a tensor lie.

    Attributes:
        file: Relative to the checkpoint's directory; absolute where it is a file of the checkpoint's base.
        offset: Of the first byte.
        num_bytes: How many.
        is_archive: Whether they are what `torch.save` made of the block, and not its elements.
    """

    file: str
    offset: int
    num_bytes: int
    is_archive: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: its global shape, dtype, and where its elements lie."""

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
    """What a checkpoint holds.

    Attributes:
        path: The file or directory.
        format: Who reads it.
        model: Name to tensor, named as the checkpoint does, without the name of the container.
        optimizers: Number of the optimizer to parameter (its name, or its number in the groups' order) to key to
            tensor.
        num_bytes: Of all its files.
        step: The global step that it names, if it names one.
        problems: Why it is not whole, each in a short sentence.
    """

    path: Path
    format: CheckpointFormat
    model: Mapping[str, StoredTensor]
    optimizers: Mapping[int, Mapping[str | int, StateByKey]] = field(default_factory=dict)
    num_bytes: int = 0
    step: int | None = None
    problems: tuple[str, ...] = ()

    def named_tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yields every tensor of model and optimizers with a name for people."""
        yield from self.model.items()
        for index, parameters in self.optimizers.items():
            for parameter, state in parameters.items():
                for key, tensor in state.items():
                    yield f"optimizer {index}, {parameter}, {key}", tensor


def measure(path: Path) -> int:
    """Returns the bytes of the file, or of all files directly in the directory, at `path`."""
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    return path.stat().st_size
