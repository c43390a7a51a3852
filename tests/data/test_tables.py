"""Tables as other writers make them: text in any layout is read, and what is no text is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genesis.base.errors import UserError
from genesis.cli.tokenizer import train_main
from genesis.data.sources import BadRow, SourceOptions, find_files, plan_spans, read_documents, read_rows

TEXTS = ["one", "zwei é", "", "one"]
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 4], pa.int32()), pa.array(["one", "zwei é", "one"]))
VIEWS = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 0]), pa.array(["one", "zwei é", ""], pa.string_view()))


class TextType(pa.ExtensionType):  # type: ignore[misc]
    """A type of one's own, whose storage is text."""

    def __init__(self) -> None:
        super().__init__(pa.large_string(), "tests.text")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


def write(path: Path, table: pa.Table) -> Path:
    """Writes a table as parquet, as an Arrow stream, or as an Arrow file."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return path
    new = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def read(path: Path, **options: Any) -> list[str]:
    source = SourceOptions("web", (str(path),), **options)
    spans = plan_spans(source, find_files(source), 1)
    return [document.text for span in spans for document in read_documents(source, span)]


@pytest.mark.parametrize(
    ("names", "column"),
    [
        # polars writes large strings and views: kuzudb/kuzu#1917, risingwavelabs/risingwave#26915.
        (("a.parquet", "stream.arrow", "file.arrow"), pa.array(TEXTS, pa.large_string())),
        (("a.parquet", "stream.arrow", "file.arrow"), pa.array(TEXTS, pa.string_view())),
        (("a.parquet", "stream.arrow"), pa.array([text.encode() for text in TEXTS], pa.binary_view())),
        # Old writers do not mark bytes as text: duckdb/duckdb#1201.
        (("a.parquet", "stream.arrow"), pa.array([text.encode() for text in TEXTS], pa.large_binary())),
        # Dictionaries are what categories become: databendlabs/databend#17520.
        (
            ("a.parquet", "stream.arrow"),
            pa.array(TEXTS).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string())),
        ),
        (("stream.arrow", "file.arrow"), VIEWS),
        (("stream.arrow",), RUNS),
        (("a.parquet", "stream.arrow"), pa.ExtensionArray.from_storage(TextType(), pa.array(TEXTS, pa.large_string()))),
    ],
)
def test_text_is_read_in_any_layout(tmp_path: Path, names: tuple[str, ...], column: Any) -> None:
    for name in names:
        path = write(tmp_path / name, pa.table({"id": range(4), "text": column}))
        assert read(path) == ["one", "zwei é", "one", "one"] if column is RUNS else ["one", "zwei é", "one"]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_text_in_objects_is_read_by_its_path(tmp_path: Path, name: str) -> None:
    objects = [{"text": "one", "n": 1}, {"text": "zwei é", "n": 2}, {"text": "", "n": 3}]
    kind = pa.string() if name == "a.parquet" else pa.string_view()  # pyarrow does not write views within objects
    column = pa.array(objects, pa.struct([("text", kind), ("n", pa.int64())]))
    path = write(tmp_path / name, pa.table({"meta": column, "meta.n": ["literal", "a", "b"]}))
    assert read(path, text_field="meta.text") == ["one", "zwei é"]
    assert read(path, text_field="meta.n") == ["literal", "a", "b"]  # a column of this name comes first
    with pytest.raises(UserError, match=r"'meta' is struct.*, not text; .* as meta.text \(it has: meta.text, meta.n\)"):
        read(path, text_field="meta")
    with pytest.raises(UserError, match=r"no column 'meta.body' \(it has: meta, meta.text, meta.n, meta.n\)"):
        read(path, text_field="meta.body")
    (tmp_path / "a.jsonl").write_text('{"meta": {"text": "one"}}\n{"meta": {"text": "two"}, "meta.text": "literal"}\n')
    assert read(tmp_path / "a.jsonl", text_field="meta.text") == ["one", "literal"]
    with pytest.raises(UserError, match=r"line 1 has no field 'meta.text.x' \(it has: meta\)"):
        read(tmp_path / "a.jsonl", text_field="meta.text.x")


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([["a"]]), "list<.*>"),
        (pa.array([["a"]], pa.list_view(pa.string())), "list_view<.*>"),
        (pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())), "map<.*>"),
        (pa.array([b"0123456789abcdef"], pa.binary(16)), r"fixed_size_binary\[16\]"),
        (pa.array([1.5]).dictionary_encode(), "double"),
    ],
)
def test_a_column_of_another_kind_is_refused_by_name(tmp_path: Path, column: Any, kind: str) -> None:
    path = write(tmp_path / "stream.arrow", pa.table({"text": column}))
    with pytest.raises(UserError, match=rf"stream.arrow: column 'text' is {kind}, not text; set text_field"):
        read(path)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path, name: str) -> None:
    # Others drop one of the two in silence: apache/datafusion#24381, pola-rs/polars#27393.
    twins = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "text", "body"])
    path = write(tmp_path / name, twins)
    with pytest.raises(UserError, match=r"has 2 columns named 'text'; rename one, or set text_field"):
        read(path)
    assert read(path, text_field="body") == ["c"]
    with pytest.raises(UserError, match=r"has 2 columns named 'text'; rename one"):
        read(path, chat="auto")
    parts = [pa.array(["user"]), pa.array(["a"]), pa.array(["b"])]
    turns = pa.ListArray.from_arrays(
        pa.array([0, 1]), pa.StructArray.from_arrays(parts, ["role", "content", "content"])
    )
    path = write(tmp_path / name, pa.table({"messages": turns}))
    with pytest.raises(UserError, match=r"has 2 columns named 'messages.content'; rename one"):
        read(path, chat="auto")


def test_empty_row_groups_and_tables_without_rows_have_no_documents(tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for texts in ([], ["one"], [], ["two"], []):
            writer.write_table(pa.table({"text": pa.array(texts, pa.string())}))
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 5
    assert read(tmp_path / "a.parquet") == ["one", "two"]
    for name in ("b.parquet", "stream.arrow", "file.arrow"):
        assert read(write(tmp_path / name, schema.empty_table())) == []


def test_each_row_of_a_column_of_nulls_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"text": [None, None]}))  # of type null
    source = SourceOptions("web", (str(path),))
    rows = [row for span in plan_spans(source, find_files(source), 1 << 20) for row in read_rows(source, span)]
    assert [isinstance(row, BadRow) for row in rows] == [True, True]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "a.jsonl"])
def test_a_null_is_a_bad_row_beside_the_others(tmp_path: Path, name: str) -> None:
    if name == "a.jsonl":
        (tmp_path / name).write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    else:
        write(tmp_path / name, pa.table({"text": ["one", None, "two"]}))
    source = SourceOptions("web", (str(tmp_path / name),))
    rows = [row for span in plan_spans(source, find_files(source), 1 << 20) for row in read_rows(source, span)]
    assert [row.text for row in rows if not isinstance(row, BadRow)] == ["one", "two"]
    (bad,) = (row for row in rows if isinstance(row, BadRow))
    assert bad.place() == f"{tmp_path / name}, {'line 2' if name == 'a.jsonl' else 'row 1'}"
    assert bad.explain().startswith(bad.place())


def test_a_tokenizer_skips_nulls_by_choice_and_counts_them_or_names_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Reported for other tools as huggingface/setfit#566 and huggingface/transformers#16975.
    texts = [None if number % 50 == 7 else f"some text number {number} with words " * 5 for number in range(200)]
    path = write(tmp_path / "a.parquet", pa.table({"text": texts}))
    source = {"name": "web", "paths": [str(path)]}
    arguments = ["--out", str(tmp_path / "tokenizer"), "--vocab_size", "300", "--sources"]
    with pytest.raises(UserError, match=r"a.parquet, row 7 has no 'text' \(null\)"):
        train_main([*arguments, json.dumps([source])])
    assert train_main([*arguments, json.dumps([{**source, "on_bad_row": "skip"}])]) == 0
    assert capsys.readouterr().err == (
        f"genesis: warning: source web: skipped 4: {path}, row 7 has no 'text' (null); remove it or set another "
        "text_field for source web (also row 57, row 107, ...)\n"
    )


def test_conversations_are_read_in_the_layouts_of_other_writers(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    view = pa.struct([("role", pa.string_view()), ("content", pa.binary_view()), ("weight", pa.decimal128(3, 1))])
    as_map = pa.list_(pa.map_(pa.string(), pa.string()))
    by_column = pa.struct([("role", pa.list_(pa.string())), ("content", pa.list_(pa.large_string()))])
    stamped = pa.struct([("role", pa.string()), ("content", pa.string()), ("time", pa.timestamp("us"))])
    columns = {
        "view": pa.array([[{**turn, "content": turn["content"].encode()} for turn in turns]], pa.list_(view)),
        "map": pa.array([[list(turn.items()) for turn in turns]], as_map),
        "columns": pa.array([{key: [turn[key] for turn in turns] for key in ("role", "content")}], by_column),
        "stamped": pa.array([[{**turn, "time": 10**15} for turn in turns]], pa.list_(stamped)),
    }
    for name, column in columns.items():
        (text,) = read(write(tmp_path / f"{name}-stream.arrow", pa.table({"messages": column})), chat="auto")
        for turn in turns:
            assert f'"role": "{turn["role"]}", "content": "{turn["content"]}"' in text, name
