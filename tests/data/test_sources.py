import gzip
import json
import os
import re
import zipfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.data.sources import (
    DamagedFileError,
    SourceOptions,
    blocks,
    find_files,
    plan_spans,
    read_documents,
    read_entries,
    sample_texts,
)
from tests.commands import run_genesis
from tests.data.corpus_support import make_texts, make_tokenizer, read_tree, without_stages
from tests.data.store_support import BUCKET, CREDENTIALS, FaultyStore, serve_s3
from tests.data.stream import streams

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


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.py", "a.txt.zst", "A.TXT.GZ"])
def test_a_text_file_is_one_document_byte_for_byte_without_its_byte_order_mark(tmp_path, name):
    data = " x\r\n\ty\0\n\ufeff.".encode()
    pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.lower().rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(pack("\ufeff".encode() + data))
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
    records=st.lists(st.text(alphabet="ab\r\n|é", max_size=9), max_size=12),
    separator=st.sampled_from(["\n", "|", "|a", "<|e|>\n", "\n\n", "aba", "\r\n", "\n|"]),
    line_break=st.sampled_from(["\n", "\r\n"]),
    target_bytes=st.integers(1, 40),
)
def test_a_file_of_records_gives_each_once_wherever_it_is_cut_and_whose_line_breaks_it_has(
    tmp_path_factory, records, separator, line_break, target_bytes
):
    path = tmp_path_factory.mktemp("records") / "a.txt"
    text = re.sub("\r?\n", line_break, separator).join(records)
    path.write_bytes(text.encode())
    source = SourceOptions("web", (str(path),), separator=separator)
    either = "\r?\n".join(re.escape(part) for part in re.split("\r?\n", separator))
    assert read_all(source, target_bytes) == [record for record in re.split(either, text) if record.strip()]


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
        # Python's reader keeps the last of the two.
        ('{"text": "a", "text": "b"}', r"line 3 is not JSON \(the key 'text' is twice in one object\)"),
        ('{"text": "a", "meta": {"x": 1, "x": 2}}', r"line 3 is not JSON \(the key 'x' is twice in one object\)"),
        ('{"body": "x", "id": 1}', r"line 3 has no field 'text' \(it has: body, id\); set text_field of source web"),
        ('{"text": null}', r"line 3: field 'text' is null, not text"),
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
    with pytest.raises(UserError, match=f"{name} is truncated or damaged"):
        read_all(source)


def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path):
    for name in ("a.jsonl.gz", "b.txt.zst"):
        (tmp_path / name).write_bytes(b"plain text, not compressed")
        with pytest.raises(UserError, match=rf"{name} is named \.(gz|zst), and is not compressed; remove the ending"):
            read_all(SourceOptions("web", (str(tmp_path / name),)))
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"c\.parquet is not a complete parquet file"):
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
    with pytest.raises(UserError, match=r"source web: no such file: .*/none/\*\.txt"):
        find_files(SourceOptions("web", (str(tmp_path / "none/*.txt"),)))
    with pytest.raises(UserError, match=r"has no file with suffix \.txt, \.jsonl, \.parquet"):
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
    with pytest.raises(UserError, match=r"a\.jsonl has changed since it was listed"):
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


# Files in stores


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GENESIS_STORE_ATTEMPTS", "1")
    with FaultyStore() as store:
        yield store


def upload(store, path):
    store.files["/" + path.name] = path.read_bytes()
    return SourceOptions("web", (f"{store.url}/{path.name}",))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt"])
def test_a_remote_file_gives_what_the_local_one_gives(tmp_path, store, name):
    if name == "a.parquet":
        pq.write_table(pa.table({"text": TEXTS}), tmp_path / name, row_group_size=7)
    elif name == "a.txt":
        (tmp_path / name).write_text("".join(TEXTS))
    else:
        write_jsonl(tmp_path / name, TEXTS)
    local, remote = SourceOptions("web", (str(tmp_path / name),)), upload(store, tmp_path / name)
    assert read_all(remote) == read_all(local) != []
    (span,) = plan_spans(remote, find_files(remote), 100)
    positions = [document.position for document in read_documents(remote, span)]
    assert positions == sorted(positions)
    assert positions[-1] <= span.num_bytes
    entries = [entry.read(True) for entry in read_entries(remote, span)]
    assert [entry.text for entry in entries if entry.utf8] == read_all(local)
    assert store.count("GET") == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_a_remote_file_is_one_span_planned_without_a_download(tmp_path, store, name):
    (tmp_path / name).write_bytes(b"x" * 1000)
    source = upload(store, tmp_path / name)
    spans = plan_spans(source, find_files(source), 300)
    assert [(span.start, span.end, span.num_bytes) for span in spans] == [(0, 1000, 1000)]
    assert store.count("GET") == 0


