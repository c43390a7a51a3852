"""Reads tensors into any sharding, from the raw bytes of the files, with a plan from the manifest alone.

Nothing is unpickled. Each rank reads only the rows that overlap the parts that it holds. A tensor that was read whole
is compared with its digest at once. Sharded tensors are compared after they are placed, by a sum over the ranks.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError
from ..base.errors import name_some
from ..base.local_shards import LocalShard, TensorShard, local_shards
from ..base.manifest import STATE_NAME, ChunkRecord, Manifest, TensorRecord, dtype_name, read_manifest
from ..base.safe_read import open_regular, reading
from .collect import MODEL_PREFIX, canonical_name, name_model
from .dcp_metadata import check_dcp_metadata
from .digest import DIGEST_MODULUS, digest_chunk, digest_tensor
from .ranks import Ranks
from .state import read_roles, read_state
from .tagged_json import check_tagged
from .tensor_places import TensorPlace, TensorPlaces, blaming_base
from .tiling import blocks_overlap, check_tiling

_READ_BLOCK_BYTES = 64 << 20

_BLOCK_BYTES = 16 << 20
_MAX_NAMED = 5


def read_exactly(descriptor: int, buffer: memoryview, offset: int, file: str) -> None:
    """Fills a buffer from a position of an open file.

    Raises:
        CorruptCheckpointError: The file ends before; the message names it.
    """
    while buffer:
        # The kernel returns at most 2 GiB at a time, and network file systems less: a short read is not the end.
        num_bytes = os.preadv(descriptor, [buffer], offset)
        if num_bytes == 0:
            raise CorruptCheckpointError(f"{file} ends before byte {offset}: it is truncated")
        buffer, offset = buffer[num_bytes:], offset + num_bytes


class TensorReader:
    """Reads elements of one checkpoint's tensors from its own files or its base's, opened on demand. Not thread-safe.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._places = TensorPlaces(path, manifest)
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def locate(self, name: str) -> TensorPlace:
        """Returns where a tensor lies; raises like `TensorPlaces.locate`."""
        return self._places.locate(name)

    def read_rows(self, place: TensorPlace, chunk: ChunkRecord, first: int, count: int) -> Tensor:
        """Returns `count` rows (of dim 0) of a chunk, from row `first` on."""
        shape = (count, *chunk.sizes[1:]) if chunk.sizes else ()
        return self.read_elements(place, chunk, first * math.prod(chunk.sizes[1:]), math.prod(shape)).view(shape)

    def read_elements(self, place: TensorPlace, chunk: ChunkRecord, first: int, count: int) -> Tensor:
        """Returns `count` elements of a chunk in row-major order, from element `first` on.

        Raises:
            BaseCheckpointError: The file is missing or too short, and it is a base's.
            CorruptCheckpointError: The same for any other checkpoint.
            UnreadableCheckpointError: The file cannot be read.
        """
        file, dtype = place.path / chunk.file, place.record.torch_dtype
        offset, num_bytes = chunk.data_offset + first * dtype.itemsize, count * dtype.itemsize
        with blaming_base(place.path, place.named_by):
            if file not in self._descriptors:
                self._descriptors[file] = open_regular(file)
            with reading(file):
                # Before the allocation, because a damaged manifest may claim any size.
                if os.fstat(self._descriptors[file]).st_size < offset + num_bytes:
                    raise CorruptCheckpointError(f"{chunk.file} ends before byte {offset + num_bytes}: it is truncated")
                # Read as bytes and viewed as the dtype: `torch.load` would run the pickle that the file holds beside
                # them.
                raw = torch.empty(num_bytes, dtype=torch.uint8)
                read_exactly(self._descriptors[file], memoryview(raw.numpy().data), offset, chunk.file)
        return raw.view(dtype)


