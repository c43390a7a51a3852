"""Sequences as the loader packs them, through every way to attend: no document sees another of its row."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch

from genesis.data.loader import SequenceFormat, build_window
from genesis.data.packing import fill_row, mark_piece_ends, pack_documents
from genesis.model import attention as attention_module
from genesis.model.attend import flash
from genesis.model.decoder import Decoder, DecoderConfig
from tests.linear_faults import DOCUMENT_FAULTS
from tests.mixtures import LINEAR, build_sharp, mix

BOS, EOS, FIRST_PIECE, VOCAB_SIZE, SEQ_LEN = 0, 1, 2, 97, 64
CONFIG = DecoderConfig(
    vocab_size=VOCAB_SIZE, dim=48, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=64, max_seq_len=SEQ_LEN
)
LENGTHS = (150, 40, 23, 64, 12, 2, 9, 33, 5, 30, 65, 17)
LINEAR_ROUNDING = 1e-4
"""A chunk sums the decays of all its tokens, so that other documents change the rounding of a linear layer."""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="a path of CUDA")


@pytest.fixture(
    params=[
        "document by document",
        "mask",
        "document by document, autocast",
        "mask, autocast",
        pytest.param("compiled", marks=pytest.mark.slow),
        pytest.param("kernel, cuda", marks=needs_cuda),
        pytest.param("mask, cuda", marks=needs_cuda),
    ]
)
def logits_of(request, monkeypatch):
    """Gives a function from a micro-batch to logits that goes one way, and says which way it went."""
    path = request.param
    monkeypatch.setattr(flash, "MIN_MEAN_DOCUMENT_TOKENS", 10_000 if "mask" in path else 1)
    device = "cuda" if "cuda" in path else "cpu"
    decoder = Decoder(CONFIG)
    decoder.init_weights(0)
    decoder.to(device, torch.bfloat16 if path == "kernel, cuda" else torch.float32)
    if path == "compiled":
        torch.compiler.reset()
        for block in decoder.blocks:
            block.forward = torch.compile(block.forward, backend="eager")
    ways = set()
    attend = attention_module.attend

    def watch(query, key, value, layout, sinks):
        ways.add("mask" if layout.mask is not None else "offsets" if layout.offsets is not None else "rows")
        return attend(query, key, value, layout, sinks)

    if path != "compiled":
        monkeypatch.setattr(attention_module, "attend", watch)

    def run(input_ids, document_ids):
        context = torch.autocast("cpu", torch.bfloat16) if "autocast" in path else nullcontext()
        with torch.no_grad(), context:
            logits = decoder(input_ids.to(device), document_ids=document_ids.to(device)).cpu()
        assert path == "compiled" or ways == {"mask" if "mask" in path else "offsets"}
        return logits

    return run


def packed_rows(stream, packing):
    """Returns rows, the ends of documents within them, and their numbers of labels, as `TrainWindows` fills them."""
    packed = pack_documents(np.cumsum(LENGTHS), SEQ_LEN, packing)
    rows, labels = np.empty((len(packed), SEQ_LEN + 1), np.int64), np.empty(len(packed), np.int64)
    inner_ends = np.zeros((len(packed), SEQ_LEN), np.bool_)

    def read(start, out):
        out[:] = stream[start : start + len(out)]

    ends = [0, *packed.sequence_ends.tolist()]
    for row, (first, last) in enumerate(pairwise(ends)):
        starts, sizes = packed.starts[first:last], packed.lengths[first:last]
        is_continued = bool(sizes[-1] == SEQ_LEN and stream[starts[-1] + SEQ_LEN - 1] != EOS)
        labels[row] = fill_row(rows[row], starts, sizes, read, EOS, is_continued=is_continued)
        mark_piece_ends(inner_ends[row], sizes)
    return rows, inner_ends, labels


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_another_document_in_its_place_changes_no_logit_of_the_others(logits_of, packing):
    leaks, changes = replace_each_document(logits_of, packing)
    assert max(leaks) == 0.0
    assert min(changes) > 0.0


def run_linear(name):
    decoder = build_sharp(mix(CONFIG, name))

    def run(input_ids, document_ids):
        with torch.no_grad():
            return decoder(input_ids, document_ids=document_ids)

    return run


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("name", LINEAR)
def test_no_document_reaches_another_by_the_state_or_the_convolution_of_linear_layers(name, packing):
    leaks, changes = replace_each_document(run_linear(name), packing)
    assert max(leaks) < LINEAR_ROUNDING
    assert min(changes) > 1000 * LINEAR_ROUNDING


@pytest.mark.parametrize("fault", DOCUMENT_FAULTS)
@pytest.mark.parametrize("name", LINEAR)
def test_a_leak_through_a_linear_layer_would_be_seen(name, fault, monkeypatch):
    DOCUMENT_FAULTS[fault](monkeypatch)
    leaks, _ = replace_each_document(run_linear(name), "best_fit")
    assert max(leaks) > 1000 * LINEAR_ROUNDING


def replace_each_document(logits_of, packing):
    """Returns how much other tokens in the place of each document change logits elsewhere, and how much its own."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(LENGTHS)
    stream = rng.integers(FIRST_PIECE, VOCAB_SIZE, ends[-1])
    stream[ends - LENGTHS], stream[ends - 1] = BOS, EOS
    sequence_format = SequenceFormat(SEQ_LEN, EOS, np.ones(VOCAB_SIZE, np.int32), np.dtype(np.int64))

    def batch_of(stream):
        rows, inner_ends, labels = packed_rows(stream, packing)
        (batch,) = build_window(rows, sequence_format, len(rows), 0, inner_ends, labels).micro_batches
        return batch

    plain, leaks, changes = batch_of(stream), [], []
    before = logits_of(plain.input_ids, plain.document_ids)
    for end, length in zip(ends, LENGTHS, strict=True):
        pieces = slice(end - length + 1, end - 1)
        other = stream.copy()
        other[pieces] = FIRST_PIECE + (stream[pieces] - FIRST_PIECE + 1) % (VOCAB_SIZE - FIRST_PIECE)
        changed = batch_of(other)
        assert torch.equal(changed.document_ids, plain.document_ids)
        is_own = torch.zeros_like(plain.input_ids, dtype=torch.bool)
        for row, number in {
            (row, int(plain.document_ids[row, column]))
            for row, column in (changed.input_ids != plain.input_ids).nonzero().tolist()
        }:
            is_own[row] |= plain.document_ids[row] == number
        after = logits_of(changed.input_ids, changed.document_ids)
        difference = (after - before).abs()
        leaks.append(float(difference[~is_own].max()))
        if length > 2:  # bos and eos alone stay as they are
            changes.append(float(difference[is_own].max()))
    return leaks, changes
