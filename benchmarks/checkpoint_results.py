"""Computes the results of the modes of the benchmark `checkpoint` from their turns, and shows them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.harness import PairedRatio, compare_pairs, format_page, format_table
from benchmarks.workers.checkpoint_task import Farewell, Mode
from benchmarks.workers.protocol import Burst

BASELINE, OVERLAPPED = "baseline", "process-overlapped"
INTERVAL_MINUTES: Final = (1, 5, 20)
GOALS: Final = {"cpu": (0.12, 0.002), "cuda": (0.10, 0.020)}
"""Goals of process-overlapped by device: the largest overhead of the mean step, and a bound of a save's stall in
seconds."""


@dataclass(frozen=True)
class Turn:
    """A turn of a mode: some windows, the first of which ends with a save.

    Args:
        step_seconds: Of rank 0: from each window's begin to the next; the first window ends with the save.
        peak_resident_bytes: Peak resident memory of a trainer's process since its start.
        peak_device_bytes: Peak memory of tensors on the GPU since the start; None on the CPU.
        step: Lightning's global step of the save.
        stall_seconds: Time in the hooks of the saving callback from the save on, measured around the hooks.
        begin_seconds: Time in the hook in which the save began.
        save_seconds: From that hook's begin until the save was complete; None without a save.
        turn_seconds_since_begin: From that hook's begin to the turn's end.
        file_bytes: Size of all files of the checkpoint.
    """

    step_seconds: list[float]
    peak_resident_bytes: int
    peak_device_bytes: int | None = None
    step: int = 0
    stall_seconds: float = 0.0
    begin_seconds: float = 0.0
    save_seconds: float | None = None
    turn_seconds_since_begin: float = 0.0
    file_bytes: int = 0

    @property
    def wait_seconds(self) -> float:
        """How long the save continued after the turn."""
        return max(0.0, (self.save_seconds or 0.0) - self.turn_seconds_since_begin)

    @property
    def num_steps_beside(self) -> int:
        """Number of later windows that began before the save was complete."""
        later = self.step_seconds[1:]
        begins = accumulate(later[:-1], initial=self.turn_seconds_since_begin - sum(later))
        return sum(self.save_seconds is not None and begin < self.save_seconds for begin in begins)


def merge_ranks(bursts: Sequence[Burst]) -> Turn:
    """Merges the bursts of all ranks: rank 0's windows, the slowest rank's save, the largest memory."""
    figures = [burst.figures for burst in bursts]
    device_bytes = [burst.peak_device_bytes for burst in bursts if burst.peak_device_bytes is not None]
    slowest: dict[str, Any] = {name: max(of_rank[name] for of_rank in figures) for name in figures[0]}
    slowest |= {name: figures[0][name] for name in ("turn_seconds_since_begin", "file_bytes") if name in figures[0]}
    resident = max(burst.peak_resident_bytes for burst in bursts)
    return Turn(bursts[0].step_seconds, resident, max(device_bytes, default=None), **slowest)


@dataclass(frozen=True)
class ModeRun:
    """All measurements of one mode, over its ranks.

    Args:
        mode: The mode.
        first: The turn with the mode's first save, before the rounds.
        turns: A turn for each round.
        farewell: The final message of rank 0.
    """

    mode: Mode
    first: Turn
    turns: Sequence[Turn]
    farewell: Farewell


@dataclass(frozen=True)
class SaveResult:
    """The results of a mode's saves. Figures of one save are medians over rounds, without the first save.

    Args:
        stall_seconds: Time in the hooks of the saving callback during one turn, measured around the hooks.
        max_stall_seconds: The longest such time of all turns.
        own_stall_seconds: The stall that the callback itself logs; None if the callback logs none.
        begin_seconds: Time in the hook in which a save begins.
        first_stall_seconds: The first save's stall, which includes all start-up work.
        first_save_seconds: From the first save's begin until it was complete.
        save_seconds: From a save's begin until it is complete.
        file_bytes: Size of all files of a checkpoint.
        tensor_bytes: Size of the parameters and optimizer state in a checkpoint.
        bytes_per_parameter: `file_bytes` divided by the model's number of parameters.
        bytes_per_second: `file_bytes` divided by `save_seconds`.
        steps_beside_ratio: Time of windows during a write divided by the baseline's; None if no window ran during a
            write.
        wait_seconds: How long a save continues after its turn; a save due immediately after the turn would wait so
            long.
        extra_seconds: Time that a save adds to the training.
        overhead_by_minutes: Minutes between saves to the resulting overhead, as a share of the training time.
    """

    stall_seconds: float
    max_stall_seconds: float
    own_stall_seconds: float | None
    begin_seconds: float
    first_stall_seconds: float
    first_save_seconds: float
    save_seconds: float
    file_bytes: int
    tensor_bytes: int
    bytes_per_parameter: float
    bytes_per_second: float
    steps_beside_ratio: PairedRatio | None
    wait_seconds: float
    extra_seconds: float
    overhead_by_minutes: dict[int, float]


@dataclass(frozen=True)
class ModeResult:
    """The results of one mode.

    Args:
        mean_step_seconds: Mean over all windows of the rounds, the saves' stalls included.
        median_step_seconds: Median over the same windows.
        tokens_per_second: Tokens of all ranks per second, by the mean step.
        mean_step_ratio: Mean step of a turn divided by the baseline's in the same round; 1 is no overhead.
        median_step_ratio: Median step of a turn divided by the baseline's.
        peak_resident_bytes: Peak resident memory of a trainer's process.
        peak_device_bytes: Peak memory on the trainer's GPU.
        save: The results of the mode's saves; None for a baseline.
    """

    mean_step_seconds: float
    median_step_seconds: float
    tokens_per_second: float
    mean_step_ratio: PairedRatio
    median_step_ratio: PairedRatio
    peak_resident_bytes: int
    peak_device_bytes: int | None
    save: SaveResult | None


def summarise(runs: Sequence[ModeRun], tokens_per_step: int) -> dict[str, ModeResult]:
    """Returns the result of each mode; the runs are those of all modes, the baseline included."""
    turns = {run.mode.name: run.turns for run in runs}
    return {run.mode.name: _summarise_one(run, turns[BASELINE], tokens_per_step) for run in runs}


def _summarise_one(run: ModeRun, baseline: Sequence[Turn], tokens_per_step: int) -> ModeResult:
    steps = [seconds for turn in run.turns for seconds in turn.step_seconds]
    mean_ratio = compare_pairs(_means(run.turns), _means(baseline))
    device_bytes = [turn.peak_device_bytes for turn in run.turns if turn.peak_device_bytes is not None]
    return ModeResult(
        mean_step_seconds=statistics.mean(steps),
        median_step_seconds=statistics.median(steps),
        tokens_per_second=tokens_per_step / statistics.mean(steps),
        mean_step_ratio=mean_ratio,
        median_step_ratio=compare_pairs(_medians(run.turns), _medians(baseline)),
        peak_resident_bytes=max(turn.peak_resident_bytes for turn in run.turns),
        peak_device_bytes=max(device_bytes, default=None),
        save=None if run.mode.saver == "none" else _summarise_saves(run, baseline, mean_ratio.median),
    )


def _means(turns: Sequence[Turn]) -> list[float]:
    return [statistics.mean(turn.step_seconds) for turn in turns]


def _medians(turns: Sequence[Turn]) -> list[float]:
    return [statistics.median(turn.step_seconds) for turn in turns]


def _summarise_saves(run: ModeRun, baseline: Sequence[Turn], turn_ratio: float) -> SaveResult:
    own = run.farewell.stall_seconds_by_step
    own_stalls = [own[str(turn.step)] for turn in run.turns if str(turn.step) in own]
    save_seconds = statistics.median(turn.save_seconds for turn in run.turns if turn.save_seconds is not None)
    file_bytes = run.turns[-1].file_bytes
    beside = compare_steps_beside(run.turns, baseline)
    wait_seconds = statistics.median(turn.wait_seconds for turn in run.turns)
    extra_seconds = count_extra_seconds(
        turn_ratio=turn_ratio,
        baseline_turn_seconds=statistics.median(sum(turn.step_seconds) for turn in baseline),
        beside_ratio=1.0 if beside is None else beside.median,
        wait_seconds=wait_seconds,
    )
    assert run.first.save_seconds is not None
    return SaveResult(
        stall_seconds=statistics.median(turn.stall_seconds for turn in run.turns),
        max_stall_seconds=max(turn.stall_seconds for turn in run.turns),
        own_stall_seconds=statistics.median(own_stalls) if own_stalls else None,
        begin_seconds=statistics.median(turn.begin_seconds for turn in run.turns),
        first_stall_seconds=run.first.stall_seconds,
        first_save_seconds=run.first.save_seconds,
        save_seconds=save_seconds,
        file_bytes=file_bytes,
        tensor_bytes=run.farewell.tensor_bytes,
        bytes_per_parameter=file_bytes / run.farewell.num_parameters,
        bytes_per_second=file_bytes / save_seconds,
        steps_beside_ratio=beside,
        wait_seconds=wait_seconds,
        extra_seconds=extra_seconds,
        overhead_by_minutes={minutes: extra_seconds / (60 * minutes) for minutes in INTERVAL_MINUTES},
    )


def compare_steps_beside(turns: Sequence[Turn], baseline: Sequence[Turn]) -> PairedRatio | None:
    """Compares windows during a write with the baseline's same windows; None if no window ran during a write."""
    pairs = [(turn, other) for turn, other in zip(turns, baseline, strict=True) if turn.num_steps_beside]
    ours, theirs = (
        [statistics.mean(pair[side].step_seconds[1 : 1 + pair[0].num_steps_beside]) for pair in pairs]
        for side in (0, 1)
    )
    return compare_pairs(ours, theirs) if pairs else None


