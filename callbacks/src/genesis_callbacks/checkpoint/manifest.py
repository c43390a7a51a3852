"""The manifest: what a checkpoint is, and everything that belongs to it.

A directory is a checkpoint if its `COMMITTED` holds the hash of its `manifest.json`, and whole if every file is as
the manifest says. A restore plans from the manifest alone; DCP's `.metadata` is written for others and never read here.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError, CorruptCheckpointError
from .hashing import HashAlgorithm, hash_bytes
from .safe_read import MAX_DOCUMENT_BYTES, MAX_NOTE_BYTES, read_file, reading

SCHEMA_VERSION = 2
"""1 had no `has_optimizer` (it always was true) and no `directory` of an ancestor (it always was the same)."""
MANIFEST_NAME = "manifest.json"
COMMITTED_NAME = "COMMITTED"
STATE_NAME = "state.json"
DCP_METADATA_NAME = ".metadata"
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
_STAGING_NAME = re.compile(r"step-\d{8,}\.staging-\w+")


def checkpoint_name(step: int) -> str:
    """Returns the directory name of the checkpoint at `step`."""
    return f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Says whether `name` is that of a committed checkpoint; anything else in the directory is foreign or in flight."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


def step_of(name: str) -> int:
    """Returns the step of a committed checkpoint, by its name."""
    return int(name.removeprefix("step-"))


def is_staging_name(name: str) -> bool:
    """Says whether `name` is that of a save in flight, or of one that was abandoned."""
    return _STAGING_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its name, size, hash and the rank that wrote it."""

    name: str
    num_bytes: int
    hash: str
    rank: int


@dataclass(frozen=True)
class ChunkRecord:
    """Where one chunk of a tensor lies.

    `byte_offset` and `num_bytes` are the range of the serialised chunk in its file (what DCP reads); `data_offset`
    is where the elements themselves begin in the file, row-major and little-endian, so that a restore needs no
    reader but these numbers.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte_offset: int
    num_bytes: int
    data_offset: int


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: its global shape, dtype (`float32`, ...), digest of the live tensor, and chunks."""

    shape: tuple[int, ...]
    dtype: str
    digest: int
    chunks: tuple[ChunkRecord, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return dtype_from_name(self.dtype)


@dataclass(frozen=True)
class Ancestor:
    """The checkpoint before, by name and hash of its manifest.

    `directory` is where it lies, where that is another one (a fork's origin): relative to this checkpoint's.
    """

    name: str
    manifest_hash: str
    directory: str | None = None

    def locate(self, directory: Path) -> Path:
        """Returns where it lies, for a checkpoint in `directory` that descends from it."""
        return directory / (self.directory or "") / self.name


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: Windows attempted.
        sequence: Number of the save in its lineage, counted from 1: `latest` is the largest, whatever the steps say.
        counters: Exact clocks of the run, such as `tokens_seen`.
        world_size: Ranks that saved.
        mesh: Axis name to size, where the run had a device mesh.
        identity: What must be the same at restore (`tokenizer_hash`, `corpus_hash`, ...), plain JSON.
        recipe: The resolved recipe, plain JSON.
        versions: Package to version.
        created_seconds: Unix time of the commit.
        previous: The checkpoint before in the lineage; None for the first.
        has_optimizer: Whether the run's optimizers were saved; without them a restore can give weights alone.
    """

    step: int
    sequence: int
    counters: dict[str, int]
    world_size: int
    mesh: dict[str, int]
    identity: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    created_seconds: float
    previous: Ancestor | None
    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]
    has_optimizer: bool = True
    hash_algorithm: HashAlgorithm = "blake3"
    schema_version: int = field(default=SCHEMA_VERSION)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as the manifest has it: `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Returns the dtype of that name.

    Raises:
        CheckpointError: This torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"unknown dtype {name!r}: restore with a torch that has it (this is {torch.__version__})")
    return dtype


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes of `manifest.json`."""
    content = dataclasses.asdict(manifest)
    for record in content["tensors"].values():
        record["digest"] = f"{record['digest']:016x}"
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _decode_tensor(content: dict[str, Any]) -> TensorRecord:
    chunks = tuple(
        ChunkRecord(**{**chunk, "offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])})
        for chunk in content["chunks"]
    )
    return TensorRecord(tuple(content["shape"]), content["dtype"], int(content["digest"], 16), chunks)


def _check_names(files: set[str], tensors: dict[str, TensorRecord]) -> None:
    for name in files:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"file {name!r} is not in the checkpoint's own directory")
    for name, record in tensors.items():
        for chunk in record.chunks:
            if chunk.file not in files:
                raise ValueError(f"tensor {name!r} lies in {chunk.file!r}, which is not listed")


def decode_manifest(data: bytes) -> Manifest:
    """Returns the manifest that `data` holds.

    Raises:
        CheckpointError: It is of a newer schema.
        CorruptCheckpointError: It is no manifest.
    """
    try:
        content = json.loads(data)
        schema_version = content["schema_version"]
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptCheckpointError(f"{MANIFEST_NAME} is not a manifest: {error}") from error
    if schema_version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{MANIFEST_NAME} has schema {schema_version}, this version reads up to {SCHEMA_VERSION}: "
            "upgrade genesis-callbacks"
        )
    try:
        previous = content.pop("previous")
        files = tuple(FileRecord(**record) for record in content.pop("files"))
        tensors = {name: _decode_tensor(record) for name, record in content.pop("tensors").items()}
        _check_names({record.name for record in files}, tensors)
        return Manifest(
            previous=Ancestor(**previous) if previous is not None else None, files=files, tensors=tensors, **content
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"{MANIFEST_NAME} lacks or has too much: {error}") from error


def read_committed_hash(path: Path) -> str:
    """Returns the manifest hash that the commit marker of the checkpoint at `path` vouches for.

    Raises:
        CorruptCheckpointError: There is no marker, so that this is no committed checkpoint.
        UnreadableCheckpointError: It cannot be read.
    """
    try:
        return read_file(path / COMMITTED_NAME, MAX_NOTE_BYTES).decode("ascii")
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path} is not a committed checkpoint: {error}") from error
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{path / COMMITTED_NAME} is not a commit marker: {error}") from error


