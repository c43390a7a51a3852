"""Measures data throughput: a prepared corpus compared with other projects' readers, a stream with SentencePiece.

    prepared    windows of a corpus on disk, on one core; takes turns with other projects' readers of the same tokens
    opening     time and memory to open a corpus of 60 billion tokens in 100,000 shards
    streaming   windows from raw text, and `data prepare` of that text, in pairs with SentencePiece's encode of it on
                the same cores; and whether memory grows with the number of streamed tokens

All ratios are of turns within a round.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks import harness
from benchmarks.corpora import measure_opening, write_random_corpus, write_sparse_corpus
from benchmarks.processes import WORKERS, WorkerProcess, parse_peers
from benchmarks.streaming import TextTask, measure_memory, measure_streaming
from benchmarks.workers.data_protocol import Reading, ReadTask
from genesis.base.arguments import read_size
from genesis.base.console import Console
from genesis.tokenizer.train import EOS_ID

SHAPES = ((2048, 8), (256, 64))
"""Pairs of sequence length in tokens and sequences per micro-batch."""

_PARTS: Final = ("prepared", "opening", "streaming")
_PEERS = ("litdata", "mosaicml_streaming")
_OURS = "genesis"
_SPARSE = ((60_000_000_000, 100_000), (6_000_000_000, 10_000))
_OPENING_GOAL_SECONDS, _OPENING_GOAL_BYTES = 2.0, 500_000_000
_GOAL_TOKENS_PER_SECOND = 20_000_000
_NUM_TRIES = 3


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to the path of `--out`."""
    options = _parse(argv)
    console = Console(stderr=True)
    parts = {"prepared": _measure_prepared, "opening": _measure_opening, "streaming": _measure_streaming}
    what = "tokens per second of data loading: prepared corpora, opening a corpus, streaming from raw text"
    record = harness.begin_record("data", what, argv, ("torch", "numpy", "sentencepiece"))
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for part in options.parts:
            console.print(f"measuring: {part}", highlight=False)
            (Path(directory) / part).mkdir()
            record[part] = parts[part](options, Path(directory) / part)
    harness.finish(record, format_record, options.out)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = harness.build_parser("data", __doc__)
    add = parser.add_argument
    add("--parts", type=harness.read_list, default=list(_PARTS), help=f"from {', '.join(_PARTS)} (default: all)")
    add("--peers", default="", help="other projects' readers: litdata=PYTHON,mosaicml_streaming=PYTHON")
    harness.add_counts(
        parser,
        tokens=(100_000_000, "tokens of the corpus"),
        pairs=(10, "number of rounds"),
        vocab_size=(49_152, "ids of the stream's tokenizer"),
        memory_tokens=(100_000_000, "tokens to stream for the memory measurement"),
        workers=(len(os.sched_getaffinity(0)), "streaming processes, and threads of SentencePiece"),
    )
    add("--seconds", type=float, default=1.0, help="seconds of a turn (default %(default)s)")
    add("--text_bytes", type=read_size, default=30_000_000, help="bytes of text to stream (default %(default)s)")
    add("--sparse_share", type=float, default=1.0, help="share of the 60 billion tokens to open (default: all)")
    add("--dir", type=Path, help="directory for temporary corpora (default: the system's)")
    options = parser.parse_args(argv)
    harness.check_choices("--parts", options.parts, _PARTS)
    harness.check_counts(options, "tokens", "pairs", "text_bytes", "memory_tokens", "workers")
    options.peers = parse_peers(options.peers, _PEERS, "_reader", own_python=False)
    return options


# ---- prepared


