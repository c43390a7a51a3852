import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from genesis.data.sources import SourceOptions, find_files, plan_spans, read_documents, sample_texts
from genesis.errors import UserError

TEXTS = [f"document {number}\n" + "wörd " * (number % 7) for number in range(50)]


def read_all(source, target_bytes=1 << 20):
    spans = plan_spans(source, find_files(source), target_bytes)
    return [document.text for span in spans for document in read_documents(source, span)]


def write_jsonl(path, texts, field="text"):
    data = "".join(json.dumps({"id": 1, field: text}, ensure_ascii=False) + "\n" for text in texts).encode()
    if path.name.endswith(".gz"):
        data = gzip.compress(data)
    if path.name.endswith(".zst"):
        data = zstandard.compress(data[:1000]) + zstandard.compress(data[1000:])
    path.write_bytes(data)
    return SourceOptions("web", (str(path),))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson"])
def test_jsonl_gives_its_documents_in_order(tmp_path, name):
    assert read_all(write_jsonl(tmp_path / name, TEXTS)) == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.py", "a.txt.zst"])
def test_a_text_file_is_one_document_byte_for_byte(tmp_path, name):
    data = "\ufeff x\r\n\ty\0\n".encode()
    pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(pack(data))
    assert [text.encode() for text in read_all(SourceOptions("code", (str(tmp_path / name),)))] == [data]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_gives_its_documents_in_order_however_it_is_cut(tmp_path, kind):
    values = [text.encode() for text in TEXTS] if kind == pa.binary() else TEXTS
    column = pa.array(values, pa.string() if pa.types.is_dictionary(kind) else kind)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
    pq.write_table(pa.table({"id": range(50), "text": column}), tmp_path / "a.parquet", row_group_size=7)
    source = SourceOptions("web", (str(tmp_path),))
    assert len(list(plan_spans(source, find_files(source), 1))) == 8
    assert read_all(source, 1) == read_all(source) == TEXTS


@given(
    records=st.lists(st.text(alphabet="ab\n|é", max_size=9), max_size=12),
    separator=st.sampled_from(["\n", "|", "|a", "<|e|>\n", "\n\n", "aba"]),
    target_bytes=st.integers(1, 40),
)
def test_a_file_of_records_gives_each_once_wherever_it_is_cut(tmp_path_factory, records, separator, target_bytes):
    path = tmp_path_factory.mktemp("records") / "a.txt"
    text = separator.join(records)
    path.write_bytes(text.encode())
    source = SourceOptions("web", (str(path),), separator=separator)
    assert read_all(source, target_bytes) == [record for record in text.split(separator) if record]


def test_records_longer_than_a_block_come_whole(tmp_path):
    texts = ["x" * 3_000_000, "y", "z" * 1_048_576]
    assert read_all(write_jsonl(tmp_path / "a.jsonl", texts), 500_000) == texts


