"""Measures the time from a rank's SIGKILL to the first step after it, under `genesis supervise`, by part.

The run trains a recipe on random tokens. Again and again one of its ranks gets SIGKILL, and the events and heartbeats
of the run give the moments that divide the time until all ranks have trained a step again. All clocks are the machine's
monotonic clock.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.corpora import write_random_corpus
from benchmarks.harness import add_counts, begin_record, build_parser, check_counts, finish, format_page, format_table
from genesis.base.console import Console
from genesis.base.errors import RunEndedError, UserError
from genesis.base.processes import start_program
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.base.events import Event
from genesis_callbacks.heartbeats import HeartbeatRecord, read_heartbeats

PARTS: Final = {
    "detect": "from the kill to the record of the end",
    "clean_up": "until nothing of the last attempt is held and the next ranks are forked",
    "import": "until arguments are read and module, data and callbacks exist; the imports are done before",
    "build": "until the ranks have met and own the run's directory",
    "restore": "until the checkpoint is verified and restored and training begins",
    "first_step": "until the first step is done",
}
_GOAL_SECONDS: Final = 3.0
_DETECT_GOAL_SECONDS: Final = 1.0
_LIMIT_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.01
_CORPUS_TOKENS: Final = 2_000_000
_REQUEUED: Final = 75


@dataclass(frozen=True)
class Recovery:
    """One kill: seconds by part, in the order in which they pass."""

    detect: float
    clean_up: float
    import_: float
    build: float
    restore: float
    first_step: float

    @property
    def total(self) -> float:
        """Seconds from the kill to the first step."""
        return float(sum(asdict(self).values()))


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to the path of `--out`."""
    options = _parse(argv)
    with _ending_at_sigterm(), tempfile.TemporaryDirectory() as directory:
        recoveries = measure(options, Path(directory))
    what = "from the SIGKILL of a rank to the first step after it, under genesis supervise"
    record = begin_record("recovery", what, argv, ("torch", "lightning"))
    parts = [{**_name_parts(each), "total": each.total} for each in recoveries]
    medians = {name: statistics.median(part[name] for part in parts) for name in (*PARTS, "total")}
    record |= {"ranks": options.ranks, "recoveries": parts, "median_seconds": medians}
    finish(record, format_record, options.out)
    return 0


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Lets SIGTERM end this process by an exception, so that the run is ended and its directory removed."""

    def leave(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the removal
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = build_parser("recovery", __doc__)
    recipe = Path("configs/demo.yaml")
    parser.add_argument("--config", type=Path, default=recipe, help="the recipe (default %(default)s)")
    add_counts(
        parser,
        kills=(11, "number of kills"),
        ranks=(1, "number of ranks"),
        seed=(0, "seed of the ranks that are killed"),
    )
    options = parser.parse_args(argv)
    check_counts(options, "kills", "ranks")
    if not options.config.is_file():
        raise UserError(f"no such recipe: {options.config}")
    return options


def measure(options: argparse.Namespace, directory: Path) -> list[Recovery]:
    """Trains, kills and restarts, and returns the parts of each recovery."""
    recipe = ResolvedRecipe.read([options.config])
    corpus, run_dir, log = directory / "corpus", directory / "run", directory / "supervise.log"
    write_random_corpus(corpus, _CORPUS_TOKENS, recipe.count("model.decoder.vocab_size"))
    fit = ["fit", "--config", str(options.config), "--run_dir", str(run_dir), "--data.corpus", str(corpus)]
    fit += ["--trainer.max_steps", "1000000", "--trainer.limit_val_batches", "0", "--trainer.accelerator", "cpu"]
    fit += ["--trainer.devices", str(options.ranks), "--checkpoint.every_n_steps", "5"]
    command = [sys.executable, "-m", "genesis", "supervise", "--", *fit]
    chooser, console = random.Random(options.seed), Console(stderr=True, highlight=False)
    with log.open("wb") as output:
        supervisor = start_program(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        beats = _wait_step(supervisor, run_dir, options.ranks, set(), log)
        recoveries = []
        for number in range(options.kills):
            _wait_saved(supervisor, run_dir, log)
            pids = {beat.pid for beat in beats}
            killed_seconds = time.monotonic()
            os.kill(chooser.choice(beats).pid, signal.SIGKILL)
            beats = _wait_step(supervisor, run_dir, options.ranks, pids, log)
            recoveries.append(divide(killed_seconds, read_events(run_dir), beats))
            console.print(f"kill {number + 1} of {options.kills}: {recoveries[-1].total:.2f} s")
        return recoveries
    finally:
        supervisor.terminate()
        if supervisor.wait() != _REQUEUED:
            console.print(f"the supervisor ended with status {supervisor.returncode}")


def _wait_step(
    supervisor: "subprocess.Popen[bytes]", run_dir: Path, num_ranks: int, before: set[int], log: Path
) -> list[HeartbeatRecord]:
    """Waits until all ranks of a new attempt have trained a step, and returns their heartbeats."""
    deadline_seconds = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline_seconds:
        _check_alive(supervisor, log)
        beats = [beat for beat in read_heartbeats(run_dir).values() if beat.pid not in before]
        if len([beat for beat in beats if "first_step" in beat.milestones]) == num_ranks:
            return beats
        time.sleep(_POLL_SECONDS)
    raise RunEndedError(f"no step within {_LIMIT_SECONDS:g} s")


def _wait_saved(supervisor: "subprocess.Popen[bytes]", run_dir: Path, log: Path) -> None:
    """Waits until the attempt has saved, so that a kill hits training and not a start."""
    num_saved = _count_saved(run_dir)
    while _count_saved(run_dir) == num_saved:
        _check_alive(supervisor, log)
        time.sleep(0.1)


def _count_saved(run_dir: Path) -> int:
    return sum(event.kind == "saved" for event in read_events(run_dir))


def _check_alive(supervisor: "subprocess.Popen[bytes]", log: Path) -> None:
    if supervisor.poll() is not None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
        raise RunEndedError(f"the supervisor ended with status {supervisor.returncode}: {lines[-1]}")


def divide(killed_seconds: float, events: Sequence[Event], beats: Sequence[HeartbeatRecord]) -> Recovery:
    """Returns the parts of a recovery from the moments that the run recorded. Pure.

    Args:
        killed_seconds: The moment of the kill.
        events: The run's.
        beats: The heartbeats of all ranks after their first step; the last rank counts.
    """

    def first(kind: str) -> float:
        return next(e.monotonic_seconds for e in events if e.kind == kind and e.monotonic_seconds >= killed_seconds)

    def last(milestone: str) -> float:
        return max(beat.milestones[milestone] for beat in beats)

    moments = [killed_seconds, first("crashed"), first("launched"), last("created"), first("started"), last("train")]
    moments.append(last("first_step"))
    return Recovery(*(after - before for before, after in itertools.pairwise(moments)))


def _name_parts(recovery: Recovery) -> dict[str, float]:
    return dict(zip(PARTS, asdict(recovery).values(), strict=True))


def format_record(record: dict[str, Any]) -> str:
    """Returns the record as a page."""
    medians, totals = record["median_seconds"], [each["total"] for each in record["recoveries"]]
    notes = [
        f"{record['what']}; ranks: {record['ranks']}; kills: {len(totals)}",
        f"median {medians['total']:.2f} s, from {min(totals):.2f} to {max(totals):.2f} s; the goal is "
        f"{_GOAL_SECONDS:g} s, with a detection under {_DETECT_GOAL_SECONDS:g} s",
    ]
    rows = [[name.replace("_", " "), f"{medians[name]:.2f} s", text] for name, text in PARTS.items()]
    return format_page("Recovery of a killed rank", record, notes, format_table(("part", "median", "what it is"), rows))