def count_extra_seconds(
    *, turn_ratio: float, baseline_turn_seconds: float, beside_ratio: float, wait_seconds: float
) -> float:
    """Returns the seconds that one save adds to the training.

    The result is the cost of the save in its turn plus, if the write continued after the turn, the cost that the write
    would have had for the windows there.

    Args:
        turn_ratio: Time of a turn with a save divided by that of a turn without.
        baseline_turn_seconds: Time of a turn without a save.
        beside_ratio: Time of a window during a write divided by that of a window without.
        wait_seconds: How long the write continued after the turn.

    Example:
        >>> count_extra_seconds(turn_ratio=1.25, baseline_turn_seconds=8.0, beside_ratio=2.0, wait_seconds=4.0)
        4.0
    """
    after_turn_seconds = wait_seconds * max(0.0, 1.0 - 1.0 / beside_ratio)
    return (turn_ratio - 1.0) * baseline_turn_seconds + after_turn_seconds


# ---- the report

_TRAINING_COLUMNS: Final = (
    *("mode", "mean step s", "median step s", "overhead (95%)", "median overhead", "tokens/s"),
    *("stall ms: median, longest", "overhead during a write"),
    *(f"a save every {minutes} min" for minutes in INTERVAL_MINUTES),
)
_SAVE_COLUMNS: Final = (
    *("mode", "first save: stall s, complete after s", "begin ms", "stall logged by the callback ms"),
    *("complete after s", "continues after the turn s", "MB/s", "bytes of state", "bytes per parameter"),
    "peak memory MiB",
)


