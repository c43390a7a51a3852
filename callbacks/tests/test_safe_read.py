import os
from pathlib import Path

import pytest

from genesis_callbacks.checkpoint.errors import CorruptCheckpointError
from genesis_callbacks.checkpoint.hashing import hash_bytes, hash_descriptor
from genesis_callbacks.checkpoint.safe_read import open_regular, read_file

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
