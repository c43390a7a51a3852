"""The tables, the record and the page of `python -m benchmarks checkpoint`."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.checkpoint_modes import BASELINE_SPARING, OVERLAPPED, WITHOUT_PLAN_CACHE
from benchmarks.checkpoint_results import INTERVAL_MINUTES, ModeResult, ModeRun
from benchmarks.pairs import PairedRatio

GOALS = {"cpu": (0.12, 0.002), "cuda": (0.10, 0.020)}
"""Goals of process-overlapped by device: the largest overhead of the mean step, and a bound of a save's stall in
seconds."""

TRAINING_COLUMNS = (
    "mode",
    "mean step s",
    "median step s",
    "overhead (95%)",
    "median overhead",
    "tokens/s",
    "stall ms: median, longest",
    "overhead during a write",
    *(f"a save every {minutes} min" for minutes in INTERVAL_MINUTES),
)
SAVE_COLUMNS = (
    "mode",
    "first save: stall s, complete after s",
    "begin ms",
    "stall logged by the callback ms",
    "complete after s",
    "continues after the turn s",
    "MB/s",
    "bytes of state",
    "bytes per parameter",
    "peak memory MiB",
)


def build_tables(title: str, results: Mapping[str, ModeResult]) -> list[Table]:
    """Returns tables for a terminal: the overhead of training, and the saves."""
    training, saves = Table(*TRAINING_COLUMNS, title=title), Table(*SAVE_COLUMNS)
    for table in (training, saves):
        table.columns[0].no_wrap = True
    for name, result in results.items():
        training.add_row(*_training_row(name, result))
        saves.add_row(*_save_row(name, result))
    return [training, saves]


def _training_row(name: str, result: ModeResult) -> list[str]:
    save = result.save
    stall, beside = "", ""
    overheads = [""] * len(INTERVAL_MINUTES)
    if save is not None:
        stall = f"{1e3 * save.stall_seconds:,.1f}, {1e3 * save.max_stall_seconds:,.1f}"
        beside = "" if save.steps_beside_ratio is None else _format_overhead(save.steps_beside_ratio)
        overheads = [f"{share:+.2%}" for share in save.overhead_by_minutes.values()]
    return [
        name,
        f"{result.mean_step_seconds:.3f}",
        f"{result.median_step_seconds:.3f}",
        _format_overhead(result.mean_step_ratio),
        f"{result.median_step_ratio.median - 1:+,.1%}",
        f"{result.tokens_per_second:,.0f}",
        stall,
        beside,
        *overheads,
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
        return [name, *[""] * (len(SAVE_COLUMNS) - 2), memory]
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
        replanned = results.get(WITHOUT_PLAN_CACHE)
        if replanned is not None and replanned.save is not None:
            findings.append(
                f"starting a save takes {1e3 * overlapped.save.begin_seconds:.1f} ms with the plan kept from the "
                f"first save, {1e3 * replanned.save.begin_seconds:.1f} ms if the ranks make a plan for each save"
            )
    for name, result in results.items():
        if result.mean_step_ratio_sparing is not None and name != BASELINE_SPARING:
            findings.append(
                f"{name} over {BASELINE_SPARING}, on as many cores: {_format_overhead(result.mean_step_ratio_sparing)}"
            )
    return findings


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "missed"


def build_record(
    settings: Mapping[str, Any],
    runs: Sequence[ModeRun],
    results: Mapping[str, ModeResult],
    findings: Sequence[str],
) -> dict[str, Any]:
    """Returns the record in plain types.

    Args:
        settings: Options and hardware of the run, without a path or name of this machine.
        runs: The measurements of each mode.
        results: The results of each mode.
        findings: The findings in sentences.
    """
    return {
        "what": "training steps around a save, in turns of contenders; ratios are medians of pairs within a round",
        **settings,
        "python": platform.python_version(),
        "load_average_after": round(os.getloadavg()[0], 1),
        "findings": list(findings),
        "modes": {
            run.mode.name: {
                **asdict(run.mode),
                **asdict(results[run.mode.name]),
                "state_bytes": run.farewell.state_bytes,
                "first_turn": asdict(run.first),
                "turns": [asdict(turn) for turn in run.turns],
            }
            for run in runs
        },
    }


def format_page(
    title: str,
    settings: Mapping[str, Any],
    results: Mapping[str, ModeResult],
    runs: Sequence[ModeRun],
    findings: Sequence[str],
    picture: str,
) -> str:
    """Returns the record as a page of Markdown."""
    lines = [
        "# Saving during training",
        "",
        f"- command: `{settings['command']}`",
        f"- date: {settings['date']}",
        f"- hardware: {settings['hardware']}; threads each: {settings['num_threads']}",
        "- versions: " + ", ".join(f"{package} {number}" for package, number in settings["versions"].items()),
        f"- work: {title}",
        f"- {settings['pairs']} rounds, in rotating order, of {settings['every_n_steps']} windows each, the first of "
        "which ends with a save; overheads are medians over rounds, relative to the baseline of the same round",
        *(f"- {finding}" for finding in findings),
        *(f"- left out: {name} {reason}" for name, reason in settings["left_out"].items()),
        "",
        f"![step time around a save]({picture})",
        "",
        *_format_table(TRAINING_COLUMNS, [_training_row(*item) for item in results.items()]),
        "",
        *_format_table(SAVE_COLUMNS, [_save_row(*item) for item in results.items()]),
        "",
        *(f"- **{run.mode.name}**: {run.mode.summary}." for run in runs),
    ]
    return "\n".join(lines) + "\n"


def _format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
