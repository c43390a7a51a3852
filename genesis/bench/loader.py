"""Throughput of the data loader alone: tokens per second from shards on disk into ready windows, on one core.

What is timed is everything that the training process does for its data: the order, the reads from memory-mapped
shards, `input_ids`, `labels`, `document_ids` and the counts of tokens and bytes; not the reading ahead, which would
hide it. The corpus is random, made for the run, with documents of realistic length in several shards; it stays in the
page cache.

Two rates are given: by the clock, and by the processor time used, which other programs on the machine disturb less.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from platform import machine, python_version
from typing import Final

import numpy as np
import torch
from blake3 import blake3

from genesis.arguments import Parser
from genesis.data.corpus import open_corpus
from genesis.data.loader import Ranks, SequenceFormat, TrainWindows, count_train_sequences
from genesis.data.manifest import CorpusManifest, ShardRecord, SourceRecord, write_manifest
from genesis.data.order import build_order
from genesis.data.shards import EncodedDocuments, ShardWriter
from genesis.tokenizer.train import BOS_ID, EOS_ID, MODEL_NAME

VOCAB_SIZE: Final = 49_152
FIRST_PIECE: Final = 16
MEAN_DOCUMENT_TOKENS: Final = 800
NUM_SHARDS: Final = 8
WEIGHTS: Final = {"web": 7, "code": 3}
SHAPES: Final = ((2048, 8), (256, 64))


@dataclass(frozen=True)
class Measurement:
    """What was measured for one shape: medians over the repeats, and the extremes of the rate by the clock."""

    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    tokens_per_second: int
    slowest_tokens_per_second: int
    fastest_tokens_per_second: int
    tokens_per_processor_second: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the record and writes it where `--out` says."""
    parser = Parser(prog="genesis bench loader", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of the corpus (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each shape (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a timed run (default %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the record, as benchmarks/records/loader.json")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory)
        write_random_corpus(corpus, options.tokens)
        measurements = [
            measure(corpus, seq_len, micro_batch_size, options.repeats, options.seconds)
            for seq_len, micro_batch_size in SHAPES
        ]
    record = {
        "what": "tokens per second of TrainWindows on one core, shards in the page cache, no reading ahead",
        "command": "genesis bench loader "
        f"--tokens {options.tokens} --repeats {options.repeats} --seconds {options.seconds}",
        "hardware": f"{os.cpu_count()}-core {machine()}, load average {os.getloadavg()[0]:.1f}",
        "versions": {"python": python_version()} | {name: version(name) for name in ("torch", "numpy", "grain")},
        "corpus": {"tokens": options.tokens, "mean_document_tokens": MEAN_DOCUMENT_TOKENS, "weights": WEIGHTS},
        "repeats": options.repeats,
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    text = json.dumps(record, indent=2) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    return 0


def measure(corpus_path: Path, seq_len: int, micro_batch_size: int, repeats: int, seconds: float) -> Measurement:
    """Returns the throughput of windows of two micro-batches, of one rank out of one."""
    corpus = open_corpus(corpus_path)
    counts = {source.name: count_train_sequences(source.num_tokens, seq_len) for source in corpus.train}
    piece_num_bytes = np.random.default_rng(0).integers(1, 12, VOCAB_SIZE, dtype=np.int32)
    windows = TrainWindows(
        build_order(counts, WEIGHTS, seed=0),
        corpus.train,
        SequenceFormat(seq_len, EOS_ID, piece_num_bytes, np.dtype("<u2")),
        global_batch_size=2 * micro_batch_size,
        micro_batch_size=micro_batch_size,
        ranks=Ranks(),
    )
    position = 0
    rates, processor_rates = [], []
    for repeat in range(repeats + 1):
        begin, processor_begin = time.perf_counter(), time.process_time()
        num_tokens = 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            window = windows.window(position)
            position = window.data_position
            num_tokens += sum(micro_batch.input_ids.numel() for micro_batch in window.micro_batches)
        if repeat:  # the first run opens the shards and compares their hashes
            rates.append(round(num_tokens / elapsed))
            processor_rates.append(num_tokens / (time.process_time() - processor_begin))
    return Measurement(
        seq_len,
        micro_batch_size,
        2 * micro_batch_size,
        tokens_per_second=round(statistics.median(rates)),
        slowest_tokens_per_second=min(rates),
        fastest_tokens_per_second=max(rates),
        tokens_per_processor_second=round(statistics.median(processor_rates)),
    )


def write_random_corpus(path: Path, num_tokens: int) -> None:
    """Writes a corpus of random tokens with two sources and `NUM_SHARDS` shards each."""
    rng = np.random.default_rng(0)
    model = b"not a tokenizer: nothing is decoded here"
    (path / MODEL_NAME).write_bytes(model)
    sources = []
    for name, weight in WEIGHTS.items():
        shards = []
        for number in range(NUM_SHARDS):
            relative = f"train/{name}/{number:05d}.ds"
            (path / relative).parent.mkdir(parents=True, exist_ok=True)
            shards.append(
                _write_random_shard(path / relative, relative, num_tokens // (len(WEIGHTS) * NUM_SHARDS), rng)
            )
        sources.append(
            SourceRecord(
                name,
                weight,
                num_documents=sum(shard.num_documents for shard in shards),
                num_text_bytes=sum(shard.num_text_bytes for shard in shards),
                num_tokens=sum(shard.num_tokens for shard in shards),
                shards=tuple(shards),
            )
        )
    write_manifest(
        path,
        CorpusManifest(
            name="random",
            hash_algorithm="blake3",
            tokenizer_hash=blake3(model).hexdigest(),
            vocab_size=VOCAB_SIZE,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            token_dtype="uint16",
            train=tuple(sources),
            validation=(),
        ),
    )


def _write_random_shard(path: Path, relative: str, num_tokens: int, rng: np.random.Generator) -> ShardRecord:
    lengths = 2 + rng.geometric(1 / MEAN_DOCUMENT_TOKENS, max(1, num_tokens // MEAN_DOCUMENT_TOKENS))
    ends = np.cumsum(lengths)
    tokens = rng.integers(FIRST_PIECE, VOCAB_SIZE, ends[-1], dtype=np.int32)
    tokens[ends - lengths] = BOS_ID
    tokens[ends - 1] = EOS_ID
    writer = ShardWriter(path, "uint16", "random")
    writer.append(EncodedDocuments(tokens, lengths, num_text_bytes=0))
    return writer.finish(relative)


if __name__ == "__main__":
    sys.exit(main())
