"""Writes a profiler's trace of chosen steps: `RUN/traces/steps-A-B-rank-N.json`, for chrome://tracing and Perfetto.

It logs no metric, and costs a comparison for each step that is not traced. Each rank that is chosen writes a file of
its own. Does it communicate? No.
"""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from ._argument_types import checking
from ._compat import ignore_actions, listen_to_actions
from .base.errors import UserError
from .base.run_directory import RunDirectory, read_run_dir

__all__ = ["TraceSteps", "TraceWarning"]


class TraceWarning(UserWarning):
    """A trace could not be written; training continues."""


class TraceSteps(pl.Callback):
    """Traces chosen steps with torch's profiler: kernels and operators, under the names of Lightning's actions.

    Steps are Lightning's `global_step` at their begin, so that the first step of a run is 0. Steps that follow each
    other share a trace. A trace begins when the batch has arrived and ends with the hooks `on_train_batch_end` of the
    callbacks before this one. While a step is traced it is slower, above all with stacks.

    Args:
        steps: The steps to trace; none by default.
        run_dir: The run's directory; by default the Trainer's `default_root_dir`.
        ranks: The ranks that trace; None for all.
        has_stacks: Whether the trace has the lines of Python code.
        has_memory: Whether the trace has the allocations.
    """

    @checking
    def __init__(
        self,
        steps: Sequence[int] = (),
        run_dir: str | Path | None = None,
        *,
        ranks: Sequence[int] | None = (0,),
        has_stacks: bool = False,
        has_memory: bool = False,
    ) -> None:
        super().__init__()
        wrong = [step for step in steps if step < 0]
        if wrong:
            raise UserError(f"steps has {wrong[0]}: steps are counted from 0")
        self._ends = dict(find_runs(steps))
        self._run_dir = None if run_dir is None else read_run_dir(run_dir)
        self._ranks = None if ranks is None else frozenset(ranks)
        self._options = {"with_stack": has_stacks, "profile_memory": has_memory, "record_shapes": has_memory}
        self._profile: profile | None = None
        self._traced: tuple[int, int] = (0, 0)
        self._open: list[record_function] = []
        self._last_traced = -1

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins a trace at the first of the steps that it has."""
        step = trainer.global_step
        if step not in self._ends or self._profile is not None or step == self._last_traced:
            return
        if self._ranks is not None and trainer.global_rank not in self._ranks:
            return
        self._traced, self._last_traced = (step, self._ends[step]), step
        # Without `acc_events`, torch 2.11 warns that events of earlier cycles are dropped; a trace is one cycle.
        self._profile = profile(activities=_choose_activities(), acc_events=True, **self._options)  # type: ignore[arg-type]
        self._profile.start()
        listen_to_actions(trainer, self._begin_action, self._end_action)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a trace after the last of its steps."""
        if self._profile is not None and trainer.global_step > self._traced[1]:
            self._end(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends a trace whose last step the run does not reach."""
        self._end(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Writes what the trace has up to the error."""
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        tracing, self._profile = self._profile, None
        if tracing is None:
            return
        ignore_actions(trainer, self._begin_action)
        while self._open:
            self._open.pop().__exit__(None, None, None)
        tracing.stop()
        first, last = self._traced
        directory = RunDirectory(self._run_dir or Path(trainer.default_root_dir)).traces
        last = min(last, max(first, trainer.global_step - 1))
        path = directory / f"steps-{first}-{last}-rank-{trainer.global_rank}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            tracing.export_chrome_trace(str(part))
            part.replace(path)
        except (OSError, RuntimeError) as error:  # a full disk must not end a training
            warnings.warn(f"the trace of step {first} is not written to {path}: {error}", TraceWarning, stacklevel=2)

    def _begin_action(self, name: str) -> None:
        action = record_function(name)
        action.__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._open.append(action)

    def _end_action(self, name: str) -> None:
        if self._open:  # it is empty if the action began before the trace
            self._open.pop().__exit__(None, None, None)


def find_runs(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the first and the last of the steps that follow each other.

    Example:
        >>> find_runs([12, 10, 11, 20])
        [(10, 12), (20, 20)]
    """
    runs: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if runs and runs[-1][1] == step - 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return runs


def _choose_activities() -> list[ProfilerActivity]:
    """Returns everything that this torch can trace."""
    return sorted(supported_activities(), key=str)  # type: ignore[no-untyped-call]  # torch gives it no types
