"""A durable file holds what was written, whatever went past the page cache."""

import os
import resource
from pathlib import Path

import pytest

from genesis_callbacks.base.hashing import hash_file
from genesis_callbacks.checkpoint.durable_file import _BLOCK_BYTES, DurableFile, write_file

SIZES = [(0,), (1,), (_BLOCK_BYTES - 1, 1), (_BLOCK_BYTES, 5), (3, _BLOCK_BYTES, 7), (2 * _BLOCK_BYTES + 4097,)]


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_file_holds_and_hashes_what_was_written(tmp_path, sizes, place):
    path = tmp_path / "file" if place == "disk" else Path(f"/dev/shm/genesis-test-{os.getpid()}")
    pieces = [os.urandom(size) for size in sizes]
    try:
        with DurableFile(path, algorithm="blake3") as file:
            for piece in pieces:
                assert file.write(piece) == len(piece)
                file.flush()
            file.drain()
            assert file.read_back(5, 0) == b"".join(pieces)[:5]
            record = file.finish(rank=3)
        assert path.read_bytes() == b"".join(pieces)
        assert (record.num_bytes, record.hash) == (sum(sizes), hash_file(path, "blake3"))
    finally:
        path.unlink(missing_ok=True)


def test_a_short_write_goes_on_where_it_ended(tmp_path, monkeypatch):
    """A disk that fills, or a signal, may take a part of a block that no direct write can go on from."""
    write, lengths = os.write, [5000, 4096, 1]

    def write_some(descriptor, data):
        return write(descriptor, data[: lengths.pop(0)] if lengths else data)

    monkeypatch.setattr(os, "write", write_some)
    data = os.urandom(2 * _BLOCK_BYTES + 3)
    with DurableFile(tmp_path / "file", algorithm="blake3") as file:
        file.write(data)
        record = file.finish(rank=0)
    assert (tmp_path / "file").read_bytes() == data
    assert record.hash == hash_file(tmp_path / "file", "blake3")


@pytest.fixture
def full_disk():
    """No file of this process grows beyond a kilobyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
def test_an_error_of_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"File too large: '.*/rng\.json'"):
        write_file(tmp_path / "rng.json", bytes(5000), algorithm="blake3")