def _copy_overlap(reader: TensorReader, place: TensorPlace, chunk: ChunkRecord, target: LocalShard) -> None:
    """Copies the elements that `chunk` and `target` share, some rows at a time."""
    # Whole rows are read, which are one range of the file, and their columns are cut in memory. Some rows at a time,
    # because a rank may hold a small part of a chunk that is larger than its memory.
    if not place.record.shape:
        target.data.copy_(reader.read_rows(place, chunk, 0, 1))
        return
    part = target.part
    starts = [max(ours, theirs) for ours, theirs in zip(part.offsets, chunk.offsets, strict=True)]
    ends = [
        min(ours + our_size, theirs + their_size)
        for ours, our_size, theirs, their_size in zip(part.offsets, part.sizes, chunk.offsets, chunk.sizes, strict=True)
    ]
    row_bytes = max(1, math.prod(chunk.sizes[1:]) * place.record.torch_dtype.itemsize)
    step = max(1, _READ_BLOCK_BYTES // row_bytes)
    for row in range(starts[0], ends[0], step):
        count = min(step, ends[0] - row)
        source = reader.read_rows(place, chunk, row - chunk.offsets[0], count)
        block = target.data.narrow(0, row - part.offsets[0], count)
        for dim in range(1, len(starts)):
            size = ends[dim] - starts[dim]
            source = source.narrow(dim, starts[dim] - chunk.offsets[dim], size)
            block = block.narrow(dim, starts[dim] - part.offsets[dim], size)
        block.copy_(source)


def check_fits(manifest: Manifest, part: TensorShard) -> TensorRecord:
    """Returns the record of the tensor that `part` belongs to.

    Raises:
        CheckpointError: The tensor is missing, or it has another shape or dtype; a restore never casts.
    """
    record = manifest.tensors.get(part.name)
    if record is None:
        raise CheckpointError(f"{part.name} is not in the checkpoint of step {manifest.step}")
    if record.shape != part.shape or record.torch_dtype != part.dtype:
        raise CheckpointError(
            f"{part.name} is {record.dtype} {list(record.shape)} in the checkpoint of step {manifest.step} and "
            f"{dtype_name(part.dtype)} {list(part.shape)} in the live model: use the model that was saved"
        )
    return record


def restore_shards(path: Path, manifest: Manifest, targets: Iterable[LocalShard]) -> None:
    """Fills each target's data from the checkpoint at `path`.

    Any rank may call it for the parts that it holds. It does not communicate, and reads only the rows that overlap
    these parts. It compares no digests: call `check_restored` afterwards.

    Raises:
        BaseCheckpointError: The base that holds a target is missing, has changed, or lacks a file.
        CheckpointError: A target is not in the checkpoint, or has another shape or dtype there.
        CorruptCheckpointError: A file is missing or too short.
    """
    with TensorReader(path, manifest) as reader:
        for target in targets:
            check_fits(manifest, target.part)
            _fill_target(reader, reader.locate(target.part.name), target)


def _fill_target(reader: TensorReader, place: TensorPlace, target: LocalShard) -> None:
    with torch.no_grad():
        for chunk in place.record.chunks:
            if not place.record.shape or blocks_overlap(
                chunk.offsets, chunk.sizes, target.part.offsets, target.part.sizes
            ):
                _copy_overlap(reader, place, chunk, target)


def digest_shards(parts: Iterable[LocalShard]) -> dict[TensorShard, int]:
    """Returns the digest of each part's live data. No communication."""
    return {local.part: digest_chunk(local.data, local.part.shape, local.part.offsets) for local in parts}


def find_misplaced(manifest: Manifest, digests_by_rank: Sequence[Mapping[TensorShard, int]]) -> dict[str, str]:
    """Returns name to reason for every restored tensor that, over all ranks together, differs from the saved one."""
    # A sum of digests misses absent zeros, because a word of zero adds nothing to it: hence the count of elements.
    reasons: dict[str, str] = {}
    totals: dict[str, int] = defaultdict(int)
    elements: dict[str, int] = defaultdict(int)
    seen: dict[TensorShard, int] = {}
    for rank, digests in enumerate(digests_by_rank):
        for part, digest in digests.items():
            if part not in seen:
                seen[part] = digest
                totals[part.name] = (totals[part.name] + digest) % DIGEST_MODULUS
                elements[part.name] += math.prod(part.sizes)
            elif seen[part] != digest:  # a replica counts once and only has to be equal
                reasons[part.name] = f"rank {rank} holds other values than the ranks before it"
    for name, total in totals.items():
        record = manifest.tensors[name]
        if elements[name] != math.prod(record.shape):
            reasons.setdefault(
                name, f"{elements[name]:,} of {numbered(math.prod(record.shape), 'elements')} were restored"
            )
        elif total != record.digest:
            reasons.setdefault(name, f"its digest is {total:016x}, but {record.digest:016x} was saved")
    return reasons


def check_restored(manifest: Manifest, parts: Iterable[LocalShard], ranks: Ranks) -> None:
    """Compares the placed tensors of all ranks together with the saved ones. Collective; communicates once.

    Raises:
        CorruptCheckpointError: On every rank alike, with the names of the tensors that differ.
    """
    digests = ranks.attempt_and_gather(
        "checking the restored tensors", lambda: digest_shards(parts), error_type=CheckpointError
    )
    reasons = find_misplaced(manifest, digests)
    if reasons:
        listed = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items())[:5])
        raise CorruptCheckpointError(
            f"step {manifest.step} was saved with other values of {numbered(len(reasons), 'tensors')}: {listed}"
        )


