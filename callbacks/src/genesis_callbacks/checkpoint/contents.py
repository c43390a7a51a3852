"""Reads what a checkpoint holds, whoever wrote it, without running any code that is in it.

Ours is read by its manifest; safetensors by its header; a file of `torch.save` (Lightning's .ckpt) by torch's
weights-only reader, without its tensors' bytes; a directory of torch's distributed checkpoint (DCP, what Lightning's
ModelParallelStrategy writes) by its `.metadata`, through an unpickler that knows DCP's own records and refuses any
other name. `find_non_finite` reads the bytes, block by block. Nothing here communicates.
"""

import io
import math
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from .._compat import offset_in_file
from .dcp_metadata import InertRecord, InertTensorRecord, read_dcp_metadata
from .errors import CheckpointError, CorruptCheckpointError
from .manifest import COMMITTED_NAME, DCP_METADATA_NAME, MANIFEST_NAME, is_checkpoint_name
from .safe_read import (
    MAX_DOCUMENT_BYTES,
    MAX_PICKLE_BYTES,
    MAX_PICKLE_MEMORY_BYTES,
    check_pickle_size,
    open_regular,
    parse_json,
    read_file,
    reading,
)
from .verify import verify

CheckpointFormat = Literal["genesis", "torch", "dcp", "safetensors"]

_TORCH_SUFFIXES = (".ckpt", ".pt", ".pth")
_LIGHTNING_META_NAME = "meta.pt"
_INDEX_PATTERN = "*.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors package has it
_TENSOR_BYTES = 1024  # of a tensor without its elements, in memory
_BLOCK_BYTES = 16 << 20
_LOCAL_HEADER_BYTES = 30  # of an entry of a zip archive, before its name
_SAFETENSORS_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_REFUSED_GLOBAL = re.compile(r"(?:GLOBAL|class|function|type)[: ]+`?([\w.]+\.[\w.]+)")
_OPTIMIZER_KEY = re.compile(r"optim(?:izer)?s?(?:_(\d+))?")


