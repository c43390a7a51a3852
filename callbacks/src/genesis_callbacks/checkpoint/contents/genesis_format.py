"""A checkpoint of this package, read by its manifest."""

import math
from collections import defaultdict
from pathlib import Path

from ..tensor_places import TensorPlaces
from ..verify import verify
from .stored import Contents, StoredBlock, StoredTensor, measure


def read_genesis(path: Path) -> Contents:
    """Returns what a checkpoint of this package holds.

    Raises:
        BaseCheckpointError: The base that holds some of its tensors is missing, has changed, or lacks a file.
        CorruptCheckpointError: A file of it is missing, or has another size than its manifest says.
    """
    manifest = verify(path, "quick")
    places = TensorPlaces(path, manifest)
    tensors: dict[str, StoredTensor] = {}
    for name, record in manifest.tensors.items():
        itemsize, place = record.torch_dtype.itemsize, places.locate(name)
        # What lies in a base has an absolute path, which no directory changes that is put before it.
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
