"""A checkpoint of this package, read by its manifest."""

import math
from collections import defaultdict
from pathlib import Path

from ..verify import verify
from .stored import Contents, StoredBlock, StoredTensor, measure


def read_genesis(path: Path) -> Contents:
    """Returns what a checkpoint of this package holds.

    Raises:
        CorruptCheckpointError: A file of it is missing, or has another size than its manifest says.
    """
    manifest = verify(path, "quick")
    tensors: dict[str, StoredTensor] = {}
    for name, record in manifest.tensors.items():
        itemsize = record.torch_dtype.itemsize
        blocks = [
            StoredBlock(chunk.file, chunk.data_offset, math.prod(chunk.sizes) * itemsize) for chunk in record.chunks
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