def _check_readable(reader: TensorReader, place: TensorPlace) -> None:
    """Checks that the files exist and are long enough, by their last element, before memory is allocated."""
    for chunk in place.record.chunks:
        num_elements = math.prod(chunk.sizes)
        reader.read_elements(place, chunk, max(0, num_elements - 1), min(1, num_elements))


def read_recorded_tensors(path: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU by name, each compared with its digest. No communication.

    Raises:
        BaseCheckpointError: The base that holds a tensor is missing, has changed, or is damaged.
        CorruptCheckpointError: A tensor differs from the saved one.
    """
    with TensorReader(path, manifest) as reader:
        return {name: _read_whole(reader, name) for name in names}


def _read_whole(reader: TensorReader, name: str) -> Tensor:
    place = reader.locate(name)
    record = place.record
    with blaming_base(place.path, place.named_by):
        check_tiling(name, record.shape, [(chunk.offsets, chunk.sizes) for chunk in record.chunks])
        _check_readable(reader, place)
        tensor = torch.empty(record.shape, dtype=record.torch_dtype)
        zeros = (0,) * len(record.shape)
        part = TensorShard(name, "state", record.shape, tensor.dtype, zeros, record.shape)
        _fill_target(reader, place, LocalShard(part, tensor))
        # The digest of the live tensor at the save, and not the file's hash: it also covers the plan of this read.
        _check_same(place, name, digest_tensor(tensor))
    return tensor


def read_tensors(
    path: Path | str, names: Iterable[str] | None = None, *, prefix: str | None = None
) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU by canonical name, each compared with its digest.

    Any process may call it, without a process group; nothing is unpickled. Names are `model.<fqn>`,
    `optimizer.<i>.<fqn>.<key>` and `state.<rank>.<path>`.

    Args:
        path: A committed checkpoint.
        names: Names of the tensors to read; all by default.
        prefix: The prefix of the tensors to read, such as `model.`.

    Raises:
        BaseCheckpointError: The base that holds a tensor is missing, has changed, or is damaged.
        CheckpointError: The checkpoint, or a tensor of that name, does not exist.
        CorruptCheckpointError: The checkpoint is not committed, or a tensor differs from the saved one.
    """
    path = Path(path)
    manifest = read_manifest(path)
    wanted = manifest.tensors if names is None else names
    return read_recorded_tensors(path, manifest, [name for name in wanted if prefix is None or name.startswith(prefix)])


def check_state(path: Path, manifest: Manifest) -> None:
    """Checks that the state of a checkpoint can be decoded, one section for each rank, without building any object.

    Raises:
        CorruptCheckpointError: The state cannot be decoded.
        UnreadableCheckpointError: The state cannot be read.
    """
    sections = read_state(path, manifest)
    if len(sections) != manifest.world_size:
        raise CorruptCheckpointError(
            f"{path / STATE_NAME} has {numbered(len(sections), 'sections')}, but "
            f"{numbered(manifest.world_size, 'ranks')} saved"
        )
    read_roles(sections)
    dtypes = {name: record.torch_dtype for name, record in manifest.tensors.items()}
    try:
        for section in sections:
            check_tagged(section, dtypes)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path / STATE_NAME} cannot be restored: {error}") from error


