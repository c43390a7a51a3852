import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from genesis_callbacks.base.checkpoint_errors import CorruptCheckpointError
from genesis_callbacks.base.hashing import hash_bytes, hash_descriptor
from genesis_callbacks.base.safe_read import open_regular, read_file
from genesis_callbacks.checkpoint.contents import read_contents
from genesis_callbacks.checkpoint.dcp_metadata import read_dcp_metadata
from genesis_callbacks.checkpoint.job import _read_note

LARGE_BYTES = (64 << 20) + 4096


def test_a_large_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Large files are searched for holes first, which moves where a descriptor stands."""
    content = b"genesis " * (LARGE_BYTES // 8)
    path = tmp_path / "shard"
    path.write_bytes(content)

    descriptor = open_regular(path)
    try:
        assert hash_descriptor(descriptor, "blake3") == hash_bytes(content, "blake3")
    finally:
        os.close(descriptor)
    assert read_file(path, LARGE_BYTES) == content


def test_a_large_file_that_is_one_hole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpointError, match="the rest is a hole"):
        open_regular(path)


# ---- pickles

MAX_BYTES = 1 << 30
RECORD = b"ctorch.distributed.checkpoint.metadata\nMetadata\n\x94"
# Each takes far more memory than it has bytes, again and again.
COSTLY = (b"]", b"}", b"(", b"\x8f", b"(\x91", b"}\x94", b"N\x94")
# Each takes several times its bytes, and is read.
DEAR = (b")\x85", b"h\x00)\x81", b"h\x00)\x81}b")


def measure_peak(act: Callable[[], Any]) -> int:
    """Returns by how many bytes this process grew at most."""

    def peak() -> int:
        words = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(words["VmHWM"].split()[0]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = peak()
    act()
    return peak() - before_bytes


def build_metadata(num_tensors: int, num_chunks: int) -> Metadata:
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for number in range(num_tensors):
        name = f"model.layers.{number}.attention.query_projection.weight"
        chunks = []
        for index in range(num_chunks):
            offsets = torch.Size([index * 64, 0])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([64, 4096])))
            storage[MetadataIndex(name, offsets, index)] = _StorageInfo(f"__{index}_0.distcp", number << 20, 525_288)
        properties = TensorProperties(dtype=torch.bfloat16)
        tensors[name] = TensorStorageMetadata(properties, torch.Size([64 * num_chunks, 4096]), chunks)
    return Metadata(tensors, {name: ("model", name) for name in tensors}, storage)


@pytest.mark.parametrize("unit", COSTLY, ids=repr)
def test_metadata_that_would_take_gigabytes_is_refused_before_it_is_unpickled(unit: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + RECORD + unit * ((30 << 20) // len(unit)) + b".")

    def read() -> None:
        with pytest.raises(CorruptCheckpointError, match="would take up to"):
            read_dcp_metadata(tmp_path)

    assert measure_peak(read) < 256 << 20


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("unit", DEAR, ids=repr)
def test_metadata_that_is_read_takes_less_than_a_gigabyte(unit: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + RECORD + unit * ((10 << 20) // len(unit)) + b".")

    def read() -> None:
        with contextlib.suppress(CorruptCheckpointError):
            read_dcp_metadata(tmp_path)

    assert measure_peak(read) < MAX_BYTES


def test_a_state_that_a_pickle_names_many_times_is_not_copied(tmp_path: Path) -> None:
    state = pickle.dumps({f"key {number}": None for number in range(20_000)}, protocol=2)[2:-1]
    kept = state + b"q\xff0" + RECORD[:-1] + b"q\xfe0"
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + kept + b"h\xfe)\x81h\xffb" * 2_000 + b".")
    assert measure_peak(lambda: read_dcp_metadata(tmp_path)) < 64 << 20


def test_metadata_of_many_chunks_is_read(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(build_metadata(1_000, 20)))
    assert len(vars(read_dcp_metadata(tmp_path))["storage_data"]) == 20_000


@pytest.mark.slow
def test_metadata_of_a_hundred_thousand_chunks_is_read(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(build_metadata(1_000, 100)))
    assert measure_peak(lambda: read_dcp_metadata(tmp_path)) < MAX_BYTES


def write_ckpt(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", data)
        archive.writestr("model/version", "3\n")


@pytest.mark.parametrize("unit", COSTLY, ids=repr)
def test_a_ckpt_that_would_take_gigabytes_is_refused_before_it_is_unpickled(unit: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    write_ckpt(path, b"\x80\x02" + unit * ((30 << 20) // len(unit)) + b".")

    def read() -> None:
        with pytest.raises(CorruptCheckpointError, match="would take up to"):
            read_contents(path)

    assert measure_peak(read) < 256 << 20


def test_a_ckpt_of_many_tensors_is_read(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"state_dict": {f"layers.{number}.weight": torch.zeros(2) for number in range(5_000)}}, stream)
    (tmp_path / "model.ckpt").write_bytes(stream.getvalue())
    assert len(read_contents(tmp_path / "model.ckpt").model) == 5_000


def test_a_receipt_of_a_rank_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "receipt-1"
    assert _read_note(path) is None
    deep = b"[" * 200 + b"]" * 200 + b"\n"
    path.write_bytes(hash_bytes(deep, "blake3").encode() + b"\n" + deep[:-1])
    assert _read_note(path) is None, "half of a note is not there yet"
    path.write_bytes(hash_bytes(deep, "blake3").encode() + b"\n" + deep)
    with pytest.raises(CorruptCheckpointError, match=r"receipt-1 is nested more than"):
        _read_note(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptCheckpointError, match="is a FIFO"):
        _read_note(path)
