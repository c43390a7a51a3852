"""Files of a source: none vanishes, none is read twice, and each is read as its name says."""

import gzip
import json
import os

import pytest
import zstandard

from genesis.base.errors import UserError
from genesis.data.row_notes import RefusedRow, explain_refused
from genesis.data.sources import SourceOptions, find_files, list_source, plan_spans, read_documents, read_entries
from tests.data.store_support import BUCKET, CREDENTIALS, FaultyStore, serve_s3

NOBODY = 65534


def write(directory, *names, text="text"):
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def find(directory, *paths, **options):
    """Returns the files of a source by their paths below `directory`, and the line about them."""
    listing = list_source(SourceOptions("web", tuple(str(directory / path) for path in paths), **options))
    return [os.path.relpath(file.path, directory) for file in listing.files], listing.describe()


def read(*paths, target_bytes=1 << 20, **options):
    source = SourceOptions("web", tuple(map(str, paths)), **options)
    spans = plan_spans(source, find_files(source), target_bytes)
    return [document.text for span in spans for document in read_documents(source, span)]


# Which files


def test_suffixes_count_in_any_case(tmp_path):
    """Reported as huggingface/datasets#4514 (.JPEG)."""
    write(tmp_path, "UP.JSONL", text='{"text": "one"}\n')
    write(tmp_path, "b.Jsonl.GZ", "c.TXT", "d.PY")
    (tmp_path / "b.Jsonl.GZ").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    assert find(tmp_path, "") == (
        ["UP.JSONL", "b.Jsonl.GZ", "c.TXT"],
        "source web: reads 3 files (2 jsonl, 1 text); does not read 1 .py",
    )
    assert read(tmp_path) == ["one", "two", "text"]
    assert find(tmp_path, "", suffixes=(".py",))[0] == ["d.PY"]


def test_links_to_directories_are_followed_and_loops_end(tmp_path):
    write(tmp_path, "data/a.txt", "elsewhere/b.txt", "elsewhere/deep/c.txt")
    (tmp_path / "data/other").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/up").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere/deep/top").symlink_to(tmp_path)
    expected = ["data/a.txt", "data/again/b.txt", "data/again/deep/c.txt"]
    assert find(tmp_path, "data")[0] == expected
    names, line = find(tmp_path, "data/**/*.txt")
    assert names == expected
    assert "that are read by another name" in line


def test_a_file_of_several_names_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.txt", "d/b.txt")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "e").symlink_to("d")
    paths = ("a.txt", "./a.txt", str(tmp_path / "a.txt"), "d/../a.txt", f"file://{tmp_path}/a.txt", "*.txt", "d", "e")
    listing = list_source(SourceOptions("web", paths))
    assert [file.path for file in listing.files] == ["a.txt", "d/b.txt"]
    assert listing.skipped["that are read by another name"] == (5, str(tmp_path / "a.txt"))


def test_hidden_files_and_copies_of_notebooks_are_left_out_and_counted(tmp_path):
    """Reported as huggingface/datasets#4115 and pytorch/vision#109 (.DS_Store)."""
    write(
        tmp_path,
        "a.txt",
        ".hidden.txt",
        ".ipynb_checkpoints/a-checkpoint.txt",
        "d/.cache/b.txt",
        "d/._c.txt",
        ".DS_Store",
    )
    names, line = find(tmp_path, "")
    assert names == ["a.txt"]
    assert "does not read 5 hidden" in line
    assert find(tmp_path, "**/*.txt")[0] == ["a.txt"]
    assert find(tmp_path, "*.txt")[0] == ["a.txt"]
    # A path that names them reads them, as huggingface/datasets#6230 asks for.
    assert find(tmp_path, ".hidden.txt")[0] == [".hidden.txt"]
    assert find(tmp_path, "d/.cache")[0] == ["d/.cache/b.txt"]
    assert find(tmp_path, ".ipynb_checkpoints/*.txt")[0] == [".ipynb_checkpoints/a-checkpoint.txt"]


