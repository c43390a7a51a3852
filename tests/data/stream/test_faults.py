"""Bad input, real files: an error that names the place, or a skip that is counted; nothing else is lost."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from genesis.base.errors import UserError
from genesis.data.sources import SourceOptions
from genesis.data.stream.block import BlockReader, Cursor
from genesis.data.stream.worker import LaneSource
from genesis.tokenizer.open import open_tokenizer
from tests.data.stream.streams import (
    GLOBAL_BATCH,
    count_pairs,
    expected_pairs,
    make_stream,
    make_texts,
    make_windows,
    read_to_the_end,
    read_windows,
    rows_of,
    write_files,
)

TEXTS = make_texts(40, seed=1)


def write_lines(directory, lines, suffix=".jsonl.zst"):
    directory.mkdir()
    data = b"".join(line + b"\n" for line in lines)
    path = directory / f"a{suffix}"
    path.write_bytes(zstandard.compress(data) if suffix.endswith(".zst") else data)
    return path


def make_lines(texts=TEXTS):
    return [json.dumps({"text": text}).encode() for text in texts]


def read_skipping(directory, tokenizer, num_workers=0):
    """Returns the pairs of one epoch and the usage of a run that skips what is bad."""
    stream = make_stream(
        {"web": directory}, tokenizer, max_epochs=1, on_bad_document="skip", num_lanes=1, num_workers=num_workers
    )
    windows = make_windows(stream)
    rows, position = read_to_the_end(windows)
    windows.close()
    return count_pairs(rows), windows.usage(position)["web"], stream


def read_strictly(directory, tokenizer, **changes):
    windows = make_windows(make_stream({"web": directory}, tokenizer, **{"max_epochs": 1, "num_lanes": 1, **changes}))
    try:
        return read_to_the_end(windows)
    finally:
        windows.close()


BAD_LINES = {
    "not JSON": (b'{"text": "cut', r"line 21 is not JSON"),
    "a wrong type": (b'{"text": 7}', r"line 21: field 'text' is 7, not text"),
    "no field": (b'{"content": "x"}', r"line 21 has no field 'text' \(it has: content\)"),
    "a key twice": (b'{"text": "a", "text": "b"}', r"line 21 is not JSON \(the key 'text' is twice in one object\)"),
    "not an object": (b"[1]", r"line 21 is a JSON list"),
    "invalid UTF-8": (b'{"text": "\xff"}', r"offset \d+.*: byte 0xff is not UTF-8"),
    "half a surrogate pair": (rb'{"text": "\ud83d"}', r"line 21 has a lone surrogate"),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_with_file_and_line_or_skipped_and_counted(tmp_path, tokenizer, suffix, kind, caplog):
    bad, words = BAD_LINES[kind]
    lines = make_lines()
    path = write_lines(tmp_path / "web", [*lines[:20], bad, *lines[20:]], suffix)
    with pytest.raises(UserError, match=words) as error:
        read_strictly(path.parent, tokenizer)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        pairs, usage, stream = read_skipping(path.parent, tokenizer)
    assert pairs == expected_pairs(stream.tokenizer, TEXTS)
    assert (usage.num_documents, usage.num_bad_documents, usage.num_damaged_spans) == (len(TEXTS), 1, 0)
    assert "skipped: " in caplog.text
    assert str(path) in caplog.text


def test_an_error_in_a_worker_is_the_same_line_at_the_same_window(tmp_path, tokenizer):
    lines = make_lines()
    write_lines(tmp_path / "web", [*lines[:30], b"bad", *lines[30:]])
    messages, trained = [], []
    for num_workers in (0, 2):
        windows = make_windows(make_stream({"web": tmp_path / "web"}, tokenizer, num_lanes=1, num_workers=num_workers))
        given = []
        with pytest.raises(UserError) as error:
            given.extend(windows.window(number * GLOBAL_BATCH) for number in range(100))
        windows.close()
        messages.append(str(error.value))
        trained.append(len(given))
    assert messages[0] == messages[1]
    assert "line 31 is not JSON" in messages[0]
    assert trained[0] == trained[1] > 1


def test_many_bad_lines_are_all_counted_and_a_few_are_shown(tmp_path, tokenizer, caplog):
    lines = [line for pair in zip(make_lines(), [b"bad"] * len(TEXTS), strict=True) for line in pair]
    write_lines(tmp_path / "web", lines)
    with caplog.at_level(logging.WARNING):
        pairs, usage, stream = read_skipping(tmp_path / "web", tokenizer, num_workers=1)
    assert pairs == expected_pairs(stream.tokenizer, TEXTS)
    assert usage.num_bad_documents == len(TEXTS)
    shown = [record.message for record in caplog.records if "skipped" in record.message]
    assert 1 <= len(shown) <= 5
    assert "line 2 is not JSON" in shown[0]


def test_empty_documents_take_no_token(tmp_path, tokenizer):
    texts = [text for pair in zip(TEXTS, [""] * len(TEXTS), strict=True) for text in pair]
    write_lines(tmp_path / "web", [*make_lines(texts), b"", b"   "])
    rows, _ = read_strictly(tmp_path / "web", tokenizer)
    tokenizer_used = make_stream({"web": tmp_path / "web"}, tokenizer).tokenizer
    assert count_pairs(rows) == expected_pairs(tokenizer_used, TEXTS)


def test_a_null_in_a_parquet_column_is_named_by_row_or_skipped(tmp_path, tokenizer):
    (tmp_path / "web").mkdir()
    path = tmp_path / "web" / "a.parquet"
    pq.write_table(pa.table({"text": [*TEXTS[:9], None, *TEXTS[9:]]}), path, row_group_size=4)
    with pytest.raises(UserError, match=r"a\.parquet, row 9 has no 'text' \(null\)"):
        read_strictly(tmp_path / "web", tokenizer)
    pairs, usage, stream = read_skipping(tmp_path / "web", tokenizer)
    assert pairs == expected_pairs(stream.tokenizer, TEXTS)
    assert usage.num_bad_documents == 1
    source = SourceOptions("web", (str(path),), on_bad_row="skip")
    rows, _ = read_strictly(tmp_path / "web", tokenizer, sources=(source,))
    assert count_pairs(rows) == pairs


def test_a_column_of_the_wrong_type_is_refused_before_training(tmp_path, tokenizer):
    (tmp_path / "web").mkdir()
    pq.write_table(pa.table({"text": [1, 2, 3]}), tmp_path / "web" / "a.parquet")
    with pytest.raises(UserError, match=r"column 'text' is int64, not text"):
        make_stream({"web": tmp_path / "web"}, tokenizer)


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_shard_is_named_or_the_rest_of_it_skipped(tmp_path, tokenizer, suffix, damage, caplog):
    """Zstandard frames here carry a checksum, as `zstd` writes them; gzip always has one."""
    texts = make_texts(30, 2)
    directory = write_files(tmp_path / "web", texts, ".jsonl", num_files=1)
    whole = (directory / "0.jsonl").read_bytes()
    (directory / "0.jsonl").unlink()
    good = write_files(tmp_path / "good", TEXTS, suffix, num_files=1) / f"0{suffix}"
    good.rename(directory / f"good{suffix}")
    write_files(tmp_path / "other", texts, suffix, num_files=1)
    path = directory / f"bad{suffix}"
    data = bytearray((tmp_path / "other" / f"0{suffix}").read_bytes())
    if suffix == ".jsonl.zst":
        data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(whole))
    if damage == "truncated":
        del data[-25:]
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"bad\.jsonl\.(zst|gz) is truncated or damaged .*; fetch it again"):
        read_strictly(directory, tokenizer)
    with caplog.at_level(logging.WARNING):
        pairs, usage, stream = read_skipping(directory, tokenizer)
    assert usage.num_damaged_spans == 1
    assert f"{path} is truncated or damaged" in caplog.text
    wanted = expected_pairs(stream.tokenizer, TEXTS)
    assert all(pairs[pair] >= count for pair, count in wanted.items())


def test_a_bit_flipped_in_a_parquet_file_is_named(tmp_path, tokenizer):
    (tmp_path / "web").mkdir()
    path = tmp_path / "web" / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS * 20}), path, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet is (truncated or )?damaged"):
        read_strictly(tmp_path / "web", tokenizer)


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("change", ["vanishes", "grows", "is rewritten"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_shard_that_changes_in_mid_run_ends_it_whatever_the_policy(tmp_path, tokenizer, policy, change, suffix):
    """Skipping it would make a run that cannot be repeated. A compressed file is open meanwhile."""
    directory = write_files(tmp_path / "web", make_texts(400, seed=1), suffix, num_files=1)
    path = directory / f"0{suffix}"
    stream = make_stream({"web": directory}, tokenizer, on_bad_document=policy, num_lanes=1)
    windows = make_windows(stream)
    windows.window(0)
    if change == "vanishes":
        path.unlink()
    elif change == "grows":
        with path.open("a") as file:
            file.write('{"text": "more"}\n')
    else:
        path.write_bytes(path.read_bytes().upper())
    words = "cannot read .* fix the cause, or remove the path" if change == "vanishes" else "has changed since"
    with pytest.raises(UserError, match=words) as error:
        read_windows(windows, 1, 8)
    assert str(path) in str(error.value)


def test_after_a_skip_a_run_resumes_with_the_same_stream_and_count(tmp_path, tokenizer):
    lines = [line for pair in zip(make_lines(), [b"bad"] * len(TEXTS), strict=True) for line in pair]
    write_lines(tmp_path / "web", lines)
    for packing in ("chunk", "best_fit"):
        stream = make_stream({"web": tmp_path / "web"}, tokenizer, packing, on_bad_document="skip", num_lanes=1)
        windows = make_windows(stream)
        straight = read_windows(windows, 0, 12)
        for number in range(1, 12):
            resumed = make_windows(stream)
            resumed.load_state(windows.state(number * GLOBAL_BATCH), number * GLOBAL_BATCH)
            rest = read_windows(resumed, number, 12 - number)
            assert [rows_of(window) for window in rest] == [rows_of(window) for window in straight[number:]]
            assert resumed.usage(12 * GLOBAL_BATCH) == windows.usage(12 * GLOBAL_BATCH)


@pytest.mark.slow
def test_a_shard_that_is_cut_short_while_it_is_read_is_named_as_changed(tmp_path, tokenizer):
    """Its damage is met in the middle of a block, at whose end the file would be looked at."""
    texts = make_texts(60_000, seed=1)
    directory = write_files(tmp_path / "web", texts, ".jsonl.gz", num_files=1)
    num_tokens = sum(len(ids) + 2 for ids in open_tokenizer(tokenizer).encode_batch(texts))
    stream = make_stream({"web": directory}, tokenizer, num_lanes=1, block_tokens=num_tokens * 6 // 10)
    reader = BlockReader(stream.parts[LaneSource(0, 0)], stream.recipe, stream.tokenizer)
    block = reader.read(Cursor())
    path = directory / "0.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"0\.jsonl\.gz has changed since it was listed"):
        reader.read(block.next)
