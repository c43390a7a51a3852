"""The report of a rehearsal: plain data for JSON, a table and a verdict for people."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from genesis.rehearse.compare import CheckpointComparison, LossDifference
from genesis.rehearse.plan import Aim, Pace, Phase, Victim

Verdict = Literal["equal", "different", "too short", "failed"]

_MAX_TENSORS = 10
_MAX_LOSSES = 5


@dataclass
class KillRecord:
    """One kill that really happened.

    Args:
        number: From 1.
        victim: What was killed.
        who: The same in words, with the rank.
        aim: Into what it was to fall.
        start: Number of the training that it hit, from 1.
        at_step: The last step that was logged by then; None before the first.
        saving: The save that was in flight, by its staging directory; None for none.
        outcome: What became of the training.
        resumed_from: Step of the checkpoint that the next training took; 0 for the beginning, None where it went on
            or never came so far.
        lost_steps: Those after it that were logged before the end, and were trained again.
        restart_seconds: From the launch of the next training to its first logged step, if it came to one.
        phase: Of the start, where the kill fell into one.
    """

    number: int
    victim: Victim
    who: str
    aim: Aim
    start: int
    at_step: int | None
    saving: str | None
    outcome: str = ""
    resumed_from: int | None = None
    lost_steps: int = 0
    restart_seconds: float | None = None
    phase: Phase | None = None


@dataclass
class Round:
    """One killed run, from its first start to its end, beside the straight one.

    Args:
        directory: Where it lies.
        num_starts: Trainings that it took.
        checkpoints: The final ones, compared.
        num_losses: That were compared, over all starts.
        losses: Those that differ.
        unlogged_steps: That only one of the two logs has; but for those resumed from, which a kill may have cut off.
    """

    directory: str
    num_starts: int = 0
    checkpoints: CheckpointComparison | None = None
    num_losses: int = 0
    losses: list[LossDifference] = field(default_factory=list)
    unlogged_steps: list[int] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether it ended as the straight one, with the same losses on its way."""
        return self.checkpoints is not None and self.checkpoints.is_equal and not self.losses


@dataclass
class Report:
    """All of a rehearsal.

    Args:
        command: That makes the same one.
        directory: Where its runs and the output of their trainings lie.
        seed: Of the random instants.
        num_wanted: Kills that were asked for.
        max_steps: Of the recipe.
        every_n_steps: From one save to the next.
        num_ranks: That trained.
        pace: Of the straight run.
        hardware: In words.
        versions: Package to version.
        kills: In their order.
        rounds: Killed runs; more than one where the first ended before all kills had come.
        failure: Why it did not come to its end, or None.
        left_over: Processes that were still there after the end, in words.
        seconds: All of it took.
    """

    command: str
    directory: str
    seed: int
    num_wanted: int
    max_steps: int
    every_n_steps: int
    num_ranks: int = 0
    pace: Pace | None = None
    hardware: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    kills: list[KillRecord] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    failure: str | None = None
    left_over: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """What it comes to."""
        if self.failure is not None or not self.rounds:
            return "failed"
        if not all(each.is_equal for each in self.rounds):
            return "different"
        return "equal" if len(self.kills) >= self.num_wanted else "too short"

    @property
    def lost_steps(self) -> int:
        """Steps that were trained again, in all."""
        return sum(kill.lost_steps for kill in self.kills)

    def to_json(self) -> dict[str, Any]:
        """Returns it in plain types."""
        return {"verdict": self.verdict, "lost_steps": self.lost_steps, **asdict(self)}


def build_kill_table(kills: Sequence[KillRecord]) -> Table:
    """Returns the kills as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("kill", "victim", "at step", "in a save", "outcome", "resumed from", "lost", "back after"):
        table.add_column(column, justify="right" if column in ("kill", "at step", "lost", "back after") else "left")
    for kill in kills:
        table.add_row(*(Text(cell) for cell in describe_kill(kill)))
    return table


def describe_kill(kill: KillRecord) -> tuple[str, ...]:
    """Returns the cells of a kill's row."""
    resumed = {None: "", 0: "the beginning"}.get(kill.resumed_from, f"step {kill.resumed_from}")
    return (
        str(kill.number),
        kill.who,
        ("start" if kill.phase is None else f"start: {kill.phase}") if kill.at_step is None else str(kill.at_step),
        "" if kill.saving is None else kill.saving.partition(".")[0],
        kill.outcome,
        resumed,
        "" if kill.resumed_from is None else str(kill.lost_steps),
        "" if kill.restart_seconds is None else f"{kill.restart_seconds:.1f} s",
    )


