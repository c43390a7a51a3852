"""The manifest, which lists everything that belongs to a checkpoint.

A directory is a checkpoint if its `COMMITTED` holds the hash of its `manifest.json`. The checkpoint is undamaged if
every file matches the manifest. A restore plans from the manifest alone; DCP's `.metadata` is written for other tools,
and restores never read it.

Reading a manifest imports no torch, so that checkpoints are listed in a moment.
"""

import dataclasses
import functools
import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from genesis_callbacks.base.errors import numbered

from .checkpoint_errors import CheckpointError, CorruptCheckpointError
from .hashing import HashAlgorithm, hash_bytes
from .run_directory import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    checkpoint_name,
    is_checkpoint_name,
)
from .safe_read import MAX_DOCUMENT_BYTES, MAX_NOTE_BYTES, parse_json, read_file, reading

if TYPE_CHECKING:
    import torch

    from .chunk_table import ChunkTable

SCHEMA_VERSION = 4
"""The newest schema that this version reads. Schema 1 had no `has_optimizer` (always true) and no `directory` of an
ancestor (always the checkpoint's own directory); schema 2 had no `base`; schema 3 listed every chunk as an object."""
_SCHEMA_WITHOUT_BASE = 2
"""The schema of a checkpoint that holds all of its tensors; earlier versions can read it."""
_SCHEMA_WITHOUT_TABLES = 3
MAX_LISTED_CHUNKS = 1 << 16
"""The number of chunks up to which each is an object in the JSON; above it, the chunks of a tensor are a table of
numbers in base64, of which a reader needs no object each."""
STATE_NAME = "state.json"
DCP_METADATA_NAME = ".metadata"
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,200}")
_HASH = re.compile(r"[0-9a-f]{64}")
_MARKER = re.compile(r"(?:blake3|sha256):[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_DTYPE_NAME = re.compile(r"[a-z0-9_]{1,40}")
_ALGORITHM = re.compile(r"blake3|sha256")
_PATH = re.compile(r"[^\0\ud800-\udfff]{0,4000}")
_ABSOLUTE_PATH = re.compile(r"/[^\0\ud800-\udfff]{0,4000}")
_ANY_TEXT = re.compile(r".*", re.DOTALL)
_MAX_NUMBER = (1 << 63) - 1
_MAX_RANKS = 1 << 20
MAX_DIMS = 64
"""torch's limit."""
_MAX_SECONDS = 253_402_300_800  # the year 10000, which the standard library's `datetime` cannot represent
_MAX_SHOWN = 80
_BASE_TENSOR_KEYS = ("shape", "dtype", "digest")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its name, size, hash and the rank that wrote it."""

    name: str
    num_bytes: int
    hash: str
    rank: int


@dataclass(frozen=True)
class ChunkRecord:
    """The location of one chunk of a tensor.

    `byte_offset` and `num_bytes` are the range of the serialised chunk in its file, which DCP reads. `data_offset` is
    the offset of the elements themselves in the file, row-major and little-endian, so that a restore can read them
    without unpickling.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte_offset: int
    num_bytes: int
    data_offset: int


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: its global shape, dtype (`float32`, ...), digest of the live tensor, and chunks.

    A tensor in a base checkpoint has no chunks in this record; `TensorPlaces` finds them.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: int
    chunks: Sequence[ChunkRecord]

    @property
    def item_bytes(self) -> int:
        """Size of an element, which the number in the dtype's name determines; types of less than a byte take one."""
        bits = re.search(r"\d+", self.dtype)
        return 1 if bits is None else max(1, int(bits[0]) // 8)

    @property
    def torch_dtype(self) -> "torch.dtype":
        """Torch's dtype."""
        return dtype_from_name(self.dtype)


@dataclass(frozen=True)
class Ancestor:
    """The previous checkpoint, identified by its name and the hash of its manifest.

    `directory` is set if that checkpoint lies in another directory (a fork's origin); it is relative to this
    checkpoint's directory.
    """

    name: str
    manifest_hash: str
    directory: str | None = None

    def locate(self, directory: Path) -> Path:
        """Returns the ancestor's path, for a descendant in `directory`."""
        return directory / (self.directory or "") / self.name


@dataclass(frozen=True)
class BaseReference:
    """A reference to the base checkpoint, which holds tensors that this checkpoint does not hold itself.

    Attributes:
        path: Absolute path of the base at the time of the save.
        relative_path: The same path relative to this checkpoint's directory, in case both are moved together.
        manifest_hash: The hash in the base's commit marker.
        names: The tensors in the base.
    """

    path: str
    relative_path: str
    manifest_hash: str
    names: frozenset[str]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        step: Windows attempted.
        sequence: Number of the save in its lineage, counted from 1: `latest` is the largest number, not step.
        counters: Exact clocks of the run, such as `tokens_seen`.
        world_size: Number of ranks that saved.
        mesh: Axis name to size of the device mesh of the parameters, if they were sharded.
        identity: Values that must be equal at restore (`tokenizer_hash`, `corpus_hash`, ...), plain JSON.
        recipe: The resolved recipe, plain JSON.
        versions: The environment: package to version and, on an accelerator, the results of the proofs at the start,
            under `device` and `device.*`.
        created_seconds: Unix time of the commit.
        previous: The previous checkpoint in the lineage; None for the first.
        tensors: All tensors of the checkpoint, including those in its base.
        base: The checkpoint that holds some of the tensors; None if this checkpoint holds all.
        has_optimizer: Whether the run's optimizers were saved; without them, a restore can only load weights.
    """

    step: int
    sequence: int
    counters: dict[str, int]
    world_size: int
    mesh: dict[str, int]
    identity: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    previous: Ancestor | None
    created_seconds: float = 0.0
    files: tuple[FileRecord, ...] = ()
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    has_optimizer: bool = True
    hash_algorithm: HashAlgorithm = "blake3"
    base: BaseReference | None = None
    schema_version: int = field(default=_SCHEMA_WITHOUT_BASE)

    @property
    def own_tensors(self) -> dict[str, TensorRecord]:
        """The tensors that the checkpoint's own files hold."""
        if self.base is None:
            return self.tensors
        return {name: record for name, record in self.tensors.items() if name not in self.base.names}


def schema_for(base: BaseReference | None, num_chunks: int) -> int:
    """Returns the schema for a new manifest: the oldest one that can express its content."""
    if num_chunks > MAX_LISTED_CHUNKS:
        return SCHEMA_VERSION
    return _SCHEMA_WITHOUT_BASE if base is None else _SCHEMA_WITHOUT_TABLES


def _tables() -> "type[ChunkTable]":
    """Returns the class of tables; the first call imports numpy."""
    found: type[ChunkTable] = importlib.import_module(".chunk_table", __package__).ChunkTable
    return found


def dtype_name(dtype: "torch.dtype") -> str:
    """Returns the name of a dtype in manifests, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> "torch.dtype":
    """Returns the dtype with the given name.

    Raises:
        CheckpointError: This torch has no such dtype.
    """
    dtype = _dtypes().get(name)
    if dtype is None:
        raise CheckpointError(f"unknown dtype {name!r}: restore with a torch that has it (this is {version('torch')})")
    return dtype


@functools.cache
def _dtypes() -> dict[str, "torch.dtype"]:
    """Returns torch's dtypes by name; the first call imports torch."""
    module = importlib.import_module("torch")
    return {name: value for name, value in vars(module).items() if isinstance(value, module.dtype)}


def _keys_of(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes of `manifest.json`: one line for each tensor, and an indented text for the other fields."""
    # No `asdict`, which copies every chunk, and no indentation inside a tensor, which only Python's encoder knows: the
    # manifest of a thousand ranks has hundreds of thousands of chunks.
    content = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    content["files"] = [vars(record) for record in manifest.files]
    content["previous"] = manifest.previous and vars(manifest.previous)
    base = content.pop("base")
    if base is not None:
        in_base = {name: _encode_description(manifest.tensors[name]) for name in base.names}
        content["base"] = {**vars(base), "tensors": in_base}
        del content["base"]["names"]
    texts = {
        name: json.dumps(value, indent=1, sort_keys=True, allow_nan=False).replace("\n", "\n ")
        for name, value in content.items()
        if name != "tensors"
    }
    numbers = {record.name: number for number, record in enumerate(manifest.files)}
    if manifest.schema_version <= _SCHEMA_WITHOUT_TABLES:
        numbers = {}
    lines = [
        f"\n  {json.dumps(name)}: {json.dumps(_encode_tensor(record, numbers), sort_keys=True)}"
        for name, record in sorted(manifest.own_tensors.items())
    ]
    texts["tensors"] = "{" + ",".join(lines) + "\n }"
    return ("{\n" + ",\n".join(f' "{name}": {text}' for name, text in sorted(texts.items())) + "\n}\n").encode()


def _encode_description(record: TensorRecord) -> dict[str, Any]:
    return {"shape": record.shape, "dtype": record.dtype, "digest": f"{record.digest:016x}"}


def _encode_tensor(record: TensorRecord, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Returns the JSON of a record, with a table of its chunks if files have numbers."""
    chunks = _tables().of(record.chunks).encode(numbers) if numbers else [vars(chunk) for chunk in record.chunks]
    return {**_encode_description(record), "chunks": chunks}


# ---- decoding: every value is checked here, once, so that later code never meets an unexpected type


def _refuse(where: str, value: Any, due: str) -> NoReturn:
    brief = f"{type(value).__name__} {value!r}" if isinstance(value, str | int | float) else type(value).__name__
    raise CorruptCheckpointError(f"{MANIFEST_NAME}: {where[:_MAX_SHOWN]} is {brief[:_MAX_SHOWN]}, but must be {due}")


def _whole(value: Any, where: str, low: int = 0, high: int = _MAX_NUMBER) -> int:
    if type(value) is not int or not low <= value <= high:
        _refuse(where, value, f"a whole number from {low} to {high}")
    return value


def _wholes(value: Any, where: str, count: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS or (count is not None and len(value) != count):
        _refuse(where, value, f"a list of {numbered(MAX_DIMS if count is None else count, 'numbers')} at most")
    return tuple(_whole(item, where) for item in value)


def _text(value: Any, where: str, pattern: re.Pattern[str] = _ANY_TEXT) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        _refuse(where, value, f"a text like {pattern.pattern}" if pattern is not _ANY_TEXT else "a text")
    return value


def _items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(where, value, "a list")
    return value


def _object(
    value: Any, where: str, keys: Collection[str] | None = None, optional: Collection[str] = ()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    if keys is not None:
        lacking, odd = set(keys) - value.keys(), value.keys() - set(keys) - set(optional)
        if lacking or odd:
            what = f"lacks {min(lacking)!r}" if lacking else f"has the unknown field {min(odd)[:_MAX_SHOWN]!r}"
            raise CorruptCheckpointError(f"{MANIFEST_NAME}: {where[:_MAX_SHOWN]} {what}")
    return value


def _decode_file(content: Any, world_size: int) -> FileRecord:
    record = _object(content, "a file", _keys_of(FileRecord))
    name = _text(record["name"], "a file's name", _FILE_NAME)
    return FileRecord(
        name,
        _whole(record["num_bytes"], f"the size of {name}"),
        _text(record["hash"], f"the hash of {name}", _HASH),
        _whole(record["rank"], f"the rank of {name}", high=world_size - 1),
    )


def _decode_chunk(content: Any, name: str, shape: tuple[int, ...], sizes_of_files: Mapping[str, int]) -> ChunkRecord:
    record = _object(content, f"a chunk of {name}", _keys_of(ChunkRecord))
    chunk = ChunkRecord(
        _wholes(record["offsets"], f"the offsets of a chunk of {name}", len(shape)),
        _wholes(record["sizes"], f"the sizes of a chunk of {name}", len(shape)),
        _text(record["file"], f"the file of a chunk of {name}", _FILE_NAME),
        *(_whole(record[key], f"{key} of a chunk of {name}") for key in ("byte_offset", "num_bytes", "data_offset")),
    )
    if chunk.file not in sizes_of_files:
        raise CorruptCheckpointError(f"{MANIFEST_NAME}: {name} lies in {chunk.file}, which is not listed")
    if chunk.byte_offset + chunk.num_bytes > sizes_of_files[chunk.file]:
        raise CorruptCheckpointError(f"{name}: a chunk lies beyond the end of {chunk.file}")
    if any(offset + size > whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
        raise CorruptCheckpointError(f"{name}: a chunk lies outside of its shape {list(shape)}")
    return chunk


def _decode_description(name: str, record: Mapping[str, Any]) -> TensorRecord:
    """Returns the fields of a tensor's record other than its chunks."""
    shape = _wholes(record["shape"], f"the shape of {name}")
    _whole(math.prod(shape), f"the number of elements of {name}", high=_MAX_NUMBER >> 4)
    return TensorRecord(
        shape,
        _text(record["dtype"], f"the dtype of {name}", _DTYPE_NAME),
        int(_text(record["digest"], f"the digest of {name}", _DIGEST), 16),
        (),
    )


def _decode_tensor(name: str, content: Any, sizes_of_files: Mapping[str, int], *, has_tables: bool) -> TensorRecord:
    record = _object(content, f"tensor {name}", _keys_of(TensorRecord))
    described = _decode_description(name, record)
    if has_tables:
        text = _text(record["chunks"], f"the chunks of {name}")
        table = _tables().decode(text, name, described.shape, described.item_bytes, sizes_of_files)
        return replace(described, chunks=table)
    chunks = _items(record["chunks"], f"chunks of {name}")
    tensor = replace(
        described, chunks=tuple(_decode_chunk(chunk, name, described.shape, sizes_of_files) for chunk in chunks)
    )
    itemsize = tensor.item_bytes  # an unknown dtype is refused when the tensor is used
    for chunk in tensor.chunks:
        data_end = chunk.data_offset + math.prod(chunk.sizes) * itemsize
        if not chunk.byte_offset <= chunk.data_offset <= data_end <= chunk.byte_offset + chunk.num_bytes:
            raise CorruptCheckpointError(f"{name}: a chunk's elements lie outside of its bytes")
    return tensor


def _decode_tensors(content: Any, files: Sequence[FileRecord], *, has_tables: bool) -> dict[str, TensorRecord]:
    sizes_of_files = {record.name: record.num_bytes for record in files}
    # The two that no manifest lists count, too: a copy of a checkpoint writes them beside the listed ones.
    if len(sizes_of_files.keys() | {MANIFEST_NAME, COMMITTED_NAME}) < len(files) + 2:
        raise CorruptCheckpointError(f"{MANIFEST_NAME}: a file is listed twice")
    tensors = {
        name: _decode_tensor(name, record, sizes_of_files, has_tables=has_tables)
        for name, record in _object(content, "tensors").items()
    }
    # Otherwise a small file could back tensors of any size.
    used = Counter[str]()
    for tensor in tensors.values():
        chunks: Any = tensor.chunks
        for file, num_bytes in chunks.bytes_by_file() if has_tables else ((it.file, it.num_bytes) for it in chunks):
            used[file] += num_bytes
    for name, num_bytes in used.items():
        if num_bytes > sizes_of_files[name]:
            raise CorruptCheckpointError(f"{MANIFEST_NAME}: the chunks in {name} have more bytes than it has")
    return tensors


def _decode_ancestor(content: Any) -> Ancestor | None:
    if content is None:
        return None
    record = _object(content, "previous", ("name", "manifest_hash"), ("directory",))
    directory = record.get("directory")
    return Ancestor(
        _text(record["name"], "the name of the previous checkpoint", _CHECKPOINT_NAME),
        _text(record["manifest_hash"], "the hash of the previous checkpoint", _MARKER),
        None if directory is None else _text(directory, "the directory of the previous checkpoint", _PATH),
    )


def _decode_base(content: Any, own: Collection[str]) -> tuple[BaseReference | None, dict[str, TensorRecord]]:
    """Returns the base and the tensors in it; None and no tensors if there is no base."""
    if content is None:
        return None, {}
    record = _object(content, "base", ("path", "relative_path", "manifest_hash", "tensors"))
    tensors = {
        name: _decode_description(name, _object(described, f"tensor {name} of the base", _BASE_TENSOR_KEYS))
        for name, described in _object(record["tensors"], "the tensors of the base").items()
    }
    doubled = tensors.keys() & set(own)
    if doubled:
        raise CorruptCheckpointError(f"{MANIFEST_NAME}: {min(doubled)[:_MAX_SHOWN]} is here and in the base")
    base = BaseReference(
        _text(record["path"], "the path of the base", _ABSOLUTE_PATH),
        _text(record["relative_path"], "the relative path of the base", _PATH),
        _text(record["manifest_hash"], "the hash of the base", _MARKER),
        frozenset(tensors),
    )
    return base, tensors


def decode_manifest(data: bytes) -> Manifest:
    """Returns the manifest in `data`, after checking the type and range of each value.

    Raises:
        CheckpointError: The schema is newer than this version.
        CorruptCheckpointError: The data are not a valid manifest.
    """
    content = _object(parse_json(data, MANIFEST_NAME), "it")
    schema_version = _whole(content.get("schema_version"), "schema_version", low=1)
    if schema_version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{MANIFEST_NAME} has schema {schema_version}, this version reads up to {SCHEMA_VERSION}: "
            "upgrade genesis-callbacks"
        )
    optional = {"has_optimizer", "hash_algorithm"}
    if schema_version > _SCHEMA_WITHOUT_BASE:
        optional.add("base")
    _object(content, "it", _keys_of(Manifest) - optional - {"base"}, optional)
    world_size = _whole(content["world_size"], "world_size", low=1, high=_MAX_RANKS)
    files = tuple(_decode_file(record, world_size) for record in _items(content["files"], "files"))
    created_seconds = content["created_seconds"]
    if type(created_seconds) not in (int, float) or not 0 <= created_seconds < _MAX_SECONDS:
        _refuse("created_seconds", created_seconds, "a Unix time")
    has_optimizer = content.get("has_optimizer", True)
    if type(has_optimizer) is not bool:
        _refuse("has_optimizer", has_optimizer, "true or false")
    algorithm = _text(content.get("hash_algorithm", "blake3"), "hash_algorithm", _ALGORITHM)
    tensors = _decode_tensors(content["tensors"], files, has_tables=schema_version > _SCHEMA_WITHOUT_TABLES)
    base, in_base = _decode_base(content.get("base"), tensors)
    return Manifest(
        step=_whole(content["step"], "step"),
        sequence=_whole(content["sequence"], "sequence"),
        counters={
            name: _whole(value, f"counter {name}", low=-_MAX_NUMBER)
            for name, value in _object(content["counters"], "counters").items()
        },
        world_size=world_size,
        mesh={name: _whole(value, f"mesh {name}") for name, value in _object(content["mesh"], "mesh").items()},
        identity=_object(content["identity"], "identity"),
        recipe=_object(content["recipe"], "recipe"),
        versions={
            name: _text(value, f"the version of {name}")
            for name, value in _object(content["versions"], "versions").items()
        },
        created_seconds=created_seconds,
        previous=_decode_ancestor(content["previous"]),
        files=files,
        tensors=tensors | in_base,
        has_optimizer=has_optimizer,
        hash_algorithm="sha256" if algorithm == "sha256" else "blake3",
        base=base,
        schema_version=schema_version,
    )


def read_committed_hash(path: Path) -> str:
    """Returns the manifest hash in the commit marker of the checkpoint at `path`.

    Raises:
        CorruptCheckpointError: There is no marker: the directory is not a committed checkpoint.
        UnreadableCheckpointError: The marker cannot be read.
    """
    try:
        return read_file(path / COMMITTED_NAME, MAX_NOTE_BYTES).decode("ascii")
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path} is not a committed checkpoint: {error}") from error
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{path / COMMITTED_NAME} is not a commit marker: {error}") from error


def decode_committed(marker: str, data: bytes, where: Path | str) -> Manifest:
    """Returns the manifest in `data`, after comparing its hash with the commit marker.

    Args:
        marker: The content of the commit marker.
        data: The content of `manifest.json`.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: The schema is newer than this version.
        CorruptCheckpointError: The manifest is not the one that was committed, or is invalid.
    """
    algorithm, _, expected = marker.partition(":")
    if algorithm not in ("blake3", "sha256") or not expected:
        raise CorruptCheckpointError(f"{where}/{COMMITTED_NAME} does not hold the hash of a manifest: {marker[:80]!r}")
    if hash_bytes(data, "sha256" if algorithm == "sha256" else "blake3") != expected:
        raise CorruptCheckpointError(f"{where}: {MANIFEST_NAME} does not have the hash in {COMMITTED_NAME}")
    return decode_manifest(data)


def read_manifest(path: Path | str) -> Manifest:
    """Returns the manifest of the committed checkpoint at `path`, after comparing its hash with the commit marker.

    Any rank may call this function; it does not communicate. It does not check the files: `verify` does.

    Raises:
        CheckpointError: The directory does not exist, or the schema is newer than this version.
        CorruptCheckpointError: The directory is not committed, the manifest's hash differs from the marker, or the
            directory has another step's name.
        UnreadableCheckpointError: The manifest or the marker cannot be read.
    """
    path = Path(path)
    with reading(path):
        is_there = path.is_dir()
    if not is_there:
        raise CheckpointError(f"{path} is not a checkpoint: there is no such directory")
    marker = read_committed_hash(path)
    data = read_file(path / MANIFEST_NAME, MAX_DOCUMENT_BYTES)
    manifest = decode_committed(marker, data, path)
    _check_step(path, manifest)
    return manifest


def _check_step(path: Path, manifest: Manifest) -> None:
    """Refuses a checkpoint under the name of another step: a run would continue from it as if it were that step's."""
    name, own_name = path.absolute().name, checkpoint_name(manifest.step)
    if is_checkpoint_name(name) and name != own_name:
        raise CorruptCheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}, not of the step in its name: it was copied or "
            f"renamed; rename it to {own_name} if that does not exist, or delete it"
        )