def _training_row(name: str, result: ModeResult) -> list[str]:
    save = result.save
    of_saves = [""] * (2 + len(INTERVAL_MINUTES))
    if save is not None:
        of_saves = [
            f"{1e3 * save.stall_seconds:,.1f}, {1e3 * save.max_stall_seconds:,.1f}",
            "" if save.steps_beside_ratio is None else _format_overhead(save.steps_beside_ratio),
            *(f"{share:+.2%}" for share in save.overhead_by_minutes.values()),
        ]
    return [
        name,
        f"{result.mean_step_seconds:.3f}",
        f"{result.median_step_seconds:.3f}",
        _format_overhead(result.mean_step_ratio),
        f"{result.median_step_ratio.median - 1:+,.1%}",
        f"{result.tokens_per_second:,.0f}",
        *of_saves,
    ]


def _format_overhead(ratio: PairedRatio) -> str:
    interval = "" if ratio.low is None or ratio.high is None else f" ({ratio.low - 1:+,.1%} to {ratio.high - 1:+,.1%})"
    return f"{ratio.median - 1:+,.1%}{interval}"


def _save_row(name: str, result: ModeResult) -> list[str]:
    memory = f"{result.peak_resident_bytes / 2**20:,.0f}"
    if result.peak_device_bytes is not None:
        memory += f", on the GPU {result.peak_device_bytes / 2**20:,.0f}"
    save = result.save
    if save is None:
        return [name, *[""] * (len(_SAVE_COLUMNS) - 2), memory]
    return [
        name,
        f"{save.first_stall_seconds:.3f}, {save.first_save_seconds:.2f}",
        f"{1e3 * save.begin_seconds:,.1f}",
        "" if save.own_stall_seconds is None else f"{1e3 * save.own_stall_seconds:,.1f}",
        f"{save.save_seconds:.2f}",
        f"{save.wait_seconds:.2f}",
        f"{save.bytes_per_second / 1e6:,.0f}",
        f"{save.tensor_bytes:,}",
        f"{save.bytes_per_parameter:.2f}",
        memory,
    ]


