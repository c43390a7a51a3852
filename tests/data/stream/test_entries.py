"""Documents from any of them on: what streaming builds on in `genesis.data.sources`."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from genesis.base.errors import UserError
from genesis.data.sources import (
    DamagedFileError,
    SourceOptions,
    find_files,
    plan_spans,
    read_documents,
    read_entries,
)

TEXTS = [f"document {number}\n" + "wörd " * (number % 7) for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def write(directory, name):
    """Returns the source of one file with the texts in the format of its name."""
    path = directory / name
    separator = None
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"id": range(40), "text": TEXTS}), path, row_group_size=7)
    elif name == "records.txt":
        separator = "<|e|>"
        path.write_text(separator.join(TEXTS), encoding="utf-8")
    elif name.endswith(".txt"):
        path.write_text(TEXTS[3], encoding="utf-8")
    else:
        pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rpartition(".")[2], bytes)
        path.write_bytes(pack(LINES))
    return SourceOptions("web", (str(path),), separator=separator)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "records.txt", "a.txt"])
@pytest.mark.parametrize("target_bytes", [150, 1 << 20])
def test_entries_are_the_documents_and_go_on_at_each_end(tmp_path, name, target_bytes):
    source = write(tmp_path, name)
    for span in plan_spans(source, find_files(source), target_bytes):
        entries = [(entry.start, entry.end, entry.read(True).text) for entry in read_entries(source, span)]
        assert [text for _, _, text in entries if text] == [item.text for item in read_documents(source, span)]
        for number, (_, end, _) in enumerate(entries):
            rest = [(entry.start, entry.end, entry.read(True).text) for entry in read_entries(source, span, end)]
            assert rest == entries[number + 1 :]


def test_a_bad_record_raises_when_it_is_read_and_the_next_one_is_fine(tmp_path):
    lines = LINES.split(b"\n")
    lines[5] = b'{"text": 3}'
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(lines)))
    source = SourceOptions("web", (str(tmp_path),), suffixes=(".jsonl",))
    (span,) = plan_spans(source, find_files(source), 100)
    entries = list(read_entries(source, span))
    with pytest.raises(UserError, match=r"a\.jsonl\.zst, line 6: field 'text' is 3, not text"):
        entries[5].read(True)
    assert entries[6].read(True).text == TEXTS[6]


def test_damage_is_told_from_a_bad_record_and_a_change_from_both(tmp_path):
    source = write(tmp_path, "a.jsonl.gz")
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    (span,) = plan_spans(source, find_files(source), 100)
    with pytest.raises(DamagedFileError, match="truncated or damaged"):
        list(read_entries(source, span))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="has changed since it was listed"):
        list(read_entries(source, span))
