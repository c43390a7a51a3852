"""Small streams of real files in every format, and their windows, to compare with what the files hold."""

import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from genesis.data.loader import Ranks, SequenceFormat
from genesis.data.order import build_order
from genesis.data.sources import SourceOptions
from genesis.data.stream.open import Stream, open_stream
from genesis.data.stream.options import StreamOptions
from genesis.data.stream.windows import StreamWindows
from genesis.data.window import AccumulationWindow
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer

SEQ_LEN = 16
GLOBAL_BATCH = 8
FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
PACKINGS = ("chunk", "best_fit", "pad")

_WORDS = ("alpha ", "beta\n", "gamma", "  delta ", "1984 ", "é", "▁", "\t", "omega ", "self.value = ")

Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def make_texts(num_texts: int, seed: int, max_words: int = 12) -> list[str]:
    draw = random.Random(seed)
    return [
        f"{seed}/{number} " + "".join(draw.choices(_WORDS, k=draw.randrange(max_words))) for number in range(num_texts)
    ]


def make_tokenizer(directory: Path) -> Path:
    return train_tokenizer(make_texts(200, seed=0, max_words=60), TokenizerOptions(320), directory)


def write_files(directory: Path, texts: list[str], suffix: str, num_files: int = 4) -> Path:
    """Writes the texts into files of the format of `suffix`; of .txt, each its own."""
    directory.mkdir(parents=True)
    if suffix == ".txt":
        for number, text in enumerate(texts):
            (directory / f"{number:04d}.txt").write_text(text, encoding="utf-8")
        return directory
    for number in range(num_files):
        part, path = texts[number::num_files], directory / f"{number}{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.table({"text": part}), path, row_group_size=5)
            continue
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part).encode()
        path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)(lines))
    return directory


def make_stream(
    directories: dict[str, Path],
    tokenizer: Path,
    packing: str = "chunk",
    seed: int = 3,
    max_epochs: int | dict[str, int] | None = None,
    **changes: object,
) -> Stream:
    options = StreamOptions(
        sources=tuple(SourceOptions(name, (str(path),)) for name, path in directories.items()),
        block_tokens=100,
        num_workers=0,
    )
    return open_stream(
        replace(options, **changes),  # type: ignore[arg-type]
        open_tokenizer(tokenizer),
        seed=seed,
        seq_len=SEQ_LEN,
        packing=packing,  # type: ignore[arg-type]
        max_epochs=dict.fromkeys(directories, max_epochs) if isinstance(max_epochs, int) else max_epochs,
    )


def make_windows(
    stream: Stream, weights: dict[str, int] | None = None, rank: int = 0, world_size: int = 1, micro_batch_size: int = 2
) -> StreamWindows:
    order = build_order(dict.fromkeys(stream.names, 1), weights or dict.fromkeys(stream.names, 1), stream.recipe.seed)
    sequence_format = SequenceFormat.of(stream.tokenizer, SEQ_LEN)
    return StreamWindows(stream, order, sequence_format, GLOBAL_BATCH, micro_batch_size, Ranks(rank, world_size))


def read_windows(windows: StreamWindows, first: int, count: int) -> list[AccumulationWindow]:
    """Returns `count` windows from window number `first` on."""
    return [windows.window(number * GLOBAL_BATCH) for number in range(first, first + count)]


def rows_of(window: AccumulationWindow) -> list[Row]:
    return [
        (tuple(inputs.tolist()), tuple(labels.tolist()), tuple(documents.tolist()))
        for micro_batch in window.micro_batches
        for inputs, labels, documents in zip(
            micro_batch.input_ids, micro_batch.labels, micro_batch.document_ids, strict=True
        )
    ]


def read_to_the_end(windows: StreamWindows) -> tuple[list[Row], int]:
    """Returns all rows until a round of the lanes was empty, and the position then."""
    rows: list[Row] = []
    empty = position = 0
    while empty < windows.stream.num_lanes:
        window = windows.window(position)
        position = window.data_position
        empty = 0 if window.num_valid_tokens else empty + GLOBAL_BATCH
        rows.extend(rows_of(window))
    return rows, position


def count_pairs(rows: list[Row]) -> Counter[tuple[int, int]]:
    """Counts (token, label) pairs whose label is valid."""
    return Counter(
        (token, label) for inputs, labels, _ in rows for token, label in zip(inputs, labels, strict=True) if label >= 0
    )


def expected_pairs(tokenizer: Tokenizer, texts: list[str]) -> Counter[tuple[int, int]]:
    """Counts the pairs of neighbouring tokens in the documents: what one epoch has to show, the slow obvious way."""
    pairs: Counter[tuple[int, int]] = Counter()
    for text in texts:
        if text:
            tokens = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
            pairs.update(pairwise(tokens))
    return pairs


def equal_windows(one: AccumulationWindow, two: AccumulationWindow) -> bool:
    return (one.data_position, one.num_valid_tokens, one.num_bytes, rows_of(one)) == (
        two.data_position,
        two.num_valid_tokens,
        two.num_bytes,
        rows_of(two),
    )
