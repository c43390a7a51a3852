"""Text as other systems write it, and files that are no text."""

import bz2
import gzip
import io
import json
import lzma
import sqlite3
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from safetensors.torch import save

from genesis.base.errors import UserError
from genesis.data.sources import (
    DamagedFileError,
    SourceOptions,
    describe_listing,
    find_files,
    list_source,
    plan_spans,
    read_documents,
    read_rows,
    sample_texts,
)
from genesis.data.sources.binary import find_binary


def _gzip(data: bytes) -> bytes:
    """Returns compressed data without a time, so that the names of tests are the same in each process."""
    return gzip.compress(data, mtime=0)


def read(path, target_bytes=1 << 20, **options):
    source = SourceOptions("web", (str(path),), **options)
    spans = plan_spans(source, find_files(source), target_bytes)
    return [document.text for span in spans for document in read_documents(source, span)]


# Line breaks, marks and white space


@pytest.mark.parametrize(
    ("data", "separator", "texts"),
    [
        (b"one\r\ntwo\r\n\r\n", "\n", ["one", "two"]),
        (b"one\ntwo\n", "\r\n", ["one", "two"]),
        (b"a\r\nb\r\n\r\nc\r\n", "\n\n", ["a\r\nb", "c\r\n"]),
        (b"a\n\r\nb", "\n\n", ["a", "b"]),
        (b"one\r\n<|e|>\r\ntwo\r\n<|e|>\r\n", "\n<|e|>\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo", "\n", ["one", "\ufefftwo"]),
        (b"one\rtwo\r", "\r", ["one", "two"]),
        (b"10%\r20%\rdone\nnext", "\n", ["10%\r20%\rdone", "next"]),
        ("one\u2029still\u0085one\ntwo".encode(), "\n", ["one\u2029still\x85one", "two"]),
        (b"one\n \t\r\n\n\xc2\xa0\xe3\x80\x80\ntwo", "\n", ["one", "two"]),
    ],
)
def test_a_separator_finds_the_line_breaks_of_each_system(tmp_path, data, separator, texts):
    r"""Reported as huggingface/datasets#622 (\r) and #3729 (U+2029)."""
    for target_bytes in (1, 1 << 20):
        (tmp_path / "a.txt").write_bytes(data)
        assert read(tmp_path / "a.txt", target_bytes, separator=separator) == texts
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(data))
    assert read(tmp_path / "a.txt.gz", separator=separator) == texts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "hello"),
        ("a.jsonl", '{"text": "hello"}\r\n{"text": "\ufeff"}'),
        ("a.json", '[{"text": "hello"}, {"text": "\ufeff"}]'),
        ("a.csv", "text,n\nhello,1\n\ufeff,2\n"),
    ],
)
def test_a_byte_order_mark_at_the_beginning_of_a_file_goes(tmp_path, name, text):
    """Reported as WangRongsheng/MedQA-ChatGLM#2."""
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    assert read(tmp_path / name)[0] == "hello"
    assert read(tmp_path / name)[1:] in ([], ["\ufeff"])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_documents_of_white_space_are_dropped(tmp_path, name):
    blank = " \n\t\u3000\u00a0"
    if name == "a.parquet":
        pq.write_table(pa.table({"text": [blank, "x", ""]}), tmp_path / name)
    else:
        lines = [json.dumps({"text": text}) for text in (blank, "x", "")]
        texts = {"a.txt": f"{blank}|x|", "a.jsonl": "\n".join(lines), "a.json": f"[{','.join(lines)}]"}
        (tmp_path / name).write_text(texts.get(name, f'text,n\n"{blank}",1\nx,2\n,3\n'))
    source = SourceOptions("web", (str(tmp_path / name),), separator="|")
    (span,) = plan_spans(source, find_files(source), 1 << 20)
    documents = list(read_rows(source, span))
    assert [document.text for document in documents if not document.is_blank] == ["x"]
    assert sum(document.is_blank for document in documents) == (1 if name == "a.txt" else 2)


RECORDS_AS_TEXT = (
    "source web: {} is read as text, and begins as JSON does: its names and braces would be learned; "
    "give `format: jsonl` or `format: json`, or `format: text` if that is wanted"
)


