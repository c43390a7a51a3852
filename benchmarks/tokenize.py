"""Compares the throughput of `genesis data prepare` with SentencePiece's own parallel encode on the same cores.

The time of `data prepare` covers all its work: starting the workers, reading jsonl, tokenizing, hashing, writing and
syncing shards and manifest. SentencePiece receives the same texts as a list in memory and only encodes them. The two
take turns; the record holds the median ratio of the pairs with its interval.
"""

import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any

import sentencepiece

from benchmarks import harness
from genesis.arguments import read_size
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions, sample_texts
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to `--out`; the exit status is 1 below `--at_least`."""
    parser = harness.build_parser("tokenize", __doc__)
    harness.add_counts(
        parser,
        pairs=(10, "rounds of runs"),
        vocab_size=(49_152, "ids of the tokenizer"),
        num_workers=(len(os.sched_getaffinity(0)), "worker processes, and threads of SentencePiece"),
    )
    add = parser.add_argument
    add("--text_bytes", type=read_size, default=60_000_000, help="bytes of text to tokenize (default %(default)s)")
    add("--at_least", type=float, default=0.9, help="smallest ratio with exit status 0 (default %(default)s)")
    options = parser.parse_args(argv)
    harness.check_counts(options, "pairs", "vocab_size", "num_workers", "text_bytes")
    texts = read_texts(options.text_bytes)
    num_bytes = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as directory:
        seconds = measure(Path(directory), texts, options.vocab_size, options.num_workers, options.pairs)
    what = "genesis data prepare (jsonl to shards and manifest) compared with SentencePiece's parallel encode"
    record = harness.begin_record("tokenize", what, argv, ("sentencepiece", "numpy"))
    record |= {
        "text": {"what": "Python's standard library", "documents": len(texts), "bytes": num_bytes},
        "median_megabytes_per_second": {name: round(num_bytes / median(of) / 1e6, 2) for name, of in seconds.items()},
        "ratios": {name: asdict(harness.compare_pairs(of, seconds["prepare"])) for name, of in seconds.items()},
        "seconds": {name: [round(value, 3) for value in of_one] for name, of_one in seconds.items()},
    }
    harness.finish(record, format_record, options.out)
    return 0 if record["ratios"]["encode_list"]["median"] >= options.at_least else 1


def format_record(record: Mapping[str, Any]) -> str:
    """Returns the record as a page of Markdown."""
    text = record["text"]
    notes = [f"text: {text['what']}, {text['documents']:,} documents, {text['bytes']:,} bytes"]
    rows = [
        [name, f"{speed:.2f}", harness.format_ratio(record["ratios"][name])]
        for name, speed in record["median_megabytes_per_second"].items()
    ]
    body = harness.format_table(("work", "MB/s (median)", "speed of prepare / work (95%)"), rows)
    return harness.format_page("Tokenizing a corpus", record, notes, body)


def read_texts(num_bytes: int) -> list[str]:
    """Returns the source files of Python's standard library, repeated until they have `num_bytes`."""
    library = SourceOptions("library", (sysconfig.get_path("stdlib"),), suffixes=(".py",), on_undecodable="replace")
    texts: list[str] = []
    for text in cycle(list(sample_texts([library], num_bytes))):
        texts.append(text)
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            break
    return texts


def measure(
    directory: Path, texts: Sequence[str], vocab_size: int, num_workers: int, num_pairs: int
) -> dict[str, list[float]]:
    """Returns the seconds of each run of `prepare`, and of SentencePiece's encode to lists and to numpy arrays."""
    model = train_tokenizer(texts, TokenizerOptions(vocab_size), directory)
    source = directory / "text.jsonl"
    with source.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    runs = count()

    def prepare() -> object:
        sources = (SourceOptions("library", (str(source),)),)
        name = f"run-{next(runs)}"
        return prepare_corpus(PrepareOptions(name, model, sources, out=directory, num_workers=num_workers))

    def encode(**options: Any) -> Callable[[], object]:
        return lambda: processor.encode(list(texts), num_threads=num_workers, **options)

    def time_work(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    work = {"prepare": prepare, "encode_list": encode(), "encode_numpy": encode(return_type="numpy")}
    return harness.take_rounds(work, num_pairs, time_work, float, "s")
