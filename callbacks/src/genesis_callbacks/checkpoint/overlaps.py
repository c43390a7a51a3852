"""Separates tensors of a live model that share memory although the checkpoint has different values for them.

A module may register one tensor as two buffers, or build two parameters on the same memory, and later give each its own
memory. When the module is built again for a restore, both share memory again, and filling one overwrites the other.
Views of one tensor whose saved values are consistent stay shared.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.local_shards import local_shards
from ..base.manifest import Manifest, TensorRecord
from .collect import MODEL_PREFIX, canonical_name, name_model
from .digest import digest_chunk
from .restore import restore_shards


def separate_shared(path: Path, manifest: Manifest, module: nn.Module) -> None:
    """Gives tensors of a model that share memory their own memory if their saved values are inconsistent.

    No communication. Tensors that share memory are filled with the saved values.

    Args:
        path: A checkpoint that verifies.
        manifest: Its manifest.
        module: The live model; changed in place.

    Raises:
        CorruptCheckpointError: A saved tensor cannot be read.
    """
    _separate_buffers(manifest.tensors, module)
    model = name_model(module.state_dict(keep_vars=True))
    tensors = {MODEL_PREFIX + name: tensor for name, tensor in model.tensors.items()}
    for names in _find_overlaps({name: tensor for name, tensor in tensors.items() if name in manifest.tensors}):
        parts = [part for name in names for part in local_shards(name, tensors[name], "buffer")]
        restore_shards(path, manifest, parts)
        digests = {part.part.name: digest_chunk(part.data, part.part.shape, part.part.offsets) for part in parts}
        if any(digest != manifest.tensors[name].digest for name, digest in digests.items()):
            for name in names:
                tensors[name].data = tensors[name].data.clone()


def _separate_buffers(records: Mapping[str, TensorRecord], module: nn.Module) -> None:
    """Replaces a buffer that is the same object as another one, if the two were saved with different values."""
    first: dict[int, str] = {}
    for key, buffer in list(module.named_buffers(remove_duplicate=False)):
        name = MODEL_PREFIX + canonical_name(key)
        other = first.setdefault(id(buffer), name)
        if name in records and other in records and records[name].digest != records[other].digest:
            owner, _, attribute = key.rpartition(".")
            setattr(module.get_submodule(owner), attribute, buffer.clone())


def _find_overlaps(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the groups of tensors whose address ranges, from first to last element, overlap."""
    spans = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + (reach + 1) * tensor.element_size(), name))
    groups: list[list[str]] = []
    end_of_group = 0
    for before, span in pairwise([("", 0, 0, ""), *sorted(spans)]):
        if span[0] != before[0] or span[1] >= end_of_group:
            groups.append([])
            end_of_group = 0
        groups[-1].append(span[3])
        end_of_group = max(end_of_group, span[2])
    return [group for group in groups if len(group) > 1]
