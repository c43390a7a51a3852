"""The sequences of a corpus under one packing and length, in the order of its sources, for what lies beside them."""

from typing import Any

import numpy as np

from genesis.base.errors import UserError
from genesis.data.corpus_data import CorpusData
from genesis.data.loader import Ranks, TrainWindows
from genesis.data.plans import hash_shards
from genesis.data.window import MicroBatch


def identify_sequences(data: CorpusData) -> dict[str, Any]:
    """Returns what determines the tokens of each sequence, by hashes, in plain types.

    Raises:
        UserError: The corpus has pairs of answers.
    """
    if data.pairs is not None:
        raise UserError(
            f"{data.path} has pairs of answers, and a teacher's probabilities are for text: give other data"
        )
    counts = dict(zip(data.order.names, data.order.num_sequences, strict=True))
    plans = [None for _ in counts] if data.plans is None else [plan.hash for plan in data.plans]
    sources = {
        record.name: {"shards": hash_shards(record), "plan": plan, "num_sequences": counts[record.name]}
        for record, plan in zip(data.corpus.manifest.train, plans, strict=True)
    }
    options, manifest = data.options, data.corpus.manifest
    return {
        "seq_len": options.seq_len,
        "packing": data.packing,
        "tokenizer_hash": manifest.tokenizer_hash,
        "sources": sources,
    }


def read_sequences(data: CorpusData, source: int, first: int, count: int) -> MicroBatch:
    """Returns consecutive sequences of one source as one micro-batch.

    Args:
        data: The corpus.
        source: The index of the source in the corpus's training set.
        first: The first sequence of the source.
        count: Number of sequences.
    """
    windows = TrainWindows(
        *(data.order, data.corpus.train, data.sequence_format, count, count, Ranks(), data.plans),
    )
    (micro_batch,) = windows.read(np.full(count, source), np.arange(first, first + count), 0).micro_batches
    return micro_batch