@dataclass(frozen=True)
class StoredBlock:
    """Where bytes of a tensor lie.

    Attributes:
        file: Relative to the checkpoint's directory.
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


def find_format(path: Path) -> CheckpointFormat | None:
    """Returns which kind of checkpoint lies at `path`, by its names alone; None where it looks like none."""
    if path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "torch" if path.suffix in _TORCH_SUFFIXES else None
    if not path.is_dir():
        return None
    names = {entry.name for entry in path.iterdir()}
    if names & {MANIFEST_NAME, COMMITTED_NAME} or is_checkpoint_name(path.resolve().name):
        return "genesis"
    if names & {DCP_METADATA_NAME, _LIGHTNING_META_NAME} or any(name.endswith(".distcp") for name in names):
        return "dcp"
    is_safetensors = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    return "safetensors" if is_safetensors else None


def measure(path: Path) -> int:
    """Returns the bytes of the file, or of all files directly in the directory, at `path`."""
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    return path.stat().st_size


def read_contents(path: Path | str) -> Contents:
    """Returns what the checkpoint at `path` holds. Any process may call it; no code in the checkpoint runs.

    Raises:
        CheckpointError: There is none, or it holds what is no plain data.
        CorruptCheckpointError: It is so damaged that nobody can tell what it holds.
        OSError: It cannot be read.
    """
    path = Path(path)
    kind = find_format(path)
    if kind is None:
        raise CheckpointError(
            f"{path} is no checkpoint that can be read: give a directory of genesis, DCP or safetensors, or a file "
            f"that ends in .safetensors, {', '.join(_TORCH_SUFFIXES)}"
        )
    try:
        return _READERS[kind](path)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever stands where a number or a name is due
        reason = (str(error).splitlines() or [""])[0]
        raise CorruptCheckpointError(
            f"{path} is not what a checkpoint of this format holds: {type(error).__name__}: {reason[:200]}"
        ) from error


# ---- ours


def _read_genesis(path: Path) -> Contents:
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


# ---- torch.save


def _check_archive(path: Path) -> None:
    """Refuses an archive that would become more in memory than it is on the disk.

    Raises:
        CorruptCheckpointError: It has compressed entries, or pickles that are too large.
    """
    descriptor = open_regular(path)
    with reading(path), os.fdopen(descriptor, "rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            is_part = file.read(4) == b"PK\x03\x04"
            what = "is truncated: its table of contents is missing" if is_part else "is no file that torch.save wrote"
            raise CorruptCheckpointError(f"{path.name} {what}")
        try:
            with zipfile.ZipFile(file) as archive:
                _check_entries(path, archive)
        except CheckpointError:
            raise
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise CorruptCheckpointError(f"{path.name} is no file that torch.save wrote: {error}") from error


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CorruptCheckpointError(f"{path.name} has a compressed entry {entry.filename}: torch.save writes none")
        if not entry.filename.lower().endswith(".pkl"):
            continue
        name = f"{path.name}: {entry.filename}"
        if entry.file_size > MAX_PICKLE_BYTES:
            raise CorruptCheckpointError(f"{name} has {entry.file_size} bytes, more than {MAX_PICKLE_BYTES}")
        data = archive.read(entry)
        check_pickle_size(data, name, object_bytes=_TENSOR_BYTES, max_memory_bytes=MAX_PICKLE_MEMORY_BYTES)


def _load_plain(path: Path) -> Any:
    """Returns what `torch.save` wrote, its tensors without their bytes.

    Raises:
        CheckpointError: It holds something that is no plain data.
        CorruptCheckpointError: It is no such file, or only a part of one.
    """
    _check_archive(path)
    try:
        return torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _REFUSED_GLOBAL.search(str(error))
        what = f"a {found[1]}" if found else "something"
        raise CheckpointError(
            f"{path.name} holds {what}, which is no plain data, and was not loaded: none of its code has run. Keep "
            "hyperparameters and callbacks' states to plain values, or allow a type that you trust by "
            "torch.serialization.add_safe_globals"
        ) from error
    except Exception as error:  # what a damaged file raises has no end
        reason = (str(error).splitlines() or [""])[0]
        raise CorruptCheckpointError(f"{path.name} cannot be read: {type(error).__name__}: {reason}") from error


def _locate_tensor(tensor: Tensor, file: str) -> StoredTensor:
    shape = tuple(tensor.shape)
    if tensor.layout != torch.strided or not tensor.numel():
        return StoredTensor(shape, tensor.dtype, ())
    itemsize = tensor.dtype.itemsize
    start = offset_in_file(tensor)
    # Of a view with gaps all between its first and its last element.
    num_elements = 1 + sum((size - 1) * int(stride) for size, stride in zip(shape, tensor.stride(), strict=True))
    block = StoredBlock(file, start + int(tensor.storage_offset()) * itemsize, num_elements * itemsize)
    return StoredTensor(shape, tensor.dtype, (block,))


def _locate_tensors(values: Any, file: str) -> dict[Any, StoredTensor]:
    items = values.items() if isinstance(values, Mapping) else ()
    return {key: _locate_tensor(value, file) for key, value in items if isinstance(value, Tensor)}


def _read_torch(path: Path) -> Contents:
    loaded = _load_plain(path)
    if not isinstance(loaded, Mapping):
        raise CorruptCheckpointError(f"{path.name} holds a {type(loaded).__name__} where a dict of tensors is due")
    model = _locate_tensors(loaded.get("state_dict", loaded), path.name)
    optimizers: dict[int, dict[str | int, StateByKey]] = {}
    for index, state in enumerate(loaded.get("optimizer_states") or ()):
        states = state.get("state", {}) if isinstance(state, Mapping) else {}
        optimizers[index] = {parameter: _locate_tensors(values, path.name) for parameter, values in states.items()}
    step = loaded.get("global_step")
    num_bytes = measure(path)
    blocks = [block for tensor in model.values() for block in tensor.blocks]
    beyond = any(block.offset + block.num_bytes > num_bytes for block in blocks)
    problems = (f"{path.name} ends before its last tensor does",) if beyond else ()
    return Contents(path, "torch", model, optimizers, num_bytes, step if isinstance(step, int) else None, problems)


# ---- DCP


def _read_dcp_tensors(metadata: InertRecord) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns the tensors by their flat name, and what does not fit."""
    infos: dict[str, list[Any]] = defaultdict(list)
    for index, info in vars(metadata)["storage_data"].items():
        infos[index.fqn].append(info)
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, record in vars(metadata)["state_dict_metadata"].items():
        if not isinstance(record, InertTensorRecord):
            continue
        shape = tuple(record.size)
        blocks = tuple(
            StoredBlock(info.relative_path, info.offset, info.length, is_archive=True) for info in infos[name]
        )
        tensors[name] = StoredTensor(shape, record.properties.arguments[0], blocks)
        # Whether blocks overlap is the planner's to see to: to compare each with each takes seconds for many ranks.
        num_elements = sum(math.prod(chunk.sizes) for chunk in record.chunks)
        if num_elements != math.prod(shape):
            problems.append(f"{name}: {num_elements} of its {math.prod(shape)} elements are there")
        if len(blocks) < len(record.chunks):
            problems.append(f"{name}: {len(blocks)} of its {len(record.chunks)} blocks were written")
    return tensors, problems