@pytest.mark.parametrize(
    ("texts", "separator", "lines"),
    [
        (["one\n\ntwo"], "\n\n", []),
        (["one\r\n\r\ntwo"], "\n\n", []),
        (["one", "two\n\n"], "\n\n", []),
        (["one"], "<|e|>", ["the separator '<|e|>' does not occur: its text file is one document"]),
        (["a", "b"], "<|e|>", ["the separator '<|e|>' does not occur: each of its 2 text files is one document"]),
        (["one\ntwo"], "\\n", [r"'\\n' does not occur: .*; in YAML, \\n is a line break only between double quotes"]),
        (["one\rtwo"], "\n", [r"'\n' does not occur: .*; the line breaks there are \\r alone, so write \\r for \\n"]),
        (["one"], None, []),
    ],
)
def test_a_separator_that_never_occurs_is_reported(tmp_path, texts, separator, lines):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    listing = list_source(SourceOptions("web", (str(tmp_path),), separator=separator))
    _, *found = describe_listing(listing)
    assert len(found) == len(lines)
    for line, wanted in zip(found, lines, strict=True):
        start, _, end = wanted.partition(".*")
        assert start in line
        assert line.endswith(end.replace("\\\\", "\\")) or end in line


@pytest.mark.parametrize(
    ("text", "options", "is_named", "is_noted"),
    [
        ('[\n {"instruction": "a", "output": "b"}\n]', {}, True, True),
        ('{"text": "a"}\n', {}, True, True),
        ('{"text": "a"}\n', {"format": "text"}, True, False),
        ('{"text": "a"}\n', {"format": "jsonl"}, True, False),
        ('{"text": "a"}\n', {}, False, False),
        ("{ a set of words }", {}, True, False),
        ("[1] a note", {}, True, False),
    ],
)
def test_records_in_a_file_of_text_are_reported(tmp_path, text, options, is_named, is_noted):
    """As in hiyouga/LlamaFactory#3018, whose array of records was named .txt."""
    path = tmp_path / "data.txt"
    path.write_text(text)
    _, *found = describe_listing(list_source(SourceOptions("web", (str(path if is_named else tmp_path),), **options)))
    assert found == ([RECORDS_AS_TEXT.format(path)] if is_noted else [])


# Other encodings


@pytest.mark.parametrize(
    ("encoding", "text", "message"),
    [
        ("utf-16", "Hello, world.", "is text in UTF-16; convert the file by `iconv -f UTF-16 -t UTF-8`"),
        ("utf-16-le", "Hello, world.", "is text in UTF-16LE; convert the file"),
        ("utf-16-be", "Hello, world.", "is text in UTF-16BE; convert the file"),
        ("utf-32", "Hello, world.", "is text in UTF-32; convert the file"),
        ("cp1252", "Ein Café für “viele” — über den Dächern.", "byte 0xe9 is not UTF-8; it can be read as cp1252"),
        ("gb18030", "今天天气很好。我们去公园散步吧。", "byte 0xbd is not UTF-8; it can be read as gb18030"),
        ("shift_jis", "これは日本語の文章です。", "is not UTF-8; it can be read as (gb18030 or )?.*shift_jis"),
        ("big5", "今天天氣很好。我們去公園散步。", "is not UTF-8; it can be read as .*big5"),
        ("euc_kr", "안녕하세요 여러분", "is not UTF-8; it can be read as .*euc_kr"),
    ],
)
def test_text_in_another_encoding_is_named(tmp_path, encoding, text, message):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.txt")


def test_a_character_that_the_head_of_a_file_cuts_is_no_other_encoding(tmp_path):
    text = "é" * 5000 + "\0"
    (tmp_path / "a.txt").write_text(f"x{text}", encoding="utf-8")
    assert read(tmp_path / "a.txt") == [f"x{text}"]


# No text


def make_tar():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"text"))
    return data.getvalue()


def make_zip(*names):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, "text")
    return data.getvalue()


def make_other(write):
    data = io.BytesIO()
    write(data)
    return data.getvalue()


def make_database(path):
    connection = sqlite3.connect(path / "x.db")
    connection.execute("create table t (text)")
    connection.commit()
    connection.close()
    return (path / "x.db").read_bytes()


