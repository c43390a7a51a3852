"""Reads a checkpoint of this package by its manifest."""

import math
from collections import defaultdict
from pathlib import Path

from ..tensor_places import TensorPlaces
from ..verify import verify
from .stored import Contents, StoredBlock, StoredTensor, measure


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