def separate_shared(path: Path, manifest: Manifest, module: nn.Module) -> None:
    """Gives tensors of a model that share memory their own memory if their saved values are inconsistent.

    A module may register one tensor as two buffers, or build two parameters on the same memory, and later give each its
    own memory. When the module is built again for a restore, both share memory again, and filling one overwrites the
    other. Tensors that share memory are filled with the saved values here, and stay shared if these are consistent. No
    communication.

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


def _first_of_run(shape: Sequence[int], chunk: ChunkRecord) -> int | None:
    """Returns the number of the chunk's first element if it is one run of the tensor's row-major order, else None."""
    longest = next((dim for dim, size in enumerate(chunk.sizes) if size > 1), len(shape))
    if tuple(chunk.sizes[longest + 1 :]) != tuple(shape[longest + 1 :]):
        return None
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(chunk.offsets))


def _digest_recorded(reader: TensorReader, place: TensorPlace, chunk: ChunkRecord) -> int:
    """Returns the digest of a chunk's bytes, some megabytes at a time."""
    shape, item_bytes, num_elements = place.record.shape, place.record.torch_dtype.itemsize, math.prod(chunk.sizes)
    start = _first_of_run(shape, chunk)
    total = 0
    if start is not None:
        step, whole = _BLOCK_BYTES // item_bytes, (math.prod(shape),)
        for first in range(0, num_elements, step):
            block = reader.read_elements(place, chunk, first, min(step, num_elements - first))
            total += digest_chunk(block, whole, (start + first,))
        return total
    step = max(1, _BLOCK_BYTES // (math.prod(chunk.sizes[1:]) * item_bytes)) if num_elements else chunk.sizes[0]
    for first in range(0, chunk.sizes[0] if num_elements else 0, step):
        block = reader.read_rows(place, chunk, first, min(step, chunk.sizes[0] - first))
        total += digest_chunk(block, shape, (chunk.offsets[0] + first, *chunk.offsets[1:]))
    return total


def _check_digest(path: Path, manifest: Manifest, name: str) -> None:
    # A reader for each tensor: the shards of a thousand ranks are more files than a process may have open.
    with TensorReader(path, manifest) as reader:
        place = reader.locate(name)
        digest = sum(_digest_recorded(reader, place, chunk) for chunk in place.record.chunks) % DIGEST_MODULUS
    _check_same(place, name, digest)


def _check_same(place: TensorPlace, name: str, digest: int) -> None:
    if digest != place.record.digest:
        raise CorruptCheckpointError(
            f"{place.path}: {name} has digest {digest:016x}, but {place.record.digest:016x} was saved: its bytes have "
            "changed"
        )


def describe_changed(path: Path, manifest: Manifest, names: Iterable[str]) -> str:
    """Returns which tensors of a damaged checkpoint differ from the saved ones, in words."""
    changed = []
    for name in names:
        try:
            _check_digest(path, manifest, name)
        except CheckpointError:
            changed.append(name)
    if not changed:
        return "every tensor is as it was saved"
    return f"changed: {name_some(changed, _MAX_NAMED)}"


def check_digests(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares the digest of each tensor.

    Raises:
        CorruptCheckpointError: A tensor differs from the saved one.
    """
    # In this thread: torch's own threads do not work in new threads of a forked process.
    for name in names:
        _check_digest(path, manifest, name)


def check_rest(path: Path, manifest: Manifest) -> None:
    """Checks the metadata for other tools, and the state.

    Raises:
        CorruptCheckpointError: One of them cannot be read, or differs from the manifest.
    """
    check_dcp_metadata(path, manifest)
    check_state(path, manifest)
