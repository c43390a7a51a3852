"""The report of a rehearsal: plain data for JSON, a table and a verdict for people."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from genesis.base.errors import numbered
from genesis.model.key_blocks import ENOUGH_BLOCKS, KEY_BLOCK, count_key_blocks
from genesis.operations.rehearse.compare import CheckpointComparison, LossDifference
from genesis.operations.rehearse.plan import Aim, Pace, Phase, Victim

Verdict = Literal["equal", "different", "too short", "failed"]

_MAX_TENSORS = 10
_MAX_LOSSES = 5


@dataclass
class KillRecord:
    """One kill that really happened.

    Args:
        number: Number of the kill, from 1.
        victim: The processes that were killed.
        who: A description of the victim, with the rank.
        aim: Whether the kill was planned for a step, a save or a restart.
        start: Number of the killed training, from 1.
        at_step: The last step that was logged before the kill; None before the first step.
        saving: The staging directory of the save that was in flight; None if no save was in flight.
        outcome: The effect of the kill on the training.
        resumed_from: Step of the checkpoint from which the next training resumed, 0 for a start from scratch. None if
            the killed training went on, or if the next training ended before its restore.
        lost_steps: Number of steps that were logged after that checkpoint and then trained again.
        restart_seconds: From the launch of the next training to its first logged step; None if it logged no step.
        phase: The phase of the start; None unless the kill fell into a start.
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
    """A killed run, from its first start to its end, compared with the straight run.

    Args:
        directory: Name of the run's directory.
        num_starts: Number of trainings that were started.
        checkpoints: The comparison of both final checkpoints.
        num_losses: Number of losses that were compared, over all starts.
        losses: The losses that differ.
        number = numbered(len(each.unlogged_steps), "steps")
        lines.append(f"  only one of the two logs has the loss of {number}, such as {steps}")
            may have cut off.
    """

    directory: str
    num_starts: int = 0
    checkpoints: CheckpointComparison | None = None
    num_losses: int = 0
    losses: list[LossDifference] = field(default_factory=list)
    unlogged_steps: list[int] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether the final checkpoint and all losses of the killed run equal those of the straight run."""
        return self.checkpoints is not None and self.checkpoints.is_equal and not self.losses


@dataclass
class Report:
    """The complete results of a rehearsal.

    Args:
        command: The command that repeats the same rehearsal.
        directory: The directory of the runs and of the output of their trainings.
        seed: Seed of the kill times.
        num_wanted: Number of requested kills.
        max_steps: Number of steps in the recipe.
        every_n_steps: Steps from one save to the next.
        seq_len: Tokens of a sequence, which is the recipe's own: a run of this recipe is what the rehearsal is about.
        num_ranks: Number of ranks that trained.
        pace: The pace of the straight run.
        hardware: A description of the machine.
        versions: Package to version.
        kills: The kills in their order.
        rounds: The killed runs; more than one if the first run ended before all kills had happened.
        note: What the recipe gives up of repeatability, in one line; None if nothing.
        failure: Why the rehearsal failed; None if it completed.
        left_over: Descriptions of processes that still ran after the end of the rehearsal.
        seconds: Duration of the whole rehearsal.
    """

    command: str
    directory: str
    seed: int
    num_wanted: int
    max_steps: int
    every_n_steps: int
    seq_len: int
    num_ranks: int = 0
    pace: Pace | None = None
    hardware: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    kills: list[KillRecord] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    note: str | None = None
    failure: str | None = None
    left_over: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The verdict of the rehearsal."""
        if self.failure is not None or not self.rounds:
            return "failed"
        if not all(each.is_equal for each in self.rounds):
            return "different"
        return "equal" if len(self.kills) >= self.num_wanted else "too short"

    @property
    def lost_steps(self) -> int:
        """Total number of steps that were trained again."""
        return sum(kill.lost_steps for kill in self.kills)

    def to_json(self) -> dict[str, Any]:
        """Returns the report in plain types."""
        return {
            "verdict": self.verdict,
            "lost_steps": self.lost_steps,
            "key_blocks": count_key_blocks(self.seq_len),
            **asdict(self),
        }


def build_kill_table(kills: Sequence[KillRecord]) -> Table:
    """Returns the kills as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("kill", "victim", "at step", "in a save", "outcome", "resumed from", "lost", "back after"):
        table.add_column(column, justify="right" if column in ("kill", "at step", "lost", "back after") else "left")
    for kill in kills:
        table.add_row(*(Text(cell) for cell in describe_kill(kill)))
    return table


def describe_kill(kill: KillRecord) -> tuple[str, ...]:
    """Returns the cells of a kill's table row."""
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
        f"{report.lost_steps}; total time {report.seconds / 60:.1f} minutes"
    ]
    if restarts:
        lines.append(
            f"restart to first new step: median {statistics.median(restarts):.1f} s, longest {max(restarts):.1f} s"
        )
    for each in report.rounds:
        lines += _describe_round(each)
    lines += [] if report.note is None else [report.note]
    num_blocks = count_key_blocks(report.seq_len)
    if num_blocks < ENOUGH_BLOCKS:
        lines.append(
            f"sequences of {numbered(report.seq_len, 'tokens')} have at most {numbered(num_blocks, 'blocks')} of keys: "
            f"the verdict is about this length, and on a GPU not for {numbered(ENOUGH_BLOCKS * KEY_BLOCK, 'tokens')} "
            "and more, whose attention adds more gradients; rehearse a longer data.seq_len by itself"
        )
    lines += [f"{process} still ran after the end and was killed" for process in report.left_over]
    return [*lines, *_describe_verdict(report)]


def _describe_round(each: Round) -> list[str]:
    if each.checkpoints is None:
        return []
    found = each.checkpoints
    lines = [
        f"{each.directory}, {found.killed} compared with the straight {found.straight}: of "
        f"{numbered(found.num_tensors, 'tensors')} {len(found.tensors)} differ, of "
        f"{numbered(each.num_losses, 'losses')} {len(each.losses)}"
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
        lines.append(
            f"  only one of the two logs has the loss of {numbered(len(each.unlogged_steps), 'steps')}, such as {steps}"
        )
    if found.others:
        lines.append(
            f"  different, without effect on training: {numbered(len(found.others), 'other values')} (listed by --json)"
        )
    return lines


def _describe_verdict(report: Report) -> list[str]:
    if report.verdict == "equal":
        return ["equal: weights, optimizer, counters, data position and losses equal the straight run's, bit for bit"]
    if report.verdict == "too short":
        return [
            f"too short: the run ended after {len(report.kills):,} of {numbered(report.num_wanted, 'kills')}; the "
            "results are equal so far; give the run more or larger steps"
        ]
    if report.verdict == "failed":
        return [f"failed: {report.failure}"]
    return [f"different: {_explain_difference(report)}"]


def _explain_difference(report: Report) -> str:
    """Explains a difference: a loss that differs before the first resume shows that the recipe does not repeat."""
    advice = (
        "look for callbacks or data that draw from the clock, the system or an unseeded generator, and for kernels "
        "that do not repeat (trainer.deterministic: auto takes no others)"
    )
    for each in report.rounds:
        before_any_resume = [loss for loss in each.losses if loss.start == 1]
        if before_any_resume:
            step = before_any_resume[0].step
            return f"the loss of step {step} differs before the first resume: the recipe is not deterministic; {advice}"
    return f"the losses agree up to the first resume: the checkpoint may lack state that the recipe needs; or {advice}"