def list_findings(runs: Sequence[ModeRun], results: Mapping[str, ModeResult], device: str) -> list[str]:
    """Returns a sentence for each finding about the modes of this run."""
    findings = [
        f"{run.mode.name} saved {run.farewell.tensor_bytes:,} bytes of a state of {run.farewell.state_bytes:,}: its "
        "figures are not those of a whole save"
        for run in runs
        if run.mode.saver != "none" and run.farewell.tensor_bytes != run.farewell.state_bytes
    ]
    overlapped = results.get(OVERLAPPED)
    if overlapped is not None and overlapped.save is not None:
        max_overhead, max_stall_seconds = GOALS[device]
        overhead, stall_seconds = overlapped.mean_step_ratio.median - 1, overlapped.save.stall_seconds
        findings.append(
            f"{OVERLAPPED} on {device}: overhead {overhead:+,.1%}, {_verdict(overhead <= max_overhead)} "
            f"(at most +{max_overhead:.0%}); stall {1e3 * stall_seconds:.1f} ms, "
            f"{_verdict(stall_seconds < max_stall_seconds)} (below {1e3 * max_stall_seconds:g} ms)"
        )
    return findings


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "missed"


def describe_mode(run: ModeRun, result: ModeResult) -> dict[str, Any]:
    """Returns a mode's entry in the record."""
    turns = {"first_turn": asdict(run.first), "turns": [asdict(turn) for turn in run.turns]}
    return {**asdict(run.mode), **asdict(result), "state_bytes": run.farewell.state_bytes, **turns}


def format_record(record: Mapping[str, Any], results: Mapping[str, ModeResult], picture: str | None) -> str:
    """Returns the record as a page of Markdown, with a link to its picture."""
    notes = [
        f"work: {record['work']}; threads each: {record['workload']['num_threads']}",
        f"{record['pairs']} rounds, in rotating order, of {record['every_n_steps']} windows each, the first of "
        "which ends with a save; overheads are medians over rounds, relative to the baseline of the same round",
        *record["findings"],
        *(f"left out: {name} {reason}" for name, reason in record["left_out"].items()),
    ]
    body = [
        *([] if picture is None else [f"![step time around a save]({picture})", ""]),
        *format_table(_TRAINING_COLUMNS, [_training_row(*item) for item in results.items()]),
        *format_table(_SAVE_COLUMNS, [_save_row(*item) for item in results.items()]),
        *(f"- **{name}**: {mode['summary']}." for name, mode in record["modes"].items()),
    ]
    return format_page("Saving during training", record, notes, body)


def plot_steps(runs: Sequence[ModeRun], title: str, out: Path) -> None:
    """Writes a plot of the median step time at each position in a turn, with a line for each mode, to `out` (PNG)."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    num_windows = len(runs[0].first.step_seconds)
    for run in runs:
        medians = [statistics.median(turn.step_seconds[place] for turn in run.turns) for place in range(num_windows)]
        is_baseline = run.mode.name == BASELINE
        style = {"color": "black", "linestyle": "--"} if is_baseline else {"marker": "o", "markersize": 4}
        axes.plot(range(num_windows), medians, label=run.mode.name, linewidth=1.5, **style)
    axes.set(
        xlabel="windows after the one that ends with the save",
        ylabel="seconds (median over rounds)",
        title=f"Step time around a save\n{title}",
        xticks=range(num_windows),
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)