def test_a_remote_parquet_without_text_is_refused_when_it_is_read(tmp_path, store):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=rf"{store.url}/a\.parquet has no column 'text' \(it has: body\)"):
        read_all(upload(store, tmp_path / "a.parquet"))


def test_an_empty_remote_parquet_is_refused(tmp_path, store):
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=rf"{store.url}/a\.parquet is truncated or damaged"):
        read_all(upload(store, tmp_path / "a.parquet"))


def test_files_of_an_archive_and_of_memory_are_read_like_others(tmp_path, store):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "a.jsonl", "inner/a.jsonl")
    (url,) = upload(store, tmp_path / "all.zip").paths
    source = SourceOptions("web", (f"zip://inner/*.jsonl::{url}",))
    assert [file.path for file in find_files(source)] == [f"zip://inner/a.jsonl::{url}"]
    assert read_all(source) == TEXTS
    fsspec.filesystem("memory").pipe("/directory/deep/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
    for path in ("memory://directory", "memory://directory/*/a.jsonl"):
        assert read_all(SourceOptions("web", (path,))) == TEXTS


def test_local_and_remote_paths_stand_side_by_side_and_a_file_url_is_a_local_path(tmp_path, store):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:1])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[1:2])
    (url,) = upload(store, tmp_path / "b.jsonl").paths
    source = SourceOptions("web", (url, f"file://{tmp_path}/a.jsonl", str(tmp_path / "a.*")))
    assert [file.path for file in find_files(source)] == [str(tmp_path / "a.jsonl"), url]
    assert read_all(source) == TEXTS[:2]


def test_a_web_address_with_a_query_has_the_format_of_its_name(tmp_path, store):
    write_jsonl(tmp_path / "a.jsonl.gz", TEXTS)
    (url,) = upload(store, tmp_path / "a.jsonl.gz").paths
    assert read_all(SourceOptions("web", (f"{url}?download=true.txt",))) == TEXTS


def test_a_bad_line_of_a_remote_file_is_named_by_url_and_line(tmp_path, store):
    write_jsonl(tmp_path / "a.jsonl.zst", ["one", "two"])
    data = zstandard.compress(b'{"text": "one"}\n{"text": 2}\n')
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    with pytest.raises(UserError, match=rf"{store.url}/a\.jsonl\.zst, line 2: field 'text' is 2"):
        read_all(upload(store, tmp_path / "a.jsonl.zst"))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz", "a.parquet"])
def test_a_damaged_copy_is_named_by_url_and_fetched_anew_the_next_time(tmp_path, store, name):
    if name == "a.parquet":
        pq.write_table(pa.table({"text": TEXTS}), tmp_path / name, compression="gzip")
    else:
        write_jsonl(tmp_path / name, TEXTS)
    source = upload(store, tmp_path / name)
    read_all(source)
    (copy,) = (tmp_path / "cache").glob("*.copy")
    data = bytearray(copy.read_bytes())
    data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
    copy.write_bytes(data)
    (span,) = plan_spans(source, find_files(source), 1 << 20)
    with pytest.raises(DamagedFileError, match=rf"{store.url}/{name} is (truncated or )?damaged"):
        list(read_entries(source, span))
    assert read_all(source) == TEXTS
    assert store.count("GET") == 2


def test_a_remote_file_that_changes_is_refused_unless_its_copy_is_there(tmp_path, store):
    source = upload(store, write_jsonl(tmp_path / "a.jsonl", TEXTS) and tmp_path / "a.jsonl")
    (span,) = plan_spans(source, find_files(source), 1 << 20)
    assert [document.text for document in read_documents(source, span)] == TEXTS
    store.files["/a.jsonl"] = store.files["/a.jsonl"].replace(b"document", b"Document")
    assert [document.text for document in read_documents(source, span)] == TEXTS
    (copy,) = (tmp_path / "cache").glob("*.copy")
    copy.unlink()
    with pytest.raises(UserError, match=r"a\.jsonl has changed since it was listed: its ETag was"):
        list(read_documents(source, span))


def test_a_url_that_leads_nowhere_is_named(store):
    store.files["/d/a.md"] = b"text"
    for path in ("/none.txt", "/d/", "/d/*.txt"):
        with pytest.raises(UserError, match=rf"source web: no file at {store.url}.*set `suffixes`, or correct the URL"):
            find_files(SourceOptions("web", (store.url + path,)))


