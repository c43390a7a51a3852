"""Compares two versions of Genesis in one run: the training step, reading prepared data, saves, and generation.

Both versions run the same workers, each from its own checkout, under this interpreter. The versions take turns in an
alternating order, and every comparison is a ratio within a round. A ratio divides the time of this version by
the time of the earlier version: above 1, this version is slower.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import harness
from benchmarks.checkpoint import MODELS as CHECKPOINT_MODELS
from benchmarks.checkpoint import MODES
from benchmarks.checkpoint_results import OVERLAPPED
from benchmarks.corpora import write_random_corpus
from benchmarks.data import SHAPES
from benchmarks.harness import ROOT
from benchmarks.processes import WorkerProcess
from benchmarks.step import MODELS as STEP_MODELS
from benchmarks.step import plan_workload
from benchmarks.workers.checkpoint_task import Task
from benchmarks.workers.data_protocol import ReadTask
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.tokenizer.train import EOS_ID

NOW, BEFORE = "now", "before"
GOAL_RATIO = 1.02
"""The 95% interval of the median ratio includes this value or lies below it."""

_PARTS: Final = ("step", "data", "checkpoint", "generate")
_PLACES: Final = ("benchmarks/workers", "genesis/bench/workers")
"""Where a version has its workers; earlier ones have them in the package."""
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
_ONE_RANK: Final = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0"}

Figures = Mapping[str, Mapping[str, Sequence[tuple[float, ...]]]]
"""The name of each measurement to the version to the seconds of each round."""


@dataclass(frozen=True)
class Checkout:
    """A version to compare: its name in the report, and the root of its repository."""

    name: str
    root: Path

    def start(self, script: str, words: Sequence[str], directory: Path, num_threads: int) -> WorkerProcess:
        """Starts a worker of this version, or of ours under its imports if it has none of this name."""
        paths = [self.root / place / script for place in _PLACES]
        worker = next((path for path in paths if path.is_file()), ROOT / _PLACES[0] / script)
        imports = os.pathsep.join((str(self.root), str(self.root / "callbacks" / "src")))
        command = [sys.executable, str(worker), *words]
        log_path = directory / f"{self.name}.log"
        return WorkerProcess(self.name, command, log_path, num_threads, {"PYTHONPATH": imports, **_ONE_RANK})


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to the path of `--out`."""
    options = _parse(argv)
    parts = {
        "step": _measure_step,
        "data": _measure_data,
        "checkpoint": _measure_checkpoint,
        "generate": _measure_generate,
    }
    what = "seconds of this version divided by seconds of the earlier version, in interleaved pairs"
    record = harness.begin_record("versions", what, argv, ("torch", "lightning"))
    record |= {"threads": options.threads, "goal_ratio": GOAL_RATIO, "results": {}}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for part in options.parts:
            Console(stderr=True).print(f"measuring: {part}", highlight=False)
            own = Path(directory) / part
            own.mkdir()
            record["results"] |= {key: _compare(of_key) for key, of_key in parts[part](options, own).items()}
    harness.finish(record, format_record, options.out)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.build_parser("versions", __doc__)
    add = parser.add_argument
    add("--before", type=Path, required=True, help="root of a checkout of the version to compare with")
    add("--parts", type=harness.read_list, default=list(_PARTS), help=f"parts, from {', '.join(_PARTS)} (default: all)")
    add("--model", choices=sorted(STEP_MODELS), default="9m", help="model of the part step (default %(default)s)")
    saved = "model of the part checkpoint (default %(default)s)"
    add("--saved_model", choices=sorted(CHECKPOINT_MODELS), default="43m", help=saved)
    add("--seconds", type=float, default=1.0, help="seconds of a turn of data and generate (default %(default)s)")
    add("--dir", type=Path, help="directory for corpora and checkpoints (default: the system's)")
    harness.add_counts(
        parser,
        pairs=(20, "rounds of each part"),
        windows=(5, "windows of a turn"),
        tokens=(20_000_000, "tokens of the corpus of the part data"),
        threads=(os.cpu_count() or 1, "CPU threads per worker"),
    )
    options = parser.parse_args(argv)
    harness.check_choices("--parts", options.parts, _PARTS)
    harness.check_counts(options, "pairs", "tokens", "threads")
    harness.check_counts(options, "windows", least=2)
    if not any((options.before / place).is_dir() for place in _PLACES):
        raise UserError(
            f"--before is {options.before}, which is not a checkout of Genesis with benchmarks; give the root of one"
        )
    options.checkouts = (Checkout(NOW, ROOT), Checkout(BEFORE, options.before.resolve()))
    return options


# ---- the parts


