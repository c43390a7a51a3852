"""Our reader of the benchmark `data`: builds windows from a prepared corpus, in one thread.

The measured time covers all work of the training process for its data: the order, the reads from memory-mapped shards,
`input_ids`, `labels`, `document_ids` and the counts of tokens and bytes. Windows are not read ahead, because
prefetching would hide the cost.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.workers.data_protocol import ReadTask, serve, task_from_json
from genesis.data.corpus import open_corpus
from genesis.data.loader import Ranks, SequenceFormat, TrainWindows
from genesis.data.order import build_order
from genesis.data.packing import count_train_sequences
from genesis.data.shards import little_endian


def read_windows(task: ReadTask) -> Iterator[int]:
    """Yields the number of tokens of each window, without end."""
    corpus = open_corpus(Path(task.corpus_path))
    manifest = corpus.manifest
    counts = {source.name: count_train_sequences(source.num_tokens, task.seq_len) for source in corpus.train}
    token_num_bytes = np.random.default_rng(0).integers(1, 12, manifest.vocab_size, dtype=np.int32)
    windows = TrainWindows(
        build_order(counts, {source.name: source.weight for source in corpus.train}, seed=0),
        corpus.train,
        SequenceFormat(task.seq_len, manifest.padding_id, token_num_bytes, little_endian(manifest.token_dtype)),
        global_batch_size=2 * task.micro_batch_size,
        micro_batch_size=task.micro_batch_size,
        ranks=Ranks(),
    )
    position = 0
    while True:
        window = windows.window(position)
        position = window.data_position
        yield sum(micro_batch.input_ids.numel() for micro_batch in window.micro_batches)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(read_windows(task_from_json(sys.argv[1])), ("torch", "numpy"))
