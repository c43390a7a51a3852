"""Measures data throughput: a prepared corpus compared with other projects' readers, a stream with SentencePiece.

    prepared    windows of a corpus on disk, on one core; takes turns with other projects' readers of the same tokens
    opening     time and memory to open a corpus of 60 billion tokens in 100,000 shards
    streaming   windows from raw text, in pairs with SentencePiece's own encode of that text on the same cores; and
                whether memory grows with the number of streamed tokens

Absolute figures of two runs are never compared; all ratios are of turns within a round (`genesis.bench.pairs`).
"""

import argparse
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from genesis.base.arguments import Parser, read_size
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.bench.contenders import WorkerProcess
from genesis.bench.corpora import measure_opening, write_sparse_corpus
from genesis.bench.pairs import compare_pairs, rotate_order
from genesis.bench.random_corpus import write_random_corpus
from genesis.bench.record import anonymise, describe_hardware, write_record
from genesis.bench.streaming import TextTask, measure_memory, measure_streaming
from genesis.bench.workers.data_protocol import Reading, ReadTask
from genesis.tokenizer.train import EOS_ID

SHAPES = ((2048, 8), (256, 64))
"""Pairs of sequence length in tokens and sequences per micro-batch."""

_ROOT = Path(__file__).resolve().parents[2]
_PEERS = ("litdata", "mosaicml_streaming")
_OURS = "genesis"
_SPARSE = ((60_000_000_000, 100_000), (6_000_000_000, 10_000))
_OPENING_GOAL_SECONDS, _OPENING_GOAL_BYTES = 2.0, 500_000_000
_GOAL_TOKENS_PER_SECOND = 20_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the record, and writes the record and a page of Markdown to the path of `--out`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse(arguments)
    console = Console(stderr=True)
    parts: dict[str, Callable[[argparse.Namespace, Path, Console], Any]] = {
        "prepared": _measure_prepared,
        "opening": _measure_opening,
        "streaming": _measure_streaming,
    }
    record: dict[str, Any] = {
        "what": "tokens per second of data loading: prepared corpora, opening a corpus, streaming from raw text",
        "command": f"genesis bench data {shlex.join(anonymise(arguments))}".rstrip(),
        "date": date.today().isoformat(),
        "hardware": describe_hardware("cpu"),
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for part in options.parts:
            console.print(f"measuring: {part}", highlight=False)
            (Path(directory) / part).mkdir()
            record[part] = parts[part](options, Path(directory) / part, console)
    record["load_average_after"] = round(os.getloadavg()[0], 1)
    page = format_page(record)
    sys.stdout.write(page)
    if options.out is not None:
        write_record(record, page, options.out)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="genesis bench data", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=["prepared", "opening", "streaming"],
        help="parts to measure, from prepared, opening, streaming (default: all)",
    )
    parser.add_argument(
        "--peers", default="", help="other projects' readers to compare: litdata=PYTHON,mosaicml_streaming=PYTHON"
    )
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of the corpus (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=10, help="number of rounds (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a turn (default %(default)s)")
    parser.add_argument(
        "--text_bytes", type=read_size, default=30_000_000, help="bytes of text to stream (default %(default)s)"
    )
    parser.add_argument(
        "--vocab_size", type=int, default=49_152, help="ids of the stream's tokenizer (default %(default)s)"
    )
    parser.add_argument(
        "--memory_tokens",
        type=int,
        default=100_000_000,
        help="tokens to stream for the memory measurement (default %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="streaming processes, and threads of SentencePiece",
    )
    parser.add_argument(
        "--sparse_share", type=float, default=1.0, help="share of the 60 billion tokens to open (default: all)"
    )
    parser.add_argument("--dir", type=Path, help="directory for temporary corpora (default: the system's)")
    parser.add_argument(
        "--out", type=Path, help="file for the record, such as benchmarks/records/data.json; also writes an .md page"
    )
    options = parser.parse_args(argv)
    for part in options.parts:
        if part not in ("prepared", "opening", "streaming"):
            raise UserError(f"--parts has {part!r}; there are prepared, opening, streaming")
    for name in ("tokens", "pairs", "text_bytes", "memory_tokens", "workers"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be at least 1")
    options.peers = _parse_peers(options.peers)
    return options


def _parse_peers(text: str) -> dict[str, str]:
    peers = {}
    for peer in filter(None, text.split(",")):
        name, _, python = peer.partition("=")
        if name not in _PEERS:
            raise UserError(f"--peers has {name!r}; there are {', '.join(_PEERS)}")
        if not Path(python).is_file():
            raise UserError(f"--peers has {peer!r}; give {name}=PYTHON, the python of its environment")
        if not _peer_script(name).is_file():
            raise UserError(
                f"--peers has {name!r}, but there is no {_peer_script(name)}; run this in a clone of the repository"
            )
        peers[name] = python
    return peers


def _peer_script(name: str) -> Path:
    return _ROOT / "benchmarks" / "peers" / f"{name}_reader.py"


# ---- prepared


def _measure_prepared(options: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    corpus = directory / "corpus"
    tokens_path = write_random_corpus(corpus, options.tokens)
    shapes = {}
    for seq_len, micro_batch_size in SHAPES:
        versions, readings = _take_turns(options, directory, corpus, tokens_path, seq_len, micro_batch_size)
        rates = {name: [reading.tokens / reading.seconds for reading in of_one] for name, of_one in readings.items()}
        medians = {name: round(statistics.median(of_one)) for name, of_one in rates.items()}
        console.print(f"sequences of {seq_len}, tokens/s: {medians}", highlight=False)
        shapes[str(seq_len)] = {
            "micro_batch_size": micro_batch_size,
            "readers": {
                name: {
                    "versions": versions[name],
                    "tokens_per_second": medians[name],
                    "slowest_tokens_per_second": round(min(rates[name])),
                    "fastest_tokens_per_second": round(max(rates[name])),
                    "tokens_per_processor_second": round(
                        statistics.median(reading.tokens / reading.cpu_seconds for reading in of_one)
                    ),
                    "speed_of_genesis": asdict(compare_pairs(rates[_OURS], rates[name])),
                }
                for name, of_one in readings.items()
            },
        }
    return {"tokens": options.tokens, "pairs": options.pairs, "turn_seconds": options.seconds, "seq_len": shapes}


def _take_turns(
    options: argparse.Namespace,
    directory: Path,
    corpus: Path,
    tokens_path: Path,
    seq_len: int,
    micro_batch_size: int,
) -> tuple[dict[str, Any], dict[str, list[Reading]]]:
    """Returns each reader's versions, and its turns by round."""
    commands = {_OURS: [sys.executable, "-m", "genesis.bench.workers.corpus_reader"]}
    commands |= {name: [python, str(_peer_script(name))] for name, python in options.peers.items()}
    versions, readings = {}, {name: list[Reading]() for name in commands}
    with ExitStack() as stack:
        readers = []
        for name, command in commands.items():
            own = directory / f"{name}-{seq_len}"
            task = ReadTask(str(tokens_path), str(corpus), str(own), seq_len, micro_batch_size, EOS_ID)
            reader = WorkerProcess(name, [*command, task.to_json()], directory / f"{name}-{seq_len}.log", 1)
            readers.append(stack.enter_context(reader))
            versions[name] = reader.receive()["versions"]
        for round_index in range(options.pairs + 1):
            for reader in rotate_order(readers, round_index):
                reader.send(f"go {options.seconds}")
                reading = Reading(**reader.receive())
                if round_index:  # the first round reads from the disk
                    readings[reader.name].append(reading)
        for reader in readers:
            reader.send("quit")
            reader.wait()
    return versions, readings


# ---- opening


def _measure_opening(options: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    openings = []
    for num_tokens, num_shards in _SPARSE:
        corpus = directory / str(num_shards)
        scaled_shards = max(1, round(num_shards * options.sparse_share))
        write_sparse_corpus(corpus, round(num_tokens * options.sparse_share), scaled_shards)
        opening = min((measure_opening(corpus) for _ in range(3)), key=lambda one: one.first_window_seconds)
        console.print(
            f"{opening.num_tokens:,} tokens in {opening.num_shards:,} shards: first window after "
            f"{opening.first_window_seconds:.2f} s, {opening.first_window_peak_bytes / 1e6:.0f} MB",
            highlight=False,
        )
        openings.append(asdict(opening))
    return {"openings": openings, "best_of": 3}


# ---- streaming


def _measure_streaming(options: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    text = TextTask(directory, options.text_bytes, options.vocab_size, options.workers)
    measured = measure_streaming(text, options.pairs, console)
    measured["memory"] = measure_memory(text, options.memory_tokens)
    return measured


# ---- the page


def format_page(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    lines = [
        "# The data",
        "",
        f"- command: `{record['command']}`",
        f"- date: {record['date']}",
        f"- hardware: {record['hardware']}; load average at the end {record['load_average_after']}, its own included",
        "",
    ]
    for part, describe in (
        ("prepared", _describe_prepared),
        ("opening", _describe_opening),
        ("streaming", _describe_streaming),
    ):
        if part in record:
            lines += [*describe(record[part]), ""]
    return "\n".join(lines)


def _describe_prepared(part: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Prepared",
        "",
        f"{part['tokens']:,} random tokens into inputs, labels and document ids, on one core and in one thread, "
        f"{part['pairs']} rounds of {part['turn_seconds']} s each in rotating order; ratios are medians of pairs in a "
        f"round. Goal: {_GOAL_TOKENS_PER_SECOND / 1e6:.0f} M tokens/s, and twice the speed of the other readers.",
        "",
        "| sequence length | reader | M tokens/s (slowest to fastest) | M tokens per CPU second "
        "| speed of genesis / reader (95%) |",
        "|---|---|---|---|---|",
    ]
    for seq_len, shape in part["seq_len"].items():
        for name, reader in shape["readers"].items():
            rate, slowest, fastest = (
                reader[key] / 1e6
                for key in ("tokens_per_second", "slowest_tokens_per_second", "fastest_tokens_per_second")
            )
            ratio = reader["speed_of_genesis"]
            interval = "" if ratio["low"] is None else f" ({ratio['low']:.1f} to {ratio['high']:.1f})"
            versions = ", ".join(f"{package} {number}" for package, number in reader["versions"].items())
            lines.append(
                f"| {seq_len} | {name} ({versions}) | {rate:.1f} ({slowest:.1f} to {fastest:.1f}) | "
                f"{reader['tokens_per_processor_second'] / 1e6:.1f} | {ratio['median']:.1f}{interval} |"
            )
    return lines


def _describe_opening(part: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Opening",
        "",
        f"Sparse files; the fastest of {part['best_of']} tries, each in its own process. Goal: "
        f"first window within {_OPENING_GOAL_SECONDS:.0f} s and {_OPENING_GOAL_BYTES / 1e6:.0f} MB.",
        "",
        "| tokens | shards | open s | first window s | peak MB | MB before opening (Python, torch) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['num_tokens']:,} | {one['num_shards']:,} | {one['open_seconds']:.2f} | "
        f"{one['first_window_seconds']:.2f} | {one['first_window_peak_bytes'] / 1e6:.0f} | "
        f"{one['start_bytes'] / 1e6:.0f} |"
        for one in part["openings"]
    ]
    return lines


def _describe_streaming(part: Mapping[str, Any]) -> list[str]:
    ratio, memory = part["speed_over_encode"], part["memory"]
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
    return [
        "## Streaming",
        "",
        f"{part['text_bytes']:,} bytes of {part['text']}, jsonl.zst, {part['workers']} workers, from start to last "
        f"window, compared with SentencePiece's encode of the same texts in memory by {part['workers']} threads:",
        "",
        f"- genesis {part['tokens_per_second']['genesis'] / 1e6:.2f} M tokens/s, SentencePiece "
        f"{part['tokens_per_second']['encode'] / 1e6:.2f}; ratio {ratio['median']:.3f}{interval} of "
        f"{ratio['num_pairs']} pairs. Goal: 0.8",
        f"- resident memory of all processes together while {memory['tokens']:,} tokens are streamed: after a tenth "
        f"{memory['resident_bytes'][0] / 1e6:.0f} MB, at the end "
        f"{memory['resident_bytes'][-1] / 1e6:.0f}, at most {max(memory['resident_bytes']) / 1e6:.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