def _take_turns(
    start: Callable[[Checkout], WorkerProcess],
    options: argparse.Namespace,
    words: Mapping[str, str],
    read: Callable[[Mapping[str, Any]], tuple[float, ...]],
) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    """Starts the worker of each version and lets the two take turns.

    Args:
        start: Starts a version's worker.
        options: The options of the benchmark.
        words: What the workers are asked, by the name of the measurement.
        read: Returns the figures of an answer.

    Returns:
        For each measurement and each version, the figures of each round, after a turn that warms up.
    """
    with ExitStack() as stack:
        workers = {each.name: stack.enter_context(start(each)) for each in options.checkouts}
        for worker in workers.values():
            worker.receive()
        found = {}
        for key, word in words.items():
            for worker in workers.values():
                worker.ask(word)
            found[key] = harness.take_rounds(
                workers,
                options.pairs,
                lambda worker, word=word: read(worker.ask(word)),  # type: ignore[misc]
                lambda figures: figures[0],
                f"s, {key}",
            )
        for worker in workers.values():
            worker.stop()
    return found


def _read_seconds(answer: Mapping[str, Any]) -> tuple[float, ...]:
    return (answer["seconds"] / answer["tokens"],)


def _read_turn(answer: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the mean step, the stall and the time until complete; earlier versions have them all in one place."""
    turn = {**answer, **answer.get("figures", {})}
    return statistics.mean(turn["step_seconds"]), turn["stall_seconds"], turn["save_seconds"]


def _measure_step(options: argparse.Namespace, directory: Path) -> Figures:
    workload = plan_workload(STEP_MODELS[options.model], options, num_warmup_steps=options.windows)
    words = [workload.to_json(), "replicated"]

    def start(checkout: Checkout) -> WorkerProcess:
        return checkout.start("genesis_trainer.py", words, directory, options.threads)

    return _take_turns(start, options, {"step": f"go {options.windows}"}, _read_seconds)


def _measure_data(options: argparse.Namespace, directory: Path) -> Figures:
    corpus = directory / "corpus"
    tokens_path = write_random_corpus(corpus, options.tokens)
    measured: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for seq_len, micro_batch_size in SHAPES:
        task = ReadTask(str(tokens_path), str(corpus), str(directory / "own"), seq_len, micro_batch_size, EOS_ID)

        def start(checkout: Checkout, task: ReadTask = task) -> WorkerProcess:
            return checkout.start("corpus_reader.py", [task.to_json()], directory, 1)

        words = {f"data, sequences of {seq_len}": f"go {options.seconds}"}
        measured |= _take_turns(start, options, words, _read_seconds)
    return measured


def _measure_checkpoint(options: argparse.Namespace, directory: Path) -> Figures:
    workload = plan_workload(CHECKPOINT_MODELS[options.saved_model], options, num_warmup_steps=options.windows - 1)
    (mode,) = (mode for mode in MODES if mode.name == OVERLAPPED)

    def start(checkout: Checkout) -> WorkerProcess:
        run_dir = directory / checkout.name
        run_dir.mkdir()
        task = Task(mode, workload, "replicated", options.windows, str(run_dir), 0, 1)
        return checkout.start("checkpoint_trainer.py", [task.to_json()], directory, options.threads)

    (turns,) = _take_turns(start, options, {"checkpoint": f"go {options.windows}"}, _read_turn).values()
    keys = ("checkpoint, mean step with a save", "checkpoint, stall of a save", "checkpoint, time until complete")
    return {
        key: {name: [(turn[place],) for turn in of_one] for name, of_one in turns.items()}
        for place, key in enumerate(keys)
    }


def _measure_generate(options: argparse.Namespace, directory: Path) -> Figures:
    names = ("part", "num_rows", "sampling")
    tasks = json.dumps([dict(zip(names, task, strict=True)) for task in _GENERATED.values()])
    words = {f"generate, {name}: a token": f"{number} {options.seconds}" for number, name in enumerate(_GENERATED)}

    def start(checkout: Checkout) -> WorkerProcess:
        return checkout.start("generator.py", [tasks], directory, 1)

    return _take_turns(start, options, words, _read_seconds)


# ---- the report


def _compare(figures: Mapping[str, Sequence[tuple[float, ...]]]) -> dict[str, Any]:
    seconds = {name: [first for first, *_ in of_one] for name, of_one in figures.items()}
    return {
        "ratio": asdict(harness.compare_pairs(seconds[NOW], seconds[BEFORE])),
        "median_seconds": {name: statistics.median(of_one) for name, of_one in seconds.items()},
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    notes = [
        f"{record['threads']} threads per worker",
        "the ratio is the median over rounds of the time of this version divided by the time of the earlier version; "
        f"goal: its 95% interval includes {record['goal_ratio']} or lies below it",
    ]
    rows = []
    for key, result in record["results"].items():
        ratio, medians = result["ratio"], result["median_seconds"]
        times = (f"{medians[name]:.3g} s" for name in (BEFORE, NOW))
        rows.append([key, harness.format_ratio(ratio), str(ratio["num_pairs"]), *times])
    columns = ("measurement", "ratio (95%)", "pairs", "median before", "median now")
    return harness.format_page(
        "This version compared with the earlier one", record, notes, harness.format_table(columns, rows)
    )
