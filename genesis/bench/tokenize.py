"""Compares the throughput of `genesis data prepare` with SentencePiece's own parallel encode on the same cores.

The time of `data prepare` covers all its work: starting the workers, reading jsonl, tokenizing, hashing, writing and
syncing shards and manifest. SentencePiece receives the same texts as a list in memory and only encodes them. The two
take turns; the record holds the median ratio of the pairs with its interval.
"""

import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import cycle
from math import comb
from pathlib import Path
from platform import machine, python_version
from typing import Any

import sentencepiece

from genesis.base.arguments import Parser, read_size
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.data.sources import SourceOptions, sample_texts
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer

_COVERAGE = 0.95


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the record and writes it to the path of `--out`; the exit status is 1 below `--at_least`."""
    parser = Parser(prog="genesis bench tokenize", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs (default %(default)s)")
    parser.add_argument(
        "--text_bytes", type=read_size, default=60_000_000, help="bytes of text to tokenize (default %(default)s)"
    )
    parser.add_argument("--vocab_size", type=int, default=49_152, help="ids of the tokenizer (default %(default)s)")
    parser.add_argument(
        "--num_workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="worker processes, and threads of SentencePiece",
    )
    parser.add_argument(
        "--at_least", type=float, default=0.9, help="smallest ratio with exit status 0 (default %(default)s)"
    )
    parser.add_argument("--hardware", default="unknown", help="description of this machine in the record")
    parser.add_argument("--out", type=Path, help="file for the record, such as benchmarks/records/tokenize.json")
    arguments = parser.parse_args(argv)

    texts = read_texts(arguments.text_bytes)
    num_bytes = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as directory:
        seconds = measure(Path(directory), texts, arguments.vocab_size, arguments.num_workers, arguments.pairs)
    speeds = {name: num_bytes / statistics.median(values) / 1e6 for name, values in seconds.items()}
    ratio = describe_ratio(seconds["encode_list"], seconds["prepare"])
    record = {
        "what": "genesis data prepare (jsonl to shards and manifest) compared with SentencePiece's parallel encode",
        "command": f"genesis bench tokenize --pairs {arguments.pairs} --text_bytes {arguments.text_bytes} "
        f"--vocab_size {arguments.vocab_size} --num_workers {arguments.num_workers}",
        "hardware": f"{arguments.hardware} ({machine()})",
        "versions": {"python": python_version()} | {name: version(name) for name in ("sentencepiece", "numpy")},
        "text": {"what": "Python's standard library", "documents": len(texts), "bytes": num_bytes},
        "median_megabytes_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "ratio_to_encode_list": ratio,
        "ratio_to_encode_numpy": describe_ratio(seconds["encode_numpy"], seconds["prepare"]),
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
    }
    text = json.dumps(record, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0 if ratio["median"] >= arguments.at_least else 1


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

    def prepare(run: int) -> None:
        sources = (SourceOptions("library", (str(source),)),)
        prepare_corpus(PrepareOptions(f"run-{run}", model, sources, out=directory, num_workers=num_workers))

    runs: dict[str, Callable[[int], object]] = {
        "prepare": prepare,
        "encode_list": lambda run: processor.encode(list(texts), num_threads=num_workers),
        "encode_numpy": lambda run: processor.encode(list(texts), num_threads=num_workers, return_type="numpy"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in range(num_pairs):
        for name in sorted(runs, reverse=bool(run % 2)):
            start = time.perf_counter()
            runs[name](run)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def describe_ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Returns the ratio of our speed to SentencePiece's: the median over pairs, and its 95% interval."""
    ratios = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    low = interval_rank(len(ratios))
    return {
        "median": round(statistics.median(ratios), 3),
        "interval": [round(ratios[low], 3), round(ratios[-1 - low], 3)],
        "pairs": len(ratios),
    }


def interval_rank(num_values: int) -> int:
    """Returns the number of values to drop at each end so that the rest still spans the median with 95% probability.

    The number of values below the median is binomial with p = 1/2. With fewer than 6 values, none can be dropped.
    """
    outside = 0.0
    for rank in range(num_values // 2):
        outside += 2 * comb(num_values, rank) / 2**num_values
        if outside > 1 - _COVERAGE:
            return max(0, rank - 1)
    return 0