def _measure_prepared(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    corpus = directory / "corpus"
    tokens_path = write_random_corpus(corpus, options.tokens)
    shapes = {}
    for seq_len, micro_batch_size in SHAPES:
        versions, readings = _take_turns(options, directory, (str(tokens_path), str(corpus)), seq_len, micro_batch_size)
        rates = {name: [reading.tokens / reading.seconds for reading in of_one] for name, of_one in readings.items()}
        shapes[str(seq_len)] = {
            "micro_batch_size": micro_batch_size,
            "readers": {
                name: {
                    "versions": versions[name],
                    "tokens_per_second": round(statistics.median(rates[name])),
                    "slowest_tokens_per_second": round(min(rates[name])),
                    "fastest_tokens_per_second": round(max(rates[name])),
                    "tokens_per_processor_second": round(
                        statistics.median(reading.tokens / reading.cpu_seconds for reading in of_one)
                    ),
                    "speed_of_genesis": asdict(harness.compare_pairs(rates[_OURS], rates[name])),
                }
                for name, of_one in readings.items()
            },
        }
    return {"tokens": options.tokens, "pairs": options.pairs, "turn_seconds": options.seconds, "seq_len": shapes}


def _take_turns(
    options: argparse.Namespace, directory: Path, paths: tuple[str, str], seq_len: int, micro_batch_size: int
) -> tuple[dict[str, Any], dict[str, list[Reading]]]:
    """Returns each reader's versions, and its turns by round."""
    commands = {_OURS: (WORKERS / "corpus_reader.py", sys.executable), **options.peers}
    with ExitStack() as stack:
        readers = {}
        for name, (script, python) in commands.items():
            own = directory / f"{name}-{seq_len}"
            task = ReadTask(*paths, str(own), seq_len, micro_batch_size, EOS_ID)
            command = [python, str(script), task.to_json()]
            readers[name] = stack.enter_context(WorkerProcess(name, command, own.with_suffix(".log"), 1))
        versions = {name: reader.receive()["versions"] for name, reader in readers.items()}
        for reader in readers.values():  # the first turn reads from the disk
            reader.ask(f"go {options.seconds}")
        readings = harness.take_rounds(
            readers,
            options.pairs,
            lambda reader: Reading(**reader.ask(f"go {options.seconds}")),
            lambda reading: reading.tokens / reading.seconds,
            f"tokens/s in sequences of {seq_len}",
        )
        for reader in readers.values():
            reader.stop()
    return versions, readings


# ---- opening


def _measure_opening(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    openings = []
    for num_tokens, num_shards in _SPARSE:
        corpus = directory / str(num_shards)
        scaled_shards = max(1, round(num_shards * options.sparse_share))
        write_sparse_corpus(corpus, round(num_tokens * options.sparse_share), scaled_shards)
        tries = [measure_opening(corpus) for _ in range(_NUM_TRIES)]
        openings.append(asdict(min(tries, key=lambda one: one.first_window_seconds)))
    return {"openings": openings, "best_of": _NUM_TRIES}


# ---- streaming


def _measure_streaming(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    text = TextTask(directory, options.text_bytes, options.vocab_size, options.workers)
    return {**measure_streaming(text, options.pairs), "memory": measure_memory(text, options.memory_tokens)}


# ---- the page


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    pages: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
        "prepared": _describe_prepared,
        "opening": _describe_opening,
        "streaming": _describe_streaming,
    }
    body = [
        line for part in pages if part in record for line in (f"## {part.capitalize()}", "", *pages[part](record[part]))
    ]
    return harness.format_page("The data", record, [], body)


def _describe_prepared(part: Mapping[str, Any]) -> list[str]:
    rows = []
    for seq_len, shape in part["seq_len"].items():
        for name, reader in shape["readers"].items():
            rate, slowest, fastest, by_cpu = (
                f"{reader[f'{key}tokens_per_{unit}second'] / 1e6:.1f}"
                for key, unit in (("", ""), ("slowest_", ""), ("fastest_", ""), ("", "processor_"))
            )
            versions = harness.format_versions(reader["versions"])
            ratio = harness.format_ratio(reader["speed_of_genesis"], 1)
            rows.append([seq_len, f"{name} ({versions})", f"{rate} ({slowest} to {fastest})", by_cpu, ratio])
    columns = ("sequence length", "reader", "M tokens/s (slowest to fastest)", "M tokens per CPU second")
    return [
        f"{part['tokens']:,} random tokens into inputs, labels and document ids, on one core and in one thread, "
        f"{part['pairs']} rounds of {part['turn_seconds']} s each in rotating order; ratios are medians of pairs in a "
        f"round. Goal: {_GOAL_TOKENS_PER_SECOND / 1e6:.0f} M tokens/s, and twice the speed of the other readers.",
        "",
        *harness.format_table((*columns, "speed of genesis / reader (95%)"), rows),
    ]


def _describe_opening(part: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            f"{one['num_tokens']:,}",
            f"{one['num_shards']:,}",
            f"{one['open_seconds']:.2f}",
            f"{one['first_window_seconds']:.2f}",
            f"{one['first_window_peak_bytes'] / 1e6:.0f}",
            f"{one['start_bytes'] / 1e6:.0f}",
        ]
        for one in part["openings"]
    ]
    columns = ("tokens", "shards", "open s", "first window s", "peak MB", "MB before opening (Python, torch)")
    return [
        f"Sparse files; the fastest of {part['best_of']} tries, each in its own process. Goal: "
        f"first window within {_OPENING_GOAL_SECONDS:.0f} s and {_OPENING_GOAL_BYTES / 1e6:.0f} MB.",
        "",
        *harness.format_table(columns, rows),
    ]


def _describe_streaming(part: Mapping[str, Any]) -> list[str]:
    rates, resident, ratio = part["tokens_per_second"], part["memory"]["resident_bytes"], part["speed_over_encode"]
    return [
        f"{part['text_bytes']:,} bytes of {part['text']}, jsonl.zst, {part['workers']} workers, from start to last "
        f"window, compared with SentencePiece's encode of the same texts in memory by {part['workers']} threads:",
        "",
        f"- genesis {rates['genesis'] / 1e6:.2f} M tokens/s, SentencePiece {rates['encode'] / 1e6:.2f}; ratio "
        f"{harness.format_ratio(ratio)} of {ratio['num_pairs']} pairs. Goal: 0.8",
        f"- data prepare {rates['prepare'] / 1e6:.2f} M tokens/s, from jsonl.zst to manifest; ratio "
        f"{harness.format_ratio(part['speed_of_prepare_over_encode'])}. Goal: 0.9",
        f"- resident memory of all processes together while {part['memory']['tokens']:,} tokens are streamed: after a "
        f"tenth {resident[0] / 1e6:.0f} MB, at the end {resident[-1] / 1e6:.0f}, at most {max(resident) / 1e6:.0f}",
    ]