def make_arrow(path):
    table = pa.table({"text": ["x"]})
    with pa.OSFile(str(path / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return (path / "x.arrow").read_bytes()


TABLE = pa.table({"text": ["x"]})
FILES = [
    (lambda _: _gzip(b"text"), r"compressed with gzip; name it \.gz"),
    (lambda _: zstandard.compress(b"text"), r"compressed with Zstandard; name it \.zst"),
    (lambda _: lzma.compress(b"text"), "compressed with xz; decompress it"),
    (lambda _: bz2.compress(b"text"), "compressed with bzip2; decompress it"),
    (lambda _: b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive; extract its files"),
    (lambda _: make_tar(), "a tar archive; extract its files"),
    (lambda _: make_zip("a.txt"), "a zip archive; extract its files"),
    (lambda _: make_zip("[Content_Types].xml", "word/document.xml"), r"a Word document \(\.docx\)"),
    (
        lambda _: make_zip("[Content_Types].xml", "xl/workbook.xml"),
        r"an Excel workbook \(\.xlsx\); save its sheet as CSV",
    ),
    (lambda _: make_other(lambda file: torch.save({"a": torch.zeros(2)}, file)), r"a file of torch\.save"),
    (lambda _: make_other(lambda file: np.save(file, np.zeros(3))), "a NumPy array"),
    (lambda _: make_other(lambda file: pq.write_table(TABLE, file)), r"a Parquet file; name it \.parquet"),
    (make_arrow, r"an Arrow stream; name it \.arrow"),
    (lambda _: save({"a": torch.zeros(2)}), "safetensors; a model's weights are not text"),
    (lambda _: b"GGUF\3\0\0\0" + bytes(40), "GGUF; a model's weights"),
    (make_database, "an SQLite database"),
    (lambda _: b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n", "a PDF document; save its text"),
    (lambda _: b"{\\rtf1\\ansi hello}", "an RTF document"),
    (lambda _: b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
    (lambda _: b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
    (lambda _: b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x04text\x94.", "a pickle"),
    (
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:2d6c\nsize 10\n",
        "a pointer of Git LFS, not the file itself; run `git lfs pull`",  # benedekrozemberczki/datasets#10
    ),
    (lambda _: b"text" + bytes(2000), "no text: 2,000 of its first 2,004 bytes are zero"),
    # Data of a format without a signature: 26 of 256 different bytes are control characters.
    (lambda _: bytes([*range(128, 256), *range(128)]), "no text: it is not UTF-8, and 26 of its first 256"),
]


@pytest.mark.parametrize(("make", "what"), FILES)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json", "a.txt.gz"])
def test_a_file_that_is_no_text_is_named_with_a_remedy_whatever_replaces_bytes(tmp_path, make, what, name):
    """Reported as horseee/LLM-Pruner#77 (gzip, as "can't decode byte 0x8b")."""
    data = make(tmp_path)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for options in ({}, {"on_undecodable": "replace"}, {"separator": "\n", "on_undecodable": "replace"}):
        with pytest.raises(UserError, match=what) as raised:
            read(tmp_path / name, 16, **options)
        assert "set on_undecodable" not in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [
        b"name\x01Oslo\x01Norway\x01\n" * 20 + b"\xe9 \xe8 \xfc",  # Hive's fields, and letters of Latin-1
        ("N\bNA\bAM\bME\bE\n     \u00e9t\u00e9 ".encode("latin-1")) * 20,  # a page of a manual with bold letters
    ],
)
def test_text_with_control_characters_is_text(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    assert read(tmp_path / "a.txt", 16, on_undecodable="replace")


def test_a_file_is_no_text_from_each_of_its_parts(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"%PDF-1.4\n" + b"\n".join([b"<< /Type /Catalog >>"] * 20))
    source = SourceOptions("web", (str(tmp_path),), separator="\n")
    spans = list(plan_spans(source, find_files(source), 50))
    assert len(spans) > 5
    for span in spans:
        with pytest.raises(DamagedFileError, match="a PDF document"):
            list(read_documents(source, span))
    with pytest.raises(UserError, match="a PDF document"):
        list(sample_texts([source], 10**6))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt.gz", zstandard.compress(b"text"), r"is named \.gz, and is compressed with Zstandard; name it \.zst"),
        ("a.jsonl.zst", _gzip(b"text"), r"is named \.zst, and is compressed with gzip; name it \.gz"),
        ("a.jsonl.gz", b'{"text": "x"}', r"is named \.gz, and is not compressed; remove the ending"),
        ("a.parquet", _gzip(b"text"), r"is not a complete parquet file .*; it is compressed with gzip"),
        ("a.parquet", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", r"is not a complete parquet file .*; it is a PNG image"),
        ("a.parquet", b"PAR1\x15\x04\x15" + bytes(60), r"complete parquet file [^;]*; correct it, or fetch it again$"),
        ("a.arrow", b"ARROW1\0\0" + bytes(60), r"complete arrow file [^;]*; correct it, or fetch it again$"),
        ("a.parquet.gz", _gzip(b"PAR1"), "a parquet file cannot be read while it is compressed as a whole"),
    ],
)
def test_a_file_that_its_name_describes_wrongly_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    ["ORC is a format.", "BZh is short.", "RIFF, said he", "GGUF holds weights", "PK\n", "MZ", "ID3 tags", "1234ftyp"],
)
def test_words_that_begin_as_a_signature_are_text(text):
    assert find_binary(text.encode()) is None
