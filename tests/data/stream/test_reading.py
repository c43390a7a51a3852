"""Streams of text as other systems write it, and streams that were begun by the rules 1 of reading."""

import json
from hashlib import blake2b

import pytest

from genesis.base.errors import UserError
from genesis.data.sources import SourceOptions
from genesis.data.stream.state import measure_usage
from genesis.tokenizer.open import hash_contents
from tests.data.stream.streams import (
    GLOBAL_BATCH,
    count_pairs,
    expected_pairs,
    make_stream,
    make_texts,
    make_tokenizer,
    make_windows,
    read_to_the_end,
    read_windows,
    rows_of,
)
from tests.tokenizer.test_huggingface import smollm


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make(directory, tokenizer, **changes):
    """Returns a stream of two files whose lines are documents, with marks, returns and blank lines."""
    for number in range(0 if directory.exists() else 2):
        directory.mkdir(exist_ok=True)
        texts = [text.replace("\n", " ") for text in make_texts(40, seed=number)]
        (directory / f"{number}.txt").write_text("\ufeff" + "\r\n \t\r\n".join(texts), newline="")
    sources = (SourceOptions("web", (str(directory),), separator="\n"),)
    return make_stream({"web": directory}, tokenizer, sources=sources, num_lanes=2, **changes)


def test_a_stream_trains_on_the_lines_of_each_system_and_counts_blank_ones(tmp_path, tokenizer):
    windows = make_windows(make(tmp_path / "web", tokenizer, max_epochs=1))
    rows, position = read_to_the_end(windows)
    texts = [text.replace("\n", " ") for number in range(2) for text in make_texts(40, seed=number)]
    assert count_pairs(rows) == expected_pairs(windows.stream.tokenizer, texts)
    usage = windows.usage(position)["web"]
    assert (usage.num_documents, usage.num_blank_documents) == (80, 78)


def test_a_stream_that_was_begun_by_the_earlier_rules_goes_on_by_them(tmp_path, tokenizer):
    old = make_windows(make(tmp_path / "web", tokenizer, max_epochs=2).read_by(1))
    rows, _ = read_to_the_end(old)
    texts = [text for number in range(2) for text in (tmp_path / f"web/{number}.txt").read_bytes().decode().split("\n")]
    assert "\ufeff" in texts[0]
    assert " \t\r" in texts
    assert count_pairs(rows) == expected_pairs(old.stream.tokenizer, texts * 2)
    for number in (1, 3, 7):
        old = make_windows(make(tmp_path / "web", tokenizer, max_epochs=2).read_by(1))
        read_windows(old, 0, number)
        state = old.state(number * GLOBAL_BATCH)
        assert state["version"] == 1
        state["lanes"]["0"]["web"].pop("num_blank_documents")  # states of earlier versions have no such key
        new = make_windows(make(tmp_path / "web", tokenizer, max_epochs=2))
        new.load_state(state, number * GLOBAL_BATCH)
        for later in range(number, number + 6):
            assert rows_of(new.window(later * GLOBAL_BATCH)) == rows_of(old.window(later * GLOBAL_BATCH))
        assert new.state((number + 6) * GLOBAL_BATCH)["version"] == 1
        assert measure_usage(new.stream, new._states)["web"].num_blank_documents == 0


def test_by_the_earlier_rules_the_last_value_of_a_key_counts_and_replaced_bytes_stay(tmp_path, tokenizer):
    (tmp_path / "web").mkdir()
    texts = make_texts(40, seed=1)
    lines = (json.dumps({"text": text}).replace("{", '{"text": "first", ') for text in texts)
    (tmp_path / "web/a.jsonl").write_text("\n".join(lines))
    (tmp_path / "web/b.txt").write_bytes(b"%PDF-1.7 \xff and so on")
    source = SourceOptions("web", (str(tmp_path / "web"),), on_undecodable="replace")
    stream = make_stream({"web": tmp_path / "web"}, tokenizer, sources=(source,), num_lanes=1, max_epochs=1)
    rows, _ = read_to_the_end(make_windows(stream.read_by(1)))
    assert count_pairs(rows) == expected_pairs(stream.tokenizer, [*texts, "%PDF-1.7 \ufffd and so on"])
    with pytest.raises(UserError, match=r"the key 'text' is twice|is a PDF document"):
        read_to_the_end(make_windows(stream))


def test_a_state_names_a_tokenizer_by_what_it_does_or_by_its_bytes(tmp_path):
    directory = smollm(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.txt").write_text("one two three " * 50)

    def make_small():
        return make_windows(make_stream({"web": tmp_path / "web"}, directory, num_lanes=1))

    before = make_small()
    state = before.state(0)
    bytes_before = hash_contents(before.stream.tokenizer)
    before.load_state({**state, "tokenizer": bytes_before}, 0)  # as earlier versions wrote it
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    after = make_small()
    after.load_state(state, 0)
    with pytest.raises(UserError, match="has tokenizer"):
        after.load_state({**state, "tokenizer": bytes_before}, 0)


def test_a_state_of_a_later_version_is_refused(tmp_path, tokenizer):
    windows = make_windows(make(tmp_path / "web", tokenizer))
    state = windows.state(0)
    assert state["version"] == 2
    with pytest.raises(UserError, match="has version 3, this genesis reads up to 2"):
        windows.load_state({**state, "version": 3}, 0)


def test_the_identity_of_files_changes_only_where_their_kind_does(tmp_path, tokenizer):
    def describe(names, **options):
        directory = tmp_path / "-".join((*names, *options))
        directory.mkdir()
        for name in names:
            (directory / name).write_text('{"text": "one"}\n' * 9)
        source = SourceOptions("web", tuple(str(directory / name) for name in names), **options)
        stream = make_stream({"web": directory}, tokenizer, sources=(source,), num_lanes=1)
        size = len('{"text": "one"}\n') * 9
        before = (source.format, "text", None, "error", *((name, size, "") for name in names))
        return stream.file_hashes["web"] == blake2b(repr(before).encode(), digest_size=16).hexdigest()

    assert describe(["a.jsonl", "b.txt", "c.py"])
    assert describe(["a.json"], format="text")
    assert not describe(["a.json"])
    assert not describe(["A.JSONL"])
