"""Rehearses a recipe: trains it once without interruption and once with kills, and compares both results.

Every training is a real `genesis fit` in its own session. All processes that the rehearsal started end with the
rehearsal, even if it fails or is interrupted.
"""

import contextlib
import os
import platform
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from genesis.base.console import Console
from genesis.base.determinism import note_unrepeatable
from genesis.base.errors import RunEndedError, UserError, numbered
from genesis.base.processes import Mark, check_can_find, end_all, find_kind, wait_until_gone
from genesis.operations.rehearse.compare import read_losses
from genesis.operations.rehearse.display import Display
from genesis.operations.rehearse.killed_run import POLL_SECONDS, KilledRun
from genesis.operations.rehearse.launch import MARK_NAME, Launcher, Start, read_last_words
from genesis.operations.rehearse.plan import Trigger, Victim, plan_kills
from genesis.operations.rehearse.recipe import RehearsedRecipe, read_recipe
from genesis.operations.rehearse.report import Report
from genesis.operations.rehearse.watch import RunView
from genesis.recipe.resolved import ResolvedRecipe, list_steps
from genesis_callbacks.checkpoint import list_committed

_MISUSE = 2
# A writer whose trainer has ended waits a while for the receipts of the other writers.
_ORPHANS_END_SECONDS = 30.0


@dataclass(frozen=True)
class Options:
    """Options of a rehearsal.

    Args:
        fit: Arguments of `genesis` without the run's directory: `("fit", "--config", ...)`.
        num_kills: Total number of kills.
        seed: Seed of the kill times.
        directory: A new directory for both runs.
        command: The command that repeats the same rehearsal.
    """

    fit: tuple[str, ...]
    num_kills: int
    seed: int
    directory: Path
    command: str


def rehearse(options: Options, console: Console) -> Report:
    """Runs a rehearsal and returns its report. Only the main thread may call it.

    Raises:
        UserError: The recipe cannot be rehearsed.
    """
    check_can_find("genesis rehearse")
    recipe = read_recipe(ResolvedRecipe.read(list_steps(options.fit)))
    options.directory.mkdir(parents=True, exist_ok=True)
    rehearsal = _Rehearsal(options, recipe, Display(console, recipe.max_steps))
    return rehearsal.run()


class _Rehearsal:
    def __init__(self, options: Options, recipe: RehearsedRecipe, display: Display) -> None:
        self._options, self._recipe, self._display = options, recipe, display
        self._mark = Mark(MARK_NAME, uuid.uuid4().hex)
        self._launcher = Launcher(options.fit, options.directory, self._mark)
        self._straight = options.directory / "straight"
        self._report = Report(
            command=options.command,
            directory=str(options.directory),
            seed=options.seed,
            num_wanted=options.num_kills,
            max_steps=recipe.max_steps,
            every_n_steps=recipe.every_n_steps,
            seq_len=recipe.seq_len,
            hardware=f"{os.cpu_count()}-core {platform.machine()}",
        )

    def run(self) -> Report:
        report, began_seconds = self._report, time.monotonic()
        try:
            with _ended_by_signals(), self._display:
                view, victims = self._train_straight()
                self._train_and_kill(view, victims)
                left = wait_until_gone(self._mark, _ORPHANS_END_SECONDS)
                report.left_over = [f"{find_kind(process)} of rank {process.local_rank}" for process in left]
        except RunEndedError as error:
            report.failure = str(error)
        finally:
            with _deaf_to_interrupts():
                end_all(self._mark)
        report.seconds = time.monotonic() - began_seconds
        return report

    def _train_straight(self) -> tuple[RunView, tuple[Victim, ...]]:
        """Trains the straight run to its end, and returns the view of the run and the kinds of processes to kill."""
        self._display.print_line(f"straight run of {numbered(self._recipe.max_steps, 'steps')}, in {self._straight}")
        start = self._launcher.launch(self._straight, "straight")
        num_ranks, num_writers = self._watch_straight(start)
        if start.training.poll() != 0 or start.view.first_step_seconds is None:
            status = start.training.poll()
            message = f"the straight run ended with status {status}: {read_last_words(start.log)} (see {start.log})"
            raise UserError(message) if status == _MISUSE else RunEndedError(message)
        pace = start.view.measure_pace()
        self._report.pace, self._report.num_ranks = pace, num_ranks
        manifests = [manifest for _, manifest in list_committed(self._straight)]
        self._report.note = note_unrepeatable(manifests[-1].recipe) if manifests else None
        self._report.versions = {**(manifests[-1].versions if manifests else {}), "python": platform.python_version()}
        self._display.print_line(
            f"  ranks: {num_ranks}, writer processes: {num_writers}; {pace.start:.1f} s to the first step, then "
            f"{pace.step:.3f} s a step; a save takes {pace.save:.3f} s"
        )
        victims: list[Victim] = ["group"]
        victims += ["rank"] if num_ranks > 1 else []
        victims += ["writer"] if num_writers else []
        return start.view, tuple(victims)

    def _watch_straight(self, start: Start) -> tuple[int, int]:
        """Waits until all ranks have ended, and returns the numbers of ranks and writers."""
        num_ranks = num_writers = 0
        while start.training.poll() is None:
            sight = start.view.look()
            if sight.last_step is not None and num_ranks == 0:
                num_ranks, num_writers = len(start.training.ranks()), len(start.training.writers())
            self._display.show("straight run", sight)
            time.sleep(POLL_SECONDS)
        while start.training.ranks():
            time.sleep(POLL_SECONDS)
        start.view.look()
        return num_ranks, num_writers

    def _train_and_kill(self, straight: RunView, victims: tuple[Victim, ...]) -> None:
        """Starts killed runs until all kills have happened: a run may end before its last kill is due."""
        report = self._report
        losses, pace, seconds_by_step = read_losses(self._straight), straight.measure_pace(), straight.seconds_by_step
        while len(report.kills) < report.num_wanted:
            num_before = len(report.kills)
            plan = plan_kills(
                report.seed + len(report.rounds),
                report.num_wanted - num_before,
                max_steps=report.max_steps,
                every_n_steps=report.every_n_steps,
                victims=victims,
            )
            name = f"killed-{len(report.rounds) + 1}" if report.rounds else "killed"
            self._display.print_line(f"{name} run, kills to come: {len(plan)}")
            triggers = [Trigger(kill, pace, seconds_by_step) for kill in plan]
            killed = KilledRun(
                self._options.directory / name, triggers, pace, losses, self._launcher, self._display, report.kills
            )
            report.rounds.append(killed.round)
            killed.run(self._straight)
            if len(report.kills) == num_before:
                return


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise an exception, so that the program ends its processes before it exits."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