def test_positions_grow_up_to_the_size_of_the_span(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl.gz", TEXTS)
    (span,) = plan_spans(source, find_files(source), 100)
    positions = [document.position for document in read_documents(source, span)]
    assert positions == sorted(positions)
    assert positions[-1] == span.num_bytes == (tmp_path / "a.jsonl.gz").stat().st_size


def test_files_come_from_paths_directories_and_globs_each_once_in_order(tmp_path):
    for name in ("b/x.py", "b/deep/y.py", "b/z.md", "a.txt", "b/w.py.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    source = SourceOptions(
        "code",
        (str(tmp_path / "b"), str(tmp_path / "a.txt"), str(tmp_path / "**/*.py"), str(tmp_path / "*.txt")),
        suffixes=(".py",),
    )
    found = [os.path.relpath(file.path, tmp_path) for file in find_files(source)]
    assert found == ["a.txt", "b/deep/y.py", "b/w.py.gz", "b/x.py"]


def test_undecodable_bytes_are_named_or_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad")
    source = SourceOptions("web", (str(tmp_path),))
    with pytest.raises(UserError, match=r"a\.txt, offset 5: byte 0xff is not UTF-8; .* on_undecodable: replace"):
        read_all(source)
    assert read_all(SourceOptions("web", (str(tmp_path),), on_undecodable="replace")) == ["good \ufffd bad"]


def test_undecodable_bytes_in_jsonl_are_named_by_their_offset_in_the_text_of_the_file(tmp_path):
    data = b'{"text": "good"}\n{"text": "\xc3("}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    with pytest.raises(UserError, match=f"offset {data.index(0xC3)} of its decompressed text: byte 0xc3"):
        read_all(SourceOptions("web", (str(tmp_path),)))


def test_a_lone_surrogate_in_json_is_named_or_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud83d\\ude00 \\ud800 end"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2 has a lone surrogate \\ud800 at character 2"):
        read_all(SourceOptions("web", (str(tmp_path),)))
    replaced = read_all(SourceOptions("web", (str(tmp_path),), on_undecodable="replace"))
    assert replaced == ["fine", "😀 \ufffd end"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"line 3 is not JSON"),
        ("[" * 100_000, r"line 3 is not JSON"),
        ('["text"]', r"line 3 is a JSON list, not an object"),
        ('{"body": "x", "id": 1}', r"line 3 has no field 'text' \(it has: body, id\); set text_field of source web"),
        ('{"text": null}', r"line 3: field 'text' is NoneType, not text"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_file_and_line_wherever_the_file_is_cut(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n' + line + "\n")
    for target_bytes in (5, 1 << 20):
        with pytest.raises(UserError, match=r"a\.jsonl, " + message):
            read_all(SourceOptions("web", (str(tmp_path),)), target_bytes)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("kept_share", [0.1, 0.5, 0.99])
def test_a_compressed_file_cut_short_is_refused(tmp_path, name, kept_share):
    source = write_jsonl(tmp_path / name, TEXTS * 20)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * kept_share)])
    with pytest.raises(UserError, match=f"{name} is cut short or damaged"):
        read_all(source)


def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path):
    for name in ("a.jsonl.gz", "b.txt.zst"):
        (tmp_path / name).write_bytes(b"plain text, not compressed")
        with pytest.raises(UserError, match=f"{name} is cut short or damaged"):
            read_all(SourceOptions("web", (str(tmp_path / name),)))
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"c\.parquet is not a whole parquet file"):
        read_all(SourceOptions("web", (str(tmp_path / "c.parquet"),)))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"body": ["x"], "id": [1]}, r"has no column 'text' \(it has: body, id\)"),
        ({"text": [1]}, r"column 'text' is int64, not text"),
        ({"text": ["x", None]}, r"row 1 has no 'text' \(null\)"),
        ({"text": [b"\xff"]}, r"row 0, offset 0 of its text: byte 0xff is not UTF-8"),
    ],
)
def test_a_parquet_without_text_is_refused(tmp_path, column, message):
    pq.write_table(pa.table(column), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet.*" + message):
        read_all(SourceOptions("web", (str(tmp_path),)))


def test_paths_that_lead_nowhere_are_named(tmp_path):
    with pytest.raises(UserError, match=r"source web: nothing is at .*/none/\*\.txt"):
        find_files(SourceOptions("web", (str(tmp_path / "none/*.txt"),)))
    with pytest.raises(UserError, match=r"holds no file that ends in \.txt, \.jsonl, \.parquet"):
        find_files(SourceOptions("web", (str(tmp_path),)))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.symlink_to(path)
    with pytest.raises(UserError, match=r"a\.txt"):
        find_files(SourceOptions("web", (str(path),)))


def test_a_file_that_changes_after_planning_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (span,) = plan_spans(source, find_files(source), 1 << 20)
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:-1])
    with pytest.raises(UserError, match=r"a\.jsonl has changed since it was found"):
        list(read_documents(source, span))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a/b"}, "source name 'a/b'"),
        ({"paths": ()}, "source web has no paths"),
        ({"weight": 0}, "source web has weight 0"),
        ({"separator": ""}, "source web has an empty separator"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SourceOptions(**{"name": "web", "paths": ("x",), **options})


def test_a_sample_keeps_to_budget_and_weights_and_is_the_same_again(tmp_path):
    sources = []
    for name, weight in (("a", 3), ("b", 1)):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{number:098d}" for number in range(400)])
        sources.append(SourceOptions(name, (str(tmp_path / f"{name}.jsonl"),), weight=weight))
    texts = list(sample_texts(sources, 8_000))
    assert [sum(text[0] == name for text in texts) for name in "ab"] == [61, 21]
    assert texts == list(sample_texts(sources, 8_000))
    assert len(list(sample_texts(sources, 10**9))) == 800
