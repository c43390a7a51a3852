"""The weights of a decoder in a checkpoint, by their own names, also where NF4 keeps four tensors of bytes for one."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from genesis.model.nf4 import BYTES, dequantise
from genesis.model.recipe import DECODER_PREFIX
from genesis_callbacks.checkpoint import Manifest
from genesis_callbacks.checkpoint.restore import read_recorded_tensors

_WEIGHT = ".weight"


def list_nf4_tensors(manifest: Manifest) -> set[str]:
    """Returns the names, without the decoder's prefix, of the tensors that hold weights in NF4."""
    return {
        name.removeprefix(DECODER_PREFIX)
        for name, record in manifest.tensors.items()
        if name.startswith(DECODER_PREFIX) and is_of_nf4(name) and record.torch_dtype == torch.uint8
    }


def list_weights(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each of the decoder's tensors by its name in a manifest; one in NF4 is one weight."""
    of_bytes = list_nf4_tensors(manifest)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, record in manifest.tensors.items():
        if not name.startswith(DECODER_PREFIX):
            continue
        if name.removeprefix(DECODER_PREFIX) not in of_bytes:
            shapes[name] = record.shape
        elif name.endswith(f".{BYTES[0]}"):
            *rows, num_bytes = record.shape
            layer = name.removesuffix(f".{BYTES[0]}")
            # A stack of experts is a parameter itself, and no layer that has one.
            shapes[layer if len(rows) > 1 else layer + _WEIGHT] = (*rows, 2 * num_bytes)
    return shapes


def find_nf4_tensors(manifest: Manifest, weight: str) -> dict[str, str]:
    """Returns the names of the four tensors that hold a weight, by those in `BYTES`; empty if it is no NF4 weight."""
    layer = weight.removesuffix(_WEIGHT)
    names = {tensor: f"{layer}.{tensor}" for tensor in BYTES}
    return names if weight not in manifest.tensors and manifest.tensors.keys() >= set(names.values()) else {}


def read_stored(path: Path, manifest: Manifest, weights: Iterable[str]) -> dict[str, Tensor]:
    """Returns whole weights by the names of `list_weights`, compared with their digests; those in NF4 as float32."""
    read: dict[str, Tensor] = {}
    for weight in weights:
        names = find_nf4_tensors(manifest, weight)
        found = read_recorded_tensors(path, manifest, list(names.values()) or [weight])
        read[weight] = dequantise({t: found[n] for t, n in names.items()}, torch.float32) if names else found[weight]
    return read


def is_of_nf4(name: str) -> bool:
    """Returns whether a name is that of a tensor that holds a part of a weight in NF4."""
    return name.rpartition(".")[2] in BYTES
