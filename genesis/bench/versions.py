"""Compares two versions of Genesis in one run: the training step, reading prepared data, saves, and generation.

Both versions run the same workers, each from its own checkout, under this interpreter. The versions take turns in an
alternating order, and every comparison is a ratio within a round (`genesis.bench.pairs`). A ratio divides the time of
this version by the time of the earlier version: above 1, this version is slower.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.bench.checkpoint import MODELS as CHECKPOINT_MODELS
from genesis.bench.checkpoint import Team
from genesis.bench.checkpoint_modes import MODES, OVERLAPPED
from genesis.bench.contenders import OWN, Worker, WorkerProcess
from genesis.bench.data import SHAPES
from genesis.bench.pairs import compare_pairs, rotate_order
from genesis.bench.random_corpus import write_random_corpus
from genesis.bench.record import anonymise, describe_hardware, write_record
from genesis.bench.step import MODELS as STEP_MODELS
from genesis.bench.step import plan_workload
from genesis.bench.workers.checkpoint_protocol import Task
from genesis.bench.workers.data_protocol import ReadTask
from genesis.tokenizer.train import EOS_ID

NOW, BEFORE = "now", "before"
GOAL_RATIO = 1.02
"""The 95% interval of the median ratio includes this value or lies below it."""

_ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("step", "data", "checkpoint", "generate")
_READER = "genesis.bench.workers.corpus_reader"
_GENERATOR = Path(__file__).resolve().parent / "workers" / "generator.py"
"""Of this version for both, under the imports of each: the version before may have none."""
_GENERATED = {
    f"{name}, {num_rows} {'text' if num_rows == 1 else 'texts'}": (part, num_rows, sampling)
    for name, part, sampling in (
        ("draw greedy", "draw", {"temperature": 0.0}),
        ("draw top-p", "draw", {"top_p": 0.9}),
        ("decoder forward", "forward", {}),
        ("greedy step", "step", {"temperature": 0.0}),
    )
    for num_rows in (1, 16)
}
"""What is measured of generation: the part of the worker, texts at a time, and how they are drawn."""
_PAUSE_SECONDS = 0.1  # a worker's threads spin for a moment after their last work

Seconds = Mapping[str, Mapping[str, Sequence[float]]]
"""The name of each measurement to the version to the seconds of each round."""


@dataclass(frozen=True)
class Checkout:
    """A version to compare: its name in the report, and the root of its repository."""

    name: str
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make a worker import this version."""
        return {"PYTHONPATH": os.pathsep.join((str(self.root), str(self.root / "callbacks" / "src")))}


