from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpora import measure_opening, write_sparse_corpus
from genesis.data.corpus import find_fault, open_corpus

NUM_TOKENS = 1_200_000_000


def test_a_sparse_corpus_is_a_whole_corpus_that_takes_no_room(tmp_path: Path) -> None:
    write_sparse_corpus(tmp_path / "corpus", NUM_TOKENS, 300)
    corpus = open_corpus(tmp_path / "corpus")
    (source,) = corpus.train
    assert source.num_tokens == NUM_TOKENS
    out = np.ones(100, np.uint16)
    source.read(NUM_TOKENS - 100, out)
    assert not out.any()
    assert np.concatenate(list(source.document_ends())).tolist() == [(n + 1) * 4_000_000 for n in range(300)]
    assert find_fault(corpus.path, corpus.manifest, corpus.manifest.train[0].shards[-1]) is None
    num_blocks = sum(path.stat().st_blocks for path in corpus.path.rglob("*.ds"))
    assert num_blocks * 512 < 1_000_000


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus_nor_with_what_was_read(tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    write_sparse_corpus(short, NUM_TOKENS // 60, 5)
    write_sparse_corpus(long, NUM_TOKENS, 300)
    first, second = measure_opening(short, num_windows=30), measure_opening(long, num_windows=30)
    assert (first.num_shards, second.num_shards) == (5, 300)
    assert second.num_tokens == NUM_TOKENS
    # All shards of the long corpus were mapped and hashed: 2.4 GB, none of which may stay; 16 pages around a read do.
    assert second.peak_bytes - first.peak_bytes < 100e6