def _check_files(path: Path, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Returns which files are missing, too short or not the checkpoint's own, with how many tensors suffer."""
    names_by_file: dict[str, set[str]] = defaultdict(set)
    ends: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        for block in tensor.blocks:
            names_by_file[block.file].add(name)
            ends[block.file] = max(ends[block.file], block.offset + block.num_bytes)
    problems = []
    for file, names in sorted(names_by_file.items()):
        whose = f"with parts of {len(names)} tensors, such as {min(names)}"
        if Path(file).is_absolute() or ".." in Path(file).parts:
            problems.append(f"{file!r} is not in the checkpoint's own directory")
        elif not (path / file).is_file():
            problems.append(f"{file} is missing, {whose}")
        elif (path / file).stat().st_size < ends[file]:
            size = (path / file).stat().st_size
            problems.append(f"{file} has {size:,} bytes where at least {ends[file]:,} were written, {whose}")
    return problems


def _read_dcp(path: Path) -> Contents:
    metadata = read_dcp_metadata(path)
    try:
        tensors, problems = _read_dcp_tensors(metadata)
        places = vars(metadata).get("planner_data") or {}
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        raise CorruptCheckpointError(f"{DCP_METADATA_NAME} lacks {error}") from error
    problems += _check_files(path, tensors)
    model: dict[str, StoredTensor] = {}
    optimizers: dict[int, dict[str | int, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        head, *rest = places.get(name) or name.split(".")
        inner = ".".join(map(str, rest))
        optimizer = _OPTIMIZER_KEY.fullmatch(str(head))
        if optimizer is None:
            model[inner if head == "state_dict" else name] = tensor
        elif inner.startswith("state."):
            parameter, _, key = inner.removeprefix("state.").rpartition(".")
            optimizers[int(optimizer[1] or 0)][parameter][key] = tensor
    meta = path / _LIGHTNING_META_NAME
    step = _load_plain(meta).get("global_step") if meta.exists() else None
    return Contents(path, "dcp", model, optimizers, measure(path), step, tuple(problems))


# ---- safetensors


def _read_safetensors_file(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file.

    Raises:
        CorruptCheckpointError: It is truncated, or its header is none.
    """
    num_bytes = file.stat().st_size
    with os.fdopen(open_regular(file), "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 or length > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise CorruptCheckpointError(f"{file.name} is truncated, or is no safetensors file: it has no header")
        header = stream.read(length)
    tensors: dict[str, StoredTensor] = {}
    try:
        for name, entry in parse_json(header, f"the header of {file.name}").items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            block = StoredBlock(file.name, 8 + length + start, end - start)
            tensors[name] = StoredTensor(tuple(entry["shape"]), _SAFETENSORS_DTYPES[entry["dtype"]], (block,))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"{file.name} has a header that cannot be read: {error!r}") from error
    for name, tensor in tensors.items():
        (block,) = tensor.blocks
        if block.num_bytes != tensor.num_bytes:
            raise CorruptCheckpointError(
                f"{file.name}: {name} has {block.num_bytes} bytes where its shape needs {tensor.num_bytes}"
            )
        if block.offset + block.num_bytes > num_bytes:
            raise CorruptCheckpointError(
                f"{file.name} is truncated: it has {num_bytes:,} bytes and {name} ends at byte "
                f"{block.offset + block.num_bytes:,}"
            )
    return tensors


def _read_index(path: Path) -> dict[str, list[str]]:
    """Returns file to the tensors that the index of a directory promises in it; empty where there is no index."""
    promised: dict[str, list[str]] = defaultdict(list)
    for index in path.glob(_INDEX_PATTERN):
        try:
            for name, file in parse_json(read_file(index, MAX_DOCUMENT_BYTES), index.name)["weight_map"].items():
                promised[Path(file).name].append(name)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"{index.name} is no index of safetensors files: {error!r}") from error
    return promised


def _read_safetensors(path: Path) -> Contents:
    is_file = path.is_file()
    directory = path.parent if is_file else path
    promised = {} if is_file else _read_index(path)
    files = {path.name} if is_file else promised.keys() | {file.name for file in path.glob("*.safetensors")}
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name in sorted(files):
        if not (directory / name).is_file():
            problems.append(f"{name} is missing, with {len(promised[name])} tensors, such as {min(promised[name])}")
            continue
        try:
            found = _read_safetensors_file(directory / name)
        except CorruptCheckpointError as error:
            problems.append(str(error))
            continue
        tensors |= found
        lacking = set(promised.get(name, ())) - found.keys()
        if lacking:
            problems.append(f"{name} lacks {len(lacking)} tensors that the index promises, such as {min(lacking)}")
    return Contents(path, "safetensors", tensors, {}, measure(path), None, tuple(problems))


_READERS: Final[Mapping[CheckpointFormat, Callable[[Path], Contents]]] = {
    "genesis": _read_genesis,
    "torch": _read_torch,
    "dcp": _read_dcp,
    "safetensors": _read_safetensors,
}


# ---- the bytes


class _Window(io.RawIOBase):
    """A range of a file, as a file of its own."""

    def __init__(self, file: io.FileIO, offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes, self._position = file, offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._num_bytes - self._position))
        self._file.seek(self._offset + self._position)
        num_read = self._file.readinto(memoryview(buffer)[:wanted])
        self._position += num_read
        return num_read


def _find_elements(file: io.FileIO, block: StoredBlock) -> tuple[int, int]:
    """Returns (offset, bytes) of a block's elements in its file.

    Raises:
        CorruptCheckpointError: It should be an archive of one tensor and is none.
    """
    if not block.is_archive:
        return block.offset, block.num_bytes
    try:
        with zipfile.ZipFile(_Window(file, block.offset, block.num_bytes)) as archive:
            (entry,) = (info for info in archive.infolist() if "/data/" in info.filename)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CorruptCheckpointError(
            f"{block.file}: the {block.num_bytes} bytes at {block.offset} are not one tensor of torch.save"
        ) from error
    file.seek(block.offset + entry.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    names_bytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return block.offset + entry.header_offset + _LOCAL_HEADER_BYTES + names_bytes, entry.file_size


def _read_elements(file: io.FileIO, block: StoredBlock, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields a block's elements, some megabytes at a time, each time in the same memory."""
    offset, num_bytes = _find_elements(file, block)
    buffer = bytearray(min(_BLOCK_BYTES, num_bytes))
    for start in range(0, num_bytes, _BLOCK_BYTES):
        view = memoryview(buffer)[: num_bytes - start]
        file.seek(offset + start)
        filled = 0
        while filled < len(view):
            num_read = file.readinto(view[filled:])
            if not num_read:
                raise CorruptCheckpointError(f"{block.file} ends before byte {offset + num_bytes}: it is truncated")
            filled += num_read
        yield torch.frombuffer(buffer, dtype=dtype, count=len(view) // dtype.itemsize)


def _count_bad(elements: Tensor, *, may_be_infinite: bool) -> int:
    if elements.is_complex():
        elements = torch.view_as_real(elements)
    if elements.dtype.itemsize == 1:  # these have no infinity to compare with
        elements = elements.float()
    # Without its sign, what is not finite has no smaller bit pattern than infinity, and what is no number a larger one.
    # By numpy, which keeps to this thread: torch would take threads from the training.
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[elements.dtype.itemsize]
    infinity = int(torch.tensor(torch.inf, dtype=elements.dtype).view(integer))
    bits = elements.view(integer).numpy()
    magnitudes = bits & np.iinfo(bits.dtype).max
    return int(np.count_nonzero(magnitudes > infinity if may_be_infinite else magnitudes >= infinity))


def find_non_finite(
    contents: Contents,
    *,
    may_be_infinite: Collection[str] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, int]:
    """Returns the tensors of model and optimizers with elements that are not finite, and how many.

    Any thread may call it. It reads some megabytes at a time.

    Args:
        contents: As `read_contents` gave it.
        may_be_infinite: Names in `contents.model` where only what is not a number counts, such as a mask's.
        should_stop: Asked before each read; once it says yes, nothing is returned.

    Raises:
        CorruptCheckpointError: A file ends before its last tensor does, or holds something else than tensors.
        OSError: A file cannot be read.
    """
    directory = contents.path if contents.path.is_dir() else contents.path.parent
    blocks_by_file: dict[str, list[tuple[str, torch.dtype, StoredBlock]]] = defaultdict(list)
    for name, tensor in contents.named_tensors():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            for block in tensor.blocks:
                blocks_by_file[block.file].append((name, tensor.dtype, block))
    found: dict[str, int] = defaultdict(int)
    for file, blocks in blocks_by_file.items():
        with reading(directory / file), io.FileIO(open_regular(directory / file)) as stream:
            for name, dtype, block in sorted(blocks, key=lambda item: item[2].offset):
                for elements in _read_elements(stream, block, dtype):
                    if should_stop():
                        return {}
                    found[name] += _count_bad(elements, may_be_infinite=name in may_be_infinite)
    return {name: count for name, count in found.items() if count}