def summarise(report: Report) -> list[str]:
    """Returns the lines under the table; the last one is the verdict."""
    in_saves = sum(kill.saving is not None for kill in report.kills)
    in_starts = sum(kill.at_step is None for kill in report.kills)
    restarts = [kill.restart_seconds for kill in report.kills if kill.restart_seconds is not None]
    lines = [
        f"kills: {len(report.kills)}, in a save {in_saves}, in a start {in_starts}; steps trained again: "
        f"{report.lost_steps}; all of it took {report.seconds / 60:.1f} minutes"
    ]
    if restarts:
        lines.append(
            f"restart to first new step: median {statistics.median(restarts):.1f} s, longest {max(restarts):.1f} s"
        )
    for each in report.rounds:
        lines += _describe_round(each)
    lines += [f"{process} still ran after the end and was killed" for process in report.left_over]
    return [*lines, *_describe_verdict(report)]


def _describe_round(each: Round) -> list[str]:
    if each.checkpoints is None:
        return []
    found = each.checkpoints
    lines = [
        f"{each.directory}, {found.killed} beside the straight {found.straight}: of {found.num_tensors} tensors "
        f"{len(found.tensors)} differ, of {each.num_losses} losses {len(each.losses)}"
    ]
    lines += [f"  {value.key}: {value.straight} straight, {value.killed} killed" for value in found.values]
    for tensor in found.tensors[:_MAX_TENSORS]:
        gap = "" if tensor.max_abs_difference is None else f", by at most {tensor.max_abs_difference:.3e}"
        lines.append(f"  {tensor.name}: {tensor.verdict}{gap}")
    if len(found.tensors) > _MAX_TENSORS:
        lines.append(f"  and {len(found.tensors) - _MAX_TENSORS} more (--json lists them)")
    lines += [
        f"  step {loss.step}, {loss.column}: {loss.straight} straight, {loss.killed} in start {loss.start}"
        for loss in each.losses[:_MAX_LOSSES]
    ]
    if each.unlogged_steps:
        steps = ", ".join(str(step) for step in each.unlogged_steps[:_MAX_TENSORS])
        lines.append(f"  only one of the two logs has the loss of {len(each.unlogged_steps)} steps, such as {steps}")
    if found.others:
        lines.append(f"  {len(found.others)} other values differ and do not affect training (--json lists them)")
    return lines


def _describe_verdict(report: Report) -> list[str]:
    if report.verdict == "equal":
        return [
            "equal: weights, optimizer, counters, data position and losses are those of the straight run, bit for bit"
        ]
    if report.verdict == "too short":
        return [
            f"too short: the run ended after {len(report.kills)} of {report.num_wanted} kills; the results are equal "
            "so far; give the run more or larger steps"
        ]
    if report.verdict == "failed":
        return [f"failed: {report.failure}"]
    return [f"different: {_explain_difference(report)}"]


def _explain_difference(report: Report) -> str:
    """Says whether it was the resume or the recipe: what differs before the first kill was never resumed."""
    advice = (
        "look for kernels that are not deterministic (trainer.deterministic: true names them), and for callbacks or "
        "data that draw from the clock, the system or an unseeded generator"
    )
    for each in report.rounds:
        before_any_resume = [loss for loss in each.losses if loss.start == 1]
        if before_any_resume:
            step = before_any_resume[0].step
            return f"the loss of step {step} differs before anything was resumed: the recipe does not repeat; {advice}"
    return f"the losses agree up to the first resume: what the recipe needs may not be in its checkpoint; or {advice}"
