"""The figures that a reader looks for first."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import yaml

from genesis.base.errors import numbered
from genesis.base.run_directory import RunDirectory
from genesis.operations.plan.state import build_model
from genesis.operations.report.collect import Run
from genesis.operations.report.history import find_attempts
from genesis.operations.report.memory import read_run_recipe
from genesis.operations.supervise.goodput import format_seconds
from genesis_callbacks.base.errors import printable
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.run_directory import MANIFEST_NAME, is_checkpoint_name
from genesis_callbacks.base.untrusted import open_file
from genesis_callbacks.symptoms import summarize_series

_MAX_MANIFEST_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Tile:
    """One figure.

    Attributes:
        label: What it is.
        value: The figure; empty where it is not known.
        note: A second line.
        is_bad: Whether it stands for something that went wrong.
    """

    label: str
    value: str
    note: str = ""
    is_bad: bool = False


def plan_tiles(run: Run) -> list[Tile]:
    """Returns held-out loss, training loss, speed, duration, parameters, device and interruptions of a run."""
    medians = summarize_series(run.log.sample())
    seconds = sum(attempt.end_seconds - attempt.begin_seconds for attempt in find_attempts(run))
    speed, mfu = medians.get("train/tokens_per_second"), medians.get("train/mfu")
    return [
        _loss(run, "Held-out loss", "validation/loss"),
        _loss(run, "Training loss", "train/loss"),
        Tile("Tokens per second", "" if speed is None else f"{speed:,.0f}", "" if mfu is None else f"MFU {mfu:.1%}"),
        Tile("Training time", format_seconds(seconds) if seconds >= 1 else ""),
        Tile("Parameters", _count_parameters(run), run.summary.recipe),
        Tile("Device", *_find_device(run)),
        count_interruptions(run),
    ]


def _loss(run: Run, label: str, key: str) -> Tile:
    series = run.log.series.get(key)
    if series is None or series.last is None:
        return Tile(label, "")
    note = f"at step {series.last.step:,.0f}"
    best = min(series.points, key=lambda point: point.value)
    if key.startswith("validation") and best.value < series.last.value:
        note += f"; best {best.value:.4f} at {best.step:,.0f}"
    return Tile(label, f"{series.last.value:.4f}", note)


def _count_parameters(run: Run) -> str:
    try:
        recipe = read_run_recipe(run)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, yaml.YAMLError):
        return ""  # the chart of the memory's plan says why
    number = sum(parameter.num_elements for parameter in build_model(recipe.workload).parameters)
    for bound, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= bound:
            return f"{number / bound:.3g}{unit}"
    return str(number)


def _find_device(run: Run) -> tuple[str, str]:
    """Returns the device by the newest checkpoint's manifest, and the number of ranks."""
    directory = RunDirectory(run.path).checkpoints
    names = sorted(path.name for path in directory.glob("step-*") if is_checkpoint_name(path.name))
    try:
        with open_file(directory / names[-1] / MANIFEST_NAME) as file:
            content: Any = load_json(file.read(_MAX_MANIFEST_BYTES))
        versions, ranks = content["versions"], int(content["world_size"])
        device = printable(str(versions.get("device", "CPU")))[:60]
    except (IndexError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", ""  # no checkpoint, one that was removed in between, or a forged manifest
    return device, "" if ranks == 1 else f"{numbered(ranks, 'ranks')}"


def count_interruptions(run: Run) -> Tile:
    """Returns how often the run was killed, and how often it failed with an error."""
    ends = Counter(attempt.end for attempt in find_attempts(run))
    words = {"killed": ("kill", "kills"), "failed": ("error", "errors")}
    parts = [f"{ends[end]} {name[ends[end] != 1]}" for end, name in words.items() if ends[end]]
    number = sum(ends.values())
    note = numbered(number, "starts") if number else ""
    return Tile("Interruptions", ", ".join(parts) or ("none" if number else ""), note, bool(parts))