def test_what_a_directory_has_beside_its_files_is_counted_by_suffix(tmp_path):
    write(tmp_path, "a.txt", "b.csv", "c.csv", "d.json", "README", "e.md")
    os.mkfifo(tmp_path / "f.txt")
    assert find(tmp_path, "")[1] == (
        "source web: reads 1 file (1 text); does not read 2 .csv, 1 .json, 1 .md, "
        f"1 without a suffix ({tmp_path}/README), 1 that are a FIFO ({tmp_path}/f.txt)"
    )
    with pytest.raises(
        UserError, match=r"has no file with suffix \.jsonl \(found: 2 \.txt, 2 \.csv, 1 \.json.*; set `suffixes`"
    ):
        find(tmp_path, "", suffixes=(".jsonl",))


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "f.txt")
    with pytest.raises(UserError, match=r"f\.txt is a FIFO, but must be a file"):
        find(tmp_path, "f.txt")


def test_a_link_without_a_target_is_an_error_where_its_file_would_be_read(tmp_path):
    write(tmp_path, "a.txt")
    (tmp_path / "b.md").symlink_to("gone.md")
    assert find(tmp_path, "")[0] == ["a.txt"]
    (tmp_path / "b.txt").symlink_to("gone.txt")
    with pytest.raises(UserError, match=r"b\.txt is a link without a target; restore its target, or remove the link"):
        find(tmp_path, "")


@pytest.mark.parametrize("path", ["", "**/*.txt", "*/*.txt"])
@pytest.mark.parametrize("locked", ["d", "linked"])
def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path, path, locked):
    write(tmp_path, "a.txt", "d/b.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "d")
    open_path = tmp_path
    while open_path != open_path.parent:
        open_path.chmod(open_path.stat().st_mode | 0o55)
        open_path = open_path.parent
    (tmp_path / "d").chmod(0)
    if os.fork() == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            find(tmp_path, path)
        except UserError as error:
            os._exit(0 if f"source web: cannot read {tmp_path}/d (Permission denied)" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    _, status = os.wait()
    (tmp_path / "d").chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.slow
def test_a_store_lists_as_a_directory_does(tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    names = ("a.TXT", "d/b.jsonl", ".ipynb_checkpoints/a.txt", "d/.c.txt", "e.csv")
    with serve_s3() as ((host, port), client):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in names:
            client.put_object(Bucket=BUCKET, Key=f"web/{name}", Body=b"text")
        listing = list_source(SourceOptions("web", (f"s3://{BUCKET}/web",)))
        globbed = list_source(SourceOptions("web", (f"s3://{BUCKET}/web/**/*.*", f"s3://{BUCKET}/web/d/.c*")))
    assert [file.path.rpartition("web/")[2] for file in listing.files] == ["a.TXT", "d/b.jsonl"]
    assert listing.describe().endswith("does not read 1 .csv, 2 hidden (corpus/web/d/.c.txt)")
    assert [file.path.rpartition("web/")[2] for file in globbed.files] == ["a.TXT", "d/.c.txt", "d/b.jsonl", "e.csv"]


# As what they are read


ROWS = [
    {"text": 'one, "two"\nthree', "n": 1},
    {"text": "null", "n": 2},
    {"text": "007", "n": None},
    {"text": "", "n": 3},
]
TEXTS = ['one, "two"\nthree', "null", "007"]
CSV = 'n,text\r\n1,"one, ""two""\nthree"\r\n2,null\r\n,007\r\n3,\r\n'


def pack(name, data):
    return {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rpartition(".")[2].lower(), bytes)(data)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ROWS)),
        ("A.JSON", json.dumps(ROWS, indent=2)),
        ("b.json.gz", "\ufeff" + json.dumps(ROWS)),
        ("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS)),  # huggingface/datasets#6891
        ("objects.json.zst", "\n\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a.csv", CSV),
        ("b.CSV.gz", "\ufeff" + CSV),
        (
            "a.tsv",
            CSV.replace("n,", "n\t")
            .replace("1,", "1\t")
            .replace("2,", "2\t")
            .replace("\n,", "\n\t")
            .replace("3,", "3\t"),
        ),
    ],
)
def test_a_table_in_text_gives_its_rows_as_they_are_written(tmp_path, name, text):
    """Texts as "null" and "007" stay texts; reported as huggingface/datasets#4467."""
    (tmp_path / name).write_bytes(pack(name, text.encode()))
    assert read(tmp_path / name) == TEXTS
    source = SourceOptions("web", (str(tmp_path / name),))
    (span,) = plan_spans(source, find_files(source), 10)
    entries = [(entry.start, entry.end, entry.read(True).text) for entry in read_entries(source, span)]
    for number, (_, end, _) in enumerate(entries):
        rest = [(entry.start, entry.end, entry.read(True).text) for entry in read_entries(source, span, end)]
        assert rest == entries[number + 1 :]