def test_a_sample_downloads_each_file_once_in_a_cache_that_holds_one(tmp_path, store, monkeypatch):
    monkeypatch.setattr("genesis.data.sources.sample._SPAN_BYTES", 500)
    paths = []
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write_jsonl(tmp_path / name, TEXTS)
        paths += upload(store, tmp_path / name).paths
    monkeypatch.setenv("GENESIS_CACHE_BYTES", str((tmp_path / "a.jsonl").stat().st_size))
    assert len(list(sample_texts([SourceOptions("web", tuple(paths))], 10**6))) == 3 * len(TEXTS)
    assert store.count("GET") == 3


def test_a_stream_of_remote_files_by_workers_is_that_of_the_local_ones(tmp_path, store):
    tokenizer = streams.make_tokenizer(tmp_path / "tokenizer")
    directory = streams.write_files(tmp_path / "web", make_texts(60, seed=1), ".jsonl.zst")
    for path in directory.iterdir():
        store.files[f"/web/{path.name}"] = path.read_bytes()
    rows = []
    for path, num_workers in ((directory, 0), (f"{store.url}/web/", 2)):
        changes = {"num_lanes": 2, "num_workers": num_workers}
        windows = streams.make_windows(streams.make_stream({"web": path}, tokenizer, **changes))
        try:
            rows.append([streams.rows_of(window) for window in streams.read_windows(windows, 0, 60)])
        finally:
            windows.close()
    assert rows[0] == rows[1]
    assert store.count("GET", ".zst") == 4


@pytest.mark.slow
def test_data_prepare_of_s3_makes_the_corpus_that_the_same_files_make_locally(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text/a.jsonl.zst", make_texts(80, seed=1))
    write_jsonl(tmp_path / "text/b.jsonl", make_texts(80, seed=2))
    pq.write_table(pa.table({"text": make_texts(40, seed=3)}), tmp_path / "text/c.parquet")
    with serve_s3() as ((host, port), client):
        for path in (tmp_path / "text").iterdir():
            client.put_object(Bucket=BUCKET, Key=f"text/{path.name}", Body=path.read_bytes())
        environment = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "GENESIS_CACHE_DIR": str(tmp_path / "cache"),
        }
        for name, path in (("local", tmp_path / "text"), ("remote", f"s3://{BUCKET}/text")):
            config = {
                "name": name,
                "out": str(tmp_path),
                "tokenizer": str(tmp_path),
                "sources": [{"name": "web", "paths": [str(path)]}],
                "validation_fraction": 0.1,
                "num_workers": 2,
            }
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
            command = ("data", "prepare", "--config", tmp_path / f"{name}.yaml")
            result = run_genesis(*command, env={**os.environ, **environment}, timeout=250)
            assert (result.returncode, without_stages(result.stderr)) == (0, [])
    trees = [read_tree(tmp_path / name) for name in ("local", "remote")]
    shards = [{path: data for path, data in tree.items() if ".ds" in path} for tree in trees]
    assert shards[0] == shards[1] != {}


# ---- records and files beyond any text


def test_a_record_and_a_file_expand_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_FREE_BYTES", 1 << 18)
    monkeypatch.setattr(blocks, "MAX_RECORD_BYTES", 1 << 20)
    lines = b'{"text": "a"}\n' * 200_000
    row = b'{"text": "' + b"a" * (blocks.MAX_RECORD_BYTES + 1) + b'"}\n'
    table = pa.table({"text": ["a" * 1000] * 5_000})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    bombs = {
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": zstandard.compress(lines),
        "a.csv.gz": gzip.compress(b"text\n" + b"a\n" * 1_000_000),
        "b.jsonl": row,
        "b.json": b"[" + row + b"]",
        "b.txt": row,
        "c.jsonl.gz": gzip.compress(b"x" * (blocks.MAX_RECORD_BYTES + 1), 9),
    }
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(content)
    for name in (*bombs, "a.parquet"):
        reason = "expands to [0-9,]+ bytes" if name[0] in "ac" else "a record has more than 1 MiB"
        with pytest.raises(UserError, match=rf"{name}[^\n]* {reason}[^\n]*$"):
            read_all(SourceOptions("web", (str(tmp_path / name),)))


def test_a_compressed_file_that_is_a_hole_is_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    os.truncate(tmp_path / "a.jsonl.gz", 1 << 40)
    with pytest.raises(UserError, match="the rest is a hole"):
        read_all(SourceOptions("web", (str(tmp_path),)))
