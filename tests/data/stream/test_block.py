"""Blocks are functions of their cursors, and hold every token once."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.data.stream.block import Block, BlockReader, Cursor
from genesis.data.stream.worker import LaneSource
from tests.data.stream.streams import (
    FORMATS,
    PACKINGS,
    SEQ_LEN,
    Row,
    count_pairs,
    expected_pairs,
    make_stream,
    make_texts,
    write_files,
)


def make_reader(stream, lane=0):
    return BlockReader(stream.parts[LaneSource(lane, 0)], stream.recipe, stream.tokenizer)


def read_all(stream, *, is_fresh):
    """Returns all blocks of lane 0, by one reader or each by a new one."""
    blocks: list[Block] = []
    reader, cursor = make_reader(stream), Cursor()
    while cursor is not None:
        assert len(blocks) < 2_000, "it does not end"
        reader = make_reader(stream) if is_fresh else reader
        blocks.append(reader.read(cursor))
        cursor = blocks[-1].next
    return blocks


def equal_blocks(one, two):
    return (
        np.array_equal(one.rows, two.rows)
        and np.array_equal(one.ends, two.ends)
        and np.array_equal(one.lengths, two.lengths)
        and replace(one, rows=None, ends=None, lengths=None) == replace(two, rows=None, ends=None, lengths=None)
    )


def rows_with_labels(blocks, eos_id) -> list[Row]:
    """Returns the rows as a model sees them, the slow obvious way."""
    rows = []
    for block in blocks:
        for row, length in zip(block.rows.tolist(), block.lengths.tolist(), strict=True):
            labels = [row[at + 1] if at < length and row[at] != eos_id else -100 for at in range(SEQ_LEN)]
            rows.append((tuple(row[:-1]), tuple(labels), ()))
    return rows


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_block_is_the_same_whatever_was_read_before(tmp_path, tokenizer, packing, suffix):
    files = write_files(tmp_path / "web", make_texts(40, 1), suffix, num_files=2)
    for max_epochs in (1, 3):
        stream = make_stream({"web": files}, tokenizer, packing, num_lanes=1, max_epochs=max_epochs)
        straight, fresh = read_all(stream, is_fresh=False), read_all(stream, is_fresh=True)
        assert len(straight) > 5
        assert len(straight) == len(fresh)
        assert all(map(equal_blocks, straight, fresh))


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.one_of(st.integers(0, 30), st.integers(0, 400)), min_size=1, max_size=25),
    block_tokens=st.integers(SEQ_LEN + 1, 150),
    packing=st.sampled_from(PACKINGS),
    max_epochs=st.integers(1, 2),
)
def test_every_token_is_in_one_block_once_whatever_the_lengths(
    tmp_path_factory, tokenizer, lengths, block_tokens, packing, max_epochs
):
    directory = tmp_path_factory.mktemp("lengths")
    texts = [f"{number}:" + "q" * length if length else "" for number, length in enumerate(lengths)]
    (directory / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream = make_stream(
        {"web": directory}, tokenizer, packing, num_lanes=1, block_tokens=block_tokens, max_epochs=max_epochs
    )
    blocks = read_all(stream, is_fresh=False)
    wanted = expected_pairs(stream.tokenizer, texts)
    found = count_pairs(rows_with_labels(blocks, stream.tokenizer.eos_id))
    assert found == {pair: count * max_epochs for pair, count in wanted.items()}
    documents = [text for text in texts if text]
    assert sum(block.num_documents for block in blocks) == max_epochs * len(documents)
    num_tokens = sum(len(stream.tokenizer.encode(text)) + 2 for text in documents)
    assert sum(block.num_tokens for block in blocks) == max_epochs * num_tokens
    assert all(map(equal_blocks, blocks, read_all(stream, is_fresh=True)))


def test_epochs_and_lanes_are_shuffled_each_in_its_own_way(tmp_path, tokenizer):
    files = write_files(tmp_path / "web", make_texts(60, 1), ".txt")
    stream = make_stream({"web": files}, tokenizer, "pad", num_lanes=2, block_tokens=60, max_epochs=2)
    blocks = read_all(stream, is_fresh=False)
    rows = [tuple(row) for block in blocks for row in block.rows.tolist()]
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_sequences_of_each_block_are_shuffled_in_their_own_way(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n:04d}"}) + "\n" for n in range(100)))
    stream = make_stream({"web": tmp_path}, tokenizer, "pad", num_lanes=1, max_epochs=1)
    orders = []
    for block in read_all(stream, is_fresh=False)[:2]:
        numbers = [int(stream.tokenizer.decode(row.tolist())) for row in block.rows]
        orders.append([number - min(numbers) for number in numbers])
    assert len(orders[0]) == len(orders[1]) > 10
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(len(orders[0])))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) not in orders


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_document_much_longer_than_a_block_is_cut_over_many(tmp_path, tokenizer, packing):
    long = "".join(make_texts(3_000, seed=7, max_words=40)).replace("▁", " ")
    texts = ["short", long, "short too"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream = make_stream({"web": tmp_path}, tokenizer, packing, num_lanes=1, block_tokens=10_000, max_epochs=1)
    blocks = read_all(stream, is_fresh=False)
    assert len(blocks) > 10
    assert max(len(block.rows) for block in blocks) <= 10_000 // SEQ_LEN + 2
    assert count_pairs(rows_with_labels(blocks, stream.tokenizer.eos_id)) == expected_pairs(stream.tokenizer, texts)
    assert sum(block.num_documents for block in blocks) == 3
    middle = blocks[5].next
    assert middle.used > 0
    assert equal_blocks(make_reader(stream).read(middle), blocks[6])


def test_a_lane_without_a_document_ends_though_it_may_read_for_ever(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    stream = make_stream({"web": tmp_path}, tokenizer, num_lanes=1)
    (block,) = read_all(stream, is_fresh=False)
    assert (len(block.rows), block.num_documents, block.next) == (0, 0, None)
