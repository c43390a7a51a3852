"""Verifies a committed checkpoint against its manifest: sizes, hashes, digests.

Sizes and hashes need no torch, whose import takes longer than the verification of a small checkpoint. Digests do:
`restore`, which has them, is therefore imported when they are asked for.
"""

import importlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from ..base.checkpoint_errors import (
    BaseCheckpointError,
    CheckpointError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from ..base.hashing import hash_descriptor
from ..base.manifest import FileRecord, Manifest, read_manifest
from ..base.safe_read import open_regular, reading
from .tensor_places import TensorPlaces, blaming_base, locate_bases
from .tiling import check_tiling

VerifyLevel = Literal["quick", "full", "deep"]
_MAX_THREADS = 8


def _deep() -> Any:
    """Returns the module that compares digests; the first call imports torch."""
    return importlib.import_module(".restore", __package__)


def _check_size(path: Path, record: FileRecord) -> None:
    file = path / record.name
    with reading(file):
        num_bytes = file.stat().st_size
    if num_bytes != record.num_bytes:
        raise CorruptCheckpointError(f"{file} has {num_bytes} bytes, but {record.num_bytes} were saved")


def check_tensors(manifest: Manifest, names: Iterable[str]) -> None:
    """Checks that the chunks of each tensor cover it exactly once. Pure.

    Raises:
        CorruptCheckpointError: Chunks are missing or overlap.
    """
    for name in names:
        record = manifest.tensors[name]
        check_tiling(name, record.shape, [(chunk.offsets, chunk.sizes) for chunk in record.chunks])


def _check_hash(path: Path, record: FileRecord, manifest: Manifest, report: Callable[[int], None]) -> None:
    file = path / record.name
    descriptor = open_regular(file)
    try:
        with reading(file):
            found = hash_descriptor(descriptor, manifest.hash_algorithm, report)
    finally:
        os.close(descriptor)
    if found != record.hash:
        raise CorruptCheckpointError(f"{file} does not have the hash that was saved: its bytes have changed")


def _check_files(path: Path, files: Sequence[FileRecord], check: Callable[[FileRecord], None]) -> None:
    """Checks all files, some at a time, and raises an error; damage takes precedence over unreadable files."""

    def attempt(record: FileRecord) -> CheckpointError | None:
        try:
            check(record)
        except CheckpointError as error:
            return error
        return None

    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        errors = [error for error in pool.map(attempt, files) if error is not None]
    problems = [str(error).removeprefix(f"{path}/") for error in errors if isinstance(error, CorruptCheckpointError)]
    if problems:
        raise CorruptCheckpointError(f"{path}: " + "; ".join(problems))
    if errors:
        raise errors[0]


def verify(
    path: Path | str,
    level: VerifyLevel = "full",
    *,
    places: Sequence[Path] = (),
    report: Callable[[int], None] = lambda num_bytes: None,
) -> Manifest:
    """Returns the manifest of the checkpoint at `path` if it verifies.

    Any process may call it; it does not communicate and unpickles nothing.

    Args:
        path: A checkpoint directory.
        level: `quick` compares counts, names and sizes; `full` also every file's hash; `deep` also every tensor's
            digest, and names the tensors that changed bytes have damaged. Of a base, only the tensors and files that
            the checkpoint needs are verified.
        places: Paths to search for the base, in addition to the recorded ones. The returned manifest has the path at
            which the base was found.
        report: Called from several threads with the number of bytes, after each block of the checkpoint's own files
            that is hashed.

    Raises:
        BaseCheckpointError: The checkpoint is undamaged, but the base that holds some of its tensors is missing, has
            changed, or is damaged.
        CheckpointError: There is no such checkpoint, or this version cannot read it.
        CorruptCheckpointError: The checkpoint is damaged; the message lists every file, or has the tensor, that
            differs from the saved one.
        UnreadableCheckpointError: A file cannot be read, and all readable files are undamaged.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _verify_tensors(path, manifest, manifest.own_tensors, manifest.files, level, report)
    if level == "deep":
        _deep().check_rest(path, manifest)
    if manifest.base is None:
        return manifest
    # Last, because damage of the checkpoint itself takes precedence over problems of its base.
    return _verify_bases(path, manifest, level, places)


def _verify_tensors(
    path: Path,
    manifest: Manifest,
    names: Iterable[str],
    files: Sequence[FileRecord],
    level: VerifyLevel,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    names = list(names)
    _check_files(path, files, lambda record: _check_size(path, record))
    check_tensors(manifest, names)
    if level in ("full", "deep"):
        try:
            _check_files(path, files, lambda record: _check_hash(path, record, manifest, report))
        except CorruptCheckpointError as error:
            if level == "full":
                raise
            raise CorruptCheckpointError(f"{error}; {_deep().describe_changed(path, manifest, names)}") from error
    if level == "deep":
        _deep().check_digests(path, manifest, names)


def verify_some(path: Path, manifest: Manifest, names: Collection[str], level: VerifyLevel) -> None:
    """Verifies some tensors of a checkpoint, and the files that hold them. No communication.

    Raises:
        CorruptCheckpointError: A tensor or file differs from the saved one.
        UnreadableCheckpointError: A file cannot be read.
    """
    used = {chunk.file for name in names for chunk in manifest.tensors[name].chunks}
    _verify_tensors(path, manifest, names, [record for record in manifest.files if record.name in used], level)


def _verify_bases(path: Path, manifest: Manifest, level: VerifyLevel, places: Sequence[Path]) -> Manifest:
    """Returns the manifest with the first path at which its base verifies; else raises the error of the first path.

    A copy that the user gives thus replaces a damaged base.
    """
    first_error: CheckpointError | None = None
    for located in locate_bases(path, manifest, places):
        try:
            _verify_base(path, located, level)
        except (BaseCheckpointError, UnreadableCheckpointError) as error:
            first_error = first_error or error
        else:
            return located
    assert first_error is not None  # `locate_bases` raises if it finds no base
    raise first_error


def _verify_base(path: Path, manifest: Manifest, level: VerifyLevel) -> None:
    """Verifies the tensors that lie in the base of the checkpoint at `path`.

    Raises:
        BaseCheckpointError: A tensor in the base differs from the saved one.
        CorruptCheckpointError: The records of a tensor in the checkpoint and in its base differ.
    """
    assert manifest.base is not None
    places = TensorPlaces(path, manifest)
    for name in manifest.base.names:
        places.locate(name)
    base = Path(manifest.base.path)
    with blaming_base(base, path):
        verify_some(base, read_manifest(base), manifest.base.names, level)