def main(argv: list[str]) -> int:
    """Measures, prints a table and writes the record to the path of `--out`."""
    options = _parse(argv)
    checkouts = (Checkout(NOW, _ROOT), Checkout(BEFORE, options.before))
    console = Console(stderr=True)
    parts: dict[str, Callable[[argparse.Namespace, Sequence[Checkout], Path, Console], Seconds]] = {
        "step": _measure_step,
        "data": _measure_data,
        "checkpoint": _measure_checkpoint,
        "generate": _measure_generate,
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for part in options.parts:
            console.print(f"measuring: {part}", highlight=False)
            (Path(directory) / part).mkdir()
            measured = parts[part](options, checkouts, Path(directory) / part, console)
            results |= {key: _compare(seconds) for key, seconds in measured.items()}
    record = {
        "what": "seconds of this version divided by seconds of the earlier version, in interleaved pairs",
        "command": f"genesis bench versions {shlex.join(anonymise(argv))}",
        "date": date.today().isoformat(),
        "hardware": describe_hardware("cpu"),
        "threads": options.threads,
        "load_average_after": round(os.getloadavg()[0], 1),
        "goal_ratio": GOAL_RATIO,
        "results": results,
    }
    page = format_page(record)
    sys.stdout.write(page)
    if options.out is not None:
        write_record(record, page, options.out)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="genesis bench versions", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--before", type=Path, required=True, help="root of a checkout of the version to compare with")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=list(_PARTS),
        help=f"parts to compare, from {', '.join(_PARTS)} (default: all)",
    )
    parser.add_argument(
        "--model", choices=sorted(STEP_MODELS), default="9m", help="model of the part step (default %(default)s)"
    )
    parser.add_argument(
        "--saved_model",
        choices=sorted(CHECKPOINT_MODELS),
        default="43m",
        help="model of the part checkpoint (default %(default)s)",
    )
    parser.add_argument("--pairs", type=int, default=20, help="rounds of each part (default %(default)s)")
    parser.add_argument("--windows", type=int, default=5, help="windows of a turn (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds of a turn of data and generate (default %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=20_000_000, help="tokens of the corpus of the part data (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="CPU threads per worker (default: all cores)"
    )
    parser.add_argument("--dir", type=Path, help="directory for corpora and checkpoints (default: the system's)")
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the record, such as benchmarks/records/versions.json; also writes an .md page",
    )
    options = parser.parse_args(argv)
    for part in options.parts:
        if part not in _PARTS:
            raise UserError(f"--parts has {part!r}; there are {', '.join(_PARTS)}")
    for name, least in (("pairs", 1), ("windows", 2), ("tokens", 1), ("threads", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} is {getattr(options, name)}: it must be at least {least}")
    if not (options.before / "genesis" / "bench" / "workers").is_dir():
        raise UserError(
            f"--before is {options.before}, which is not a checkout of Genesis with benchmarks; give the root of one"
        )
    options.before = options.before.resolve()
    # Options of the other benchmarks of training, which `plan_workload` also reads.
    options.micro_batch_size, options.micro_batches = None, 1
    options.device, options.precision, options.compile = "cpu", None, False
    return options


# ---- the parts


def _measure_step(
    options: argparse.Namespace, checkouts: Sequence[Checkout], directory: Path, console: Console
) -> Seconds:
    workload = plan_workload(STEP_MODELS[options.model], options, num_warmup_steps=options.windows)
    (contender,) = (own for own in OWN if own.name == "genesis")
    seconds: dict[str, list[float]] = {checkout.name: [] for checkout in checkouts}
    with ExitStack() as stack:
        workers = []
        for checkout in checkouts:
            script = checkout.root / "genesis" / "bench" / "workers" / contender.script.name
            version = replace(contender, name=checkout.name, script=script)
            log_path = directory / f"{checkout.name}.log"
            workers.append(stack.enter_context(Worker(version, workload, log_path, checkout.environment)))
            workers[-1].wait_until_ready()
        for round_index in range(options.pairs):
            for worker in rotate_order(workers, round_index):
                time.sleep(_PAUSE_SECONDS)
                seconds[worker.contender.name].append(worker.run_burst(options.windows).seconds)
        for worker in workers:
            worker.stop()
    _print_medians(console, "step", seconds)
    return {"step": seconds}


def _measure_data(
    options: argparse.Namespace, checkouts: Sequence[Checkout], directory: Path, console: Console
) -> Seconds:
    corpus = directory / "corpus"
    tokens_path = write_random_corpus(corpus, options.tokens)
    measured = {}
    for seq_len, micro_batch_size in SHAPES:
        seconds: dict[str, list[float]] = {checkout.name: [] for checkout in checkouts}
        with ExitStack() as stack:
            readers = []
            for checkout in checkouts:
                own = directory / f"{checkout.name}-{seq_len}"
                task = ReadTask(str(tokens_path), str(corpus), str(own), seq_len, micro_batch_size, EOS_ID)
                command = [sys.executable, "-m", _READER, task.to_json()]
                reader = WorkerProcess(checkout.name, command, own.with_suffix(".log"), 1, checkout.environment)
                readers.append(stack.enter_context(reader))
                reader.receive()
            for round_index in range(options.pairs + 1):
                for reader in rotate_order(readers, round_index):
                    reader.send(f"go {options.seconds}")
                    reading = reader.receive()
                    if round_index:  # the first round reads from the disk
                        seconds[reader.name].append(reading["seconds"] / reading["tokens"])
            for reader in readers:
                reader.send("quit")
                reader.wait()
        key = f"data, sequences of {seq_len}"
        _print_medians(console, key, seconds)
        measured[key] = seconds
    return measured


def _measure_checkpoint(
    options: argparse.Namespace, checkouts: Sequence[Checkout], directory: Path, console: Console
) -> Seconds:
    workload = plan_workload(CHECKPOINT_MODELS[options.saved_model], options, num_warmup_steps=options.windows - 1)
    (mode,) = (mode for mode in MODES if mode.name == OVERLAPPED)
    keys = ("checkpoint, mean step with a save", "checkpoint, stall of a save", "checkpoint, time until complete")
    seconds: dict[str, dict[str, list[float]]] = {key: {checkout.name: [] for checkout in checkouts} for key in keys}
    with ExitStack() as stack:
        teams: dict[str, Team] = {}
        for checkout in checkouts:
            run_dir = directory / checkout.name
            run_dir.mkdir()
            logs = directory / f"{checkout.name}-logs"
            logs.mkdir()
            task = Task(mode, workload, "replicated", options.windows, str(run_dir), 0, 1)
            teams[checkout.name] = stack.enter_context(Team([task], logs, checkout.environment))
            teams[checkout.name].wait_until_ready()
        for team in teams.values():
            team.take_turn(options.windows)  # includes the first save, which starts the writer
        for round_index in range(options.pairs):
            for name in rotate_order(list(teams), round_index):
                time.sleep(_PAUSE_SECONDS)
                turn = teams[name].take_turn(options.windows)
                assert turn.save_seconds is not None
                figures = (statistics.mean(turn.step_seconds), turn.stall_seconds, turn.save_seconds)
                for key, figure in zip(keys, figures, strict=True):
                    seconds[key][name].append(figure)
        for team in teams.values():
            team.stop()
    for key, of_key in seconds.items():
        _print_medians(console, key, of_key)
    return seconds


def _measure_generate(
    options: argparse.Namespace, checkouts: Sequence[Checkout], directory: Path, console: Console
) -> Seconds:
    measured: dict[str, dict[str, list[float]]] = {}
    tasks = [
        {"part": part, "num_rows": num_rows, "sampling": sampling} for part, num_rows, sampling in _GENERATED.values()
    ]
    with ExitStack() as stack:
        workers = []
        for checkout in checkouts:
            command = [sys.executable, str(_GENERATOR), json.dumps(tasks)]
            log_path = directory / f"{checkout.name}.log"
            worker = WorkerProcess(checkout.name, command, log_path, 1, checkout.environment)
            workers.append(stack.enter_context(worker))
            worker.receive()
        for number, name in enumerate(_GENERATED):
            seconds: dict[str, list[float]] = {checkout.name: [] for checkout in checkouts}
            for round_index in range(options.pairs + 1):
                for worker in rotate_order(workers, round_index):
                    worker.send(f"{number} {options.seconds}")
                    turn = worker.receive()
                    if round_index:  # the first round reads prompts and warms up
                        seconds[worker.name].append(turn["seconds"] / turn["tokens"])
            measured[f"generate, {name}: a token"] = seconds
            _print_medians(console, f"generate, {name}: a token", seconds)
        for worker in workers:
            worker.send("quit")
            worker.wait()
    return measured


def _print_medians(console: Console, key: str, seconds: Mapping[str, Sequence[float]]) -> None:
    medians = ", ".join(f"{name} {statistics.median(of_one):.3g} s" for name, of_one in seconds.items())
    console.print(f"{key}: {medians}", highlight=False)


# ---- the report


def _compare(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {
        "ratio": asdict(compare_pairs(seconds[NOW], seconds[BEFORE])),
        "median_seconds": {name: statistics.median(of_one) for name, of_one in seconds.items()},
    }


def format_page(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    lines = [
        "# This version compared with the earlier one",
        "",
        f"- command: `{record['command']}`",
        f"- date: {record['date']}",
        f"- hardware: {record['hardware']}, {record['threads']} threads per worker; load average at the end "
        f"{record['load_average_after']}, with this benchmark",
        "- the ratio is the median over rounds of the time of this version divided by the time of the earlier version; "
        f"goal: its 95% interval includes {record['goal_ratio']} or lies below it",
        "",
        "| measurement | ratio (95%) | pairs | median before | median now |",
        "|---|---|---|---|---|",
    ]
    for key, result in record["results"].items():
        ratio, medians = result["ratio"], result["median_seconds"]
        interval = "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
        lines.append(
            f"| {key} | {ratio['median']:.3f}{interval} | {ratio['num_pairs']} | {medians[BEFORE]:.3g} s | "
            f"{medians[NOW]:.3g} s |"
        )
    return "\n".join(lines) + "\n"
