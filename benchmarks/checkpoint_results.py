"""Computes the results of the modes of `python -m benchmarks checkpoint` from their turns."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.checkpoint_modes import BASELINE, BASELINE_SPARING
from benchmarks.pairs import PairedRatio, compare_pairs
from benchmarks.workers.checkpoint_protocol import Farewell, Mode, Turn

INTERVAL_MINUTES = (1, 5, 20)


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
        mean_step_ratio_sparing: Mean step divided by that of the baseline that leaves a core idle, for modes that also
            leave a core idle.
        peak_resident_bytes: Peak resident memory of a trainer's process.
        peak_device_bytes: Peak memory on the trainer's GPU.
        save: The results of the mode's saves; None for a baseline.
    """

    mean_step_seconds: float
    median_step_seconds: float
    tokens_per_second: float
    mean_step_ratio: PairedRatio
    median_step_ratio: PairedRatio
    mean_step_ratio_sparing: PairedRatio | None
    peak_resident_bytes: int
    peak_device_bytes: int | None
    save: SaveResult | None


def merge_ranks(turns: Sequence[Turn]) -> Turn:
    """Merges the turns of all ranks: rank 0's windows, the slowest rank's save, the largest memory."""
    first = turns[0]
    device_bytes = [turn.peak_device_bytes for turn in turns if turn.peak_device_bytes is not None]
    save_seconds = [turn.save_seconds for turn in turns if turn.save_seconds is not None]
    return replace(
        first,
        stall_seconds=max(turn.stall_seconds for turn in turns),
        begin_seconds=max(turn.begin_seconds for turn in turns),
        save_seconds=max(save_seconds, default=None),
        num_steps_beside=max(turn.num_steps_beside for turn in turns),
        wait_seconds=max(turn.wait_seconds for turn in turns),
        peak_resident_bytes=max(turn.peak_resident_bytes for turn in turns),
        peak_device_bytes=max(device_bytes, default=None),
    )


def summarise(runs: Sequence[ModeRun], num_parameters: int, tokens_per_step: int) -> dict[str, ModeResult]:
    """Returns the result of each mode.

    Args:
        runs: The runs of all modes, the baseline included.
        num_parameters: Number of parameters of the model.
        tokens_per_step: Tokens of one window over all ranks.
    """
    turns = {run.mode.name: run.turns for run in runs}
    return {
        run.mode.name: _summarise_one(
            run, turns[BASELINE], turns.get(BASELINE_SPARING), num_parameters, tokens_per_step
        )
        for run in runs
    }


def _summarise_one(
    run: ModeRun,
    baseline: Sequence[Turn],
    sparing: Sequence[Turn] | None,
    num_parameters: int,
    tokens_per_step: int,
) -> ModeResult:
    steps = [seconds for turn in run.turns for seconds in turn.step_seconds]
    mean_step_seconds = statistics.mean(steps)
    mean_ratio = compare_pairs(_means(run.turns), _means(baseline))
    device_bytes = [turn.peak_device_bytes for turn in run.turns if turn.peak_device_bytes is not None]
    return ModeResult(
        mean_step_seconds=mean_step_seconds,
        median_step_seconds=statistics.median(steps),
        tokens_per_second=tokens_per_step / mean_step_seconds,
        mean_step_ratio=mean_ratio,
        median_step_ratio=compare_pairs(_medians(run.turns), _medians(baseline)),
        mean_step_ratio_sparing=(
            compare_pairs(_means(run.turns), _means(sparing)) if run.mode.has_own_cores and sparing else None
        ),
        peak_resident_bytes=max(turn.peak_resident_bytes for turn in run.turns),
        peak_device_bytes=max(device_bytes, default=None),
        save=None if run.mode.saver == "none" else _summarise_saves(run, baseline, mean_ratio, num_parameters),
    )


def _means(turns: Sequence[Turn]) -> list[float]:
    return [statistics.mean(turn.step_seconds) for turn in turns]


def _medians(turns: Sequence[Turn]) -> list[float]:
    return [statistics.median(turn.step_seconds) for turn in turns]


def _summarise_saves(
    run: ModeRun, baseline: Sequence[Turn], mean_ratio: PairedRatio, num_parameters: int
) -> SaveResult:
    stalls = [turn.stall_seconds for turn in run.turns]
    own_stalls = [
        seconds for turn in run.turns if (seconds := run.farewell.stall_seconds_by_step.get(str(turn.step))) is not None
    ]
    save_seconds = statistics.median(turn.save_seconds for turn in run.turns if turn.save_seconds is not None)
    file_bytes = run.turns[-1].file_bytes
    beside = compare_steps_beside(run.turns, baseline)
    wait_seconds = statistics.median(turn.wait_seconds for turn in run.turns)
    extra_seconds = count_extra_seconds(
        turn_ratio=mean_ratio.median,
        baseline_turn_seconds=statistics.median(sum(turn.step_seconds) for turn in baseline),
        beside_ratio=1.0 if beside is None else beside.median,
        wait_seconds=wait_seconds,
    )
    assert run.first.save_seconds is not None
    return SaveResult(
        stall_seconds=statistics.median(stalls),
        max_stall_seconds=max(stalls),
        own_stall_seconds=statistics.median(own_stalls) if own_stalls else None,
        begin_seconds=statistics.median(turn.begin_seconds for turn in run.turns),
        first_stall_seconds=run.first.stall_seconds,
        first_save_seconds=run.first.save_seconds,
        save_seconds=save_seconds,
        file_bytes=file_bytes,
        tensor_bytes=run.farewell.tensor_bytes,
        bytes_per_parameter=file_bytes / num_parameters,
        bytes_per_second=file_bytes / save_seconds,
        steps_beside_ratio=beside,
        wait_seconds=wait_seconds,
        extra_seconds=extra_seconds,
        overhead_by_minutes={minutes: extra_seconds / (60 * minutes) for minutes in INTERVAL_MINUTES},
    )


def compare_steps_beside(turns: Sequence[Turn], baseline: Sequence[Turn]) -> PairedRatio | None:
    """Compares windows during a write with the baseline's same windows; None if no window ran during a write."""
    ours, theirs = [], []
    for turn, other in zip(turns, baseline, strict=True):
        if turn.num_steps_beside:
            beside = slice(1, 1 + turn.num_steps_beside)
            ours.append(statistics.mean(turn.step_seconds[beside]))
            theirs.append(statistics.mean(other.step_seconds[beside]))
    return compare_pairs(ours, theirs) if ours else None


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