def read_manifest(path: Path | str) -> Manifest:
    """Returns the manifest of the committed checkpoint at `path`, after comparing its hash with the commit marker.

    Any rank may call it; it does not communicate. It vouches for the manifest alone: `verify` looks at the files.

    Raises:
        CheckpointError: There is no such directory, or its schema is newer than this version.
        CorruptCheckpointError: It is not committed, the manifest is not the one that was committed, or the directory
            has another step's name.
        UnreadableCheckpointError: It cannot be read.
    """
    path = Path(path)
    with reading(path):
        is_there = path.is_dir()
    if not is_there:
        raise CheckpointError(f"{path} is not a checkpoint: there is no such directory")
    marker = read_committed_hash(path)
    data = read_file(path / MANIFEST_NAME, MAX_DOCUMENT_BYTES)
    algorithm, _, expected = marker.partition(":")
    if algorithm not in ("blake3", "sha256") or not expected:
        raise CorruptCheckpointError(f"{path / COMMITTED_NAME} holds no hash of a manifest: {marker[:80]!r}")
    if hash_bytes(data, "sha256" if algorithm == "sha256" else "blake3") != expected:
        raise CorruptCheckpointError(f"{path}: {MANIFEST_NAME} is not the one that {COMMITTED_NAME} vouches for")
    manifest = decode_manifest(data)
    _check_step(path, manifest)
    return manifest


def _check_step(path: Path, manifest: Manifest) -> None:
    """Refuses what lies under the name of another step: a run would go on from it as if it were that step's."""
    name, own_name = path.absolute().name, checkpoint_name(manifest.step)
    if is_checkpoint_name(name) and name != own_name:
        raise CorruptCheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}, not of the step in its name: it was copied or "
            f"renamed; rename it to {own_name} if that is not there, or delete it"
        )