@pytest.mark.parametrize("block_bytes", [1, 7, 64])
def test_the_objects_of_an_array_are_found_wherever_a_block_ends(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr("genesis.data.sources.blocks._BLOCK_BYTES", block_bytes)
    rows = [{"text": f'{number} \\ "]}}[{{" é \\" {"x" * number}', "deep": [[{"a": []}]]} for number in range(9)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    assert read(tmp_path / "a.json") == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"text": "a"}, {"text": "b"}', "a.json is truncated: its JSON has no end"),
        ("a.json", '[{"text": "a"}, {"text": "b', "a.json is truncated: its JSON has no end"),
        ("a.json", '[{"text": "a"} {"text": "b"}]', "offset 14: '' is no part of an array"),
        ("a.json", '[{"text": "a"},]', "offset 14: ',' is no part of an array"),
        ("a.json", '[{"text": "a"}] tail', "offset 15: 'tail' is no part of an array"),
        ("a.json", '[{"text": "a"}] []', "'\\[' is no part of an array"),
        ("a.json", "[1, 2, 3]", "'1, 2, 3' is no part of an array"),
        ("a.json", '["a", "b"]', "a.json, line 1 is a JSON str, not an object"),
        (
            "a.json",
            '{"data": [\n{"text": "a"}]}',
            r"a.json, line 1 has no field 'text' \(it has: data\); set text_field of source web, or format: text",
        ),
        ("a.json", '[{"text": "a"},\n{"body": "b"}]', r"a.json, line 2 has no field 'text' \(it has: body\)"),
        (
            "a.jsonl",
            '[{"text": "a"}]',
            "line 1 is a JSON list, not an object; .* name the file .json, or set format: json",
        ),
        ("a.csv", "body,id\nx,1\n", r"a.csv has no column 'text' \(it has: body, id\)"),
        ("a.csv", "id;text\n1;x\n", r"a.csv has no column 'text' \(it has: id;text\)"),
        ("a.csv", "id,text\n1,x,y\n", "a.csv is no csv file .*Expected 2 columns, got 3"),
    ],
)
def test_a_table_without_texts_is_refused_by_name(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_bytes_of_a_csv_that_are_not_utf8_are_named_by_their_row(tmp_path):
    (tmp_path / "a.csv").write_bytes("id,text\n1,fine\n2,naïve café\n".encode("cp1252"))
    with pytest.raises(UserError, match=r"a\.csv, row 1, offset 2 of its text: byte 0xef is not UTF-8; .* cp1252"):
        read(tmp_path / "a.csv")


def test_conversations_are_read_from_an_array_and_from_a_table(tmp_path):
    row = {"instruction": "Ask", "input": "", "output": "42"}
    (tmp_path / "a.json").write_text(json.dumps([row]))
    (tmp_path / "a.csv").write_text("instruction,input,output\nAsk,,42\n")
    texts = [read(tmp_path / name, chat="auto") for name in ("a.json", "a.csv")]
    assert texts[0] == texts[1]
    assert [turn["content"] for turn in json.loads(texts[0][0])["messages"]] == ["Ask", "42"]


def test_a_remote_table_gives_what_the_local_one_gives(tmp_path, monkeypatch):
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    with FaultyStore() as store:
        for name, text in (("a.csv.gz", CSV), ("b.JSON", json.dumps(ROWS))):
            store.files["/" + name] = pack(name, text.encode())
            assert read(f"{store.url}/{name}") == TEXTS


def test_a_line_with_several_bad_objects_is_named_once():
    rows = [RefusedRow("a.json, line 1", "is a JSON str", may_skip=True)] * 2
    assert explain_refused("web", rows, "skip them") == "a.json, line 1 is a JSON str; or skip them"
