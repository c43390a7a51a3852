"""A table of chunks is the same chunks as their records, and a forged one is refused."""

import base64
import dataclasses
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from genesis_callbacks.base import manifest as manifests
from genesis_callbacks.base.checkpoint_errors import CorruptCheckpointError
from genesis_callbacks.base.chunk_table import ChunkTable
from genesis_callbacks.base.manifest import (
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    decode_manifest,
    encode_manifest,
    schema_for,
)

FILES = {"a": 1000, "b": 2000}
SHAPE = (4, 6)
CHUNKS = (ChunkRecord((0, 0), (4, 3), "b", 10, 400, 100), ChunkRecord((0, 3), (4, 3), "a", 0, 300, 252))


def build_manifest(schema_version: int) -> Manifest:
    files = tuple(FileRecord(name, size, "0" * 64, 0) for name, size in FILES.items())
    record = TensorRecord(SHAPE, "float32", 7, CHUNKS)
    empty = Manifest(1, 1, {}, 1, {}, {}, {}, {}, None, schema_version=schema_version)
    scalar = TensorRecord((), "int64", 8, (ChunkRecord((), (), "a", 400, 100, 492),))
    return dataclasses.replace(empty, files=files, tensors={"model.x": record, "model.s": scalar})


def test_a_manifest_with_tables_says_the_same_as_one_with_records() -> None:
    listed, tabled = (decode_manifest(encode_manifest(build_manifest(schema))) for schema in (2, 4))
    assert isinstance(tabled.tensors["model.x"].chunks, ChunkTable)
    assert dataclasses.replace(tabled, schema_version=2) == listed
    assert decode_manifest(encode_manifest(tabled)) == tabled
    assert tabled.tensors["model.x"].chunks[-1] == CHUNKS[-1]


def test_few_chunks_are_listed_for_earlier_versions() -> None:
    limit = manifests.MAX_LISTED_CHUNKS
    assert [schema_for(None, number) for number in (1, limit, limit + 1)] == [2, 2, 4]


def decode(rows: object) -> ChunkTable:
    text = base64.b64encode(np.array(rows, dtype="<i8").tobytes()).decode()
    return ChunkTable.decode(text, "x", SHAPE, 4, FILES)


GOOD = [1, 10, 400, 100, 0, 0, 4, 3]
HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        (0, 2, "lies in a file that is not listed"),
        (0, -1, "below 0"),
        (1, 1601, "beyond the end of its file"),
        (1, HUGE, "beyond the end of its file"),
        (2, HUGE, "beyond the end of its file"),
        (3, 9, "elements lie outside of its bytes"),
        (3, 363, "elements lie outside of its bytes"),
        (3, HUGE, "elements lie outside of its bytes"),
        (4, 1, "outside of its shape"),
        (5, HUGE, "outside of its shape"),
        (7, 7, "outside of its shape"),
        (7, HUGE, "outside of its shape"),
    ],
)
def test_a_number_that_cannot_be_is_refused(column: int, value: int, problem: str) -> None:
    assert len(decode([GOOD])) == 1
    with pytest.raises(CorruptCheckpointError, match=problem):
        decode([[*GOOD[:column], value, *GOOD[column + 1 :]]])


@pytest.mark.parametrize("text", ["AAAA", "é", "A" * 64 + "\n", "AAAAAAAAAAA="])
def test_a_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="not a table of numbers"):
        ChunkTable.decode(text, "x", SHAPE, 4, FILES)


@given(st.lists(st.lists(st.integers(-(1 << 63), HUGE), min_size=8, max_size=8), max_size=3))
def test_whatever_a_table_holds_its_chunks_lie_in_their_files_or_it_is_refused(rows: list[list[int]]) -> None:
    try:
        table = decode(rows)
    except CorruptCheckpointError:
        return
    for chunk in table:
        assert 0 <= chunk.byte_offset <= chunk.byte_offset + chunk.num_bytes <= FILES[chunk.file]


def test_chunks_of_more_bytes_than_their_file_are_refused() -> None:
    content = build_manifest(4)
    twice = dataclasses.replace(content.tensors["model.x"], chunks=CHUNKS * 4)
    data = encode_manifest(dataclasses.replace(content, tensors={"model.x": twice}))
    with pytest.raises(CorruptCheckpointError, match="the chunks in a have more bytes than it has"):
        decode_manifest(data)


def test_a_manifest_without_tables_is_read_without_numpy(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(encode_manifest(build_manifest(2)))
    code = (
        "import sys; from genesis_callbacks.base.manifest import decode_manifest; from pathlib import Path\n"
        f"decode_manifest(Path({str(tmp_path / 'manifest.json')!r}).read_bytes()); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
