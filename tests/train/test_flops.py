"""The arithmetic of a window: attention is counted within documents."""

from dataclasses import replace

import numpy as np
import torch

from genesis.data.loader import SequenceFormat, build_window
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis.train.flops import WindowFlops
from tests.train.support import TINY


def window(lengths: list[int] | None, rows: int = 2, width: int = 16) -> AccumulationWindow:
    ids = torch.zeros(rows, width, dtype=torch.int64)
    micro_batch = MicroBatch(ids, ids, ids.to(torch.int32))
    return AccumulationWindow(
        (micro_batch,), rows * width, 0, 2, document_lengths=None if lengths is None else np.array(lengths)
    )


def test_whole_rows_cost_what_the_model_costs_at_their_length() -> None:
    whole = 32 * count_flops_per_token(TINY, 16)
    assert WindowFlops(TINY).count(window([16, 16])) == whole
    assert WindowFlops(TINY).count(window(None)) == whole


def test_short_documents_cost_less_than_their_row() -> None:
    flops = WindowFlops(TINY)
    by_documents = 2 * (4 * count_flops_per_token(TINY, 4) + 12 * count_flops_per_token(TINY, 12))
    assert flops.count(window([4, 12, 12, 4])) == by_documents < flops.count(window([16, 16]))
    attention = replace(TINY.parts.attention, sliding_window=3)
    windowed = DecoderConfig(
        vocab_size=61, dim=32, num_layers=2, max_seq_len=16, attention=attention, feed_forward=TINY.parts.feed_forward
    )
    assert WindowFlops(windowed).count(window([16, 16])) == 32 * count_flops_per_token(windowed, 16)
    assert WindowFlops(windowed).count(window([16, 16])) < flops.count(window([16, 16]))


def test_the_loader_gives_the_lengths_of_documents_and_padding() -> None:
    rows = np.ones((2, 9), np.uint16)
    ends = np.zeros((2, 8), np.bool_)
    ends[0, 2] = True
    built = build_window(
        rows, SequenceFormat(8, 0, np.ones(4, np.int64), np.dtype(np.uint16)), 1, 0, ends, np.array([8, 4], np.int64)
    )
    assert built.document_lengths is not None
    assert built.document_lengths.sum() == 16
    starts = [micro_batch.document_offsets for micro_batch in built.micro_batches]
    wanted = [int(length) for offsets in starts if offsets is not None for length in offsets.diff()]
    assert built.document_lengths.tolist() == wanted
