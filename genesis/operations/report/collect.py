"""Gathers what a report shows of a run from the files in its directory. It takes no lock and disturbs no training.

A file that cannot be read leaves its part of the report out, with a note; only a run without a log is refused.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from genesis.base.determinism import note_unrepeatable
from genesis.base.errors import UserError, numbered, printable
from genesis.base.run_directory import RUNS_NAME, RunDirectory
from genesis.evaluate.results import Result, read_results
from genesis.operations.report.log import RunLog, read_log
from genesis.operations.report.runs import RunSummary, parse_recipe, summarise_run
from genesis.operations.supervise.crashes import CrashRecord, read_crashes
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.base.events import Event
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import open_file

MAX_RUNS: Final = 8
"""More curves in a chart cannot be distinguished."""
MAX_SAMPLES: Final = 6
_MAX_RECIPE_BYTES: Final = 1 << 18
_MAX_SAMPLE_BYTES: Final = 1 << 20
_MAX_SAMPLE_CHARACTERS: Final = 2000
_MAX_TURNS: Final = 24


@dataclass(frozen=True)
class Sample:
    """A text that the model wrote in training."""

    title: str
    text: str


@dataclass(frozen=True)
class Episode:
    """An episode of a rollout: its turns, each with who wrote it and its reward, as texts."""

    title: str
    turns: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Run:
    """What a report shows of a run.

    Attributes:
        name: Its name in legends, unique in the report.
        path: Its directory.
        summary: State, step, tokens, loss, checkpoints, size.
        log: The metrics.
        events: All events by time.
        crashes: The supervisor's records.
        results: Evaluations.
        samples: Texts that the model wrote.
        episodes: Episodes of the first and the newest rollout, by their files.
        recipe: The first resolved recipe; empty if there is none.
        num_recipes: Number of starts with a recipe.
        notes: What the run gave up, and what was left out and why.
    """

    name: str
    path: Path
    summary: RunSummary
    log: RunLog
    events: Sequence[Event] = ()
    crashes: Sequence[CrashRecord] = ()
    results: Sequence[Result] = ()
    samples: Sequence[Sample] = ()
    episodes: Mapping[Path, Sequence[Episode]] = field(default_factory=dict)
    recipe: str = ""
    num_recipes: int = 0
    notes: list[str] = field(default_factory=list)


def find_run(given: Path) -> Path:
    """Returns the directory of a run that a user names by its path or its name in `runs/`.

    Raises:
        UserError: It does not exist; the message names the nearest run.
    """
    for path in (given, Path(RUNS_NAME) / given):
        if path.is_dir():
            return RunDirectory.of(path).path
    known = _list_names(given.parent) | _list_names(Path(RUNS_NAME))
    near = difflib.get_close_matches(given.name, sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "`genesis runs` lists the runs under a directory"
    raise UserError(f"there is no run {str(given)!r}; {hint}")


def _list_names(directory: Path) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(directory) if entry.is_dir()}
    except OSError:
        return set()


def collect_runs(paths: Sequence[Path]) -> list[Run]:
    """Returns the runs with names by which they can be distinguished.

    Raises:
        UserError: There are too many, one is named twice, or one has no log.
    """
    if len(paths) > MAX_RUNS:
        raise UserError(f"{numbered(len(paths), 'runs')} are too many for one report; give at most {MAX_RUNS}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a run is given twice; give each run once")
    names = [_name(path.resolve()) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_collect(path, printable(name)) for path, name in zip(paths, names, strict=True)]


def _name(path: Path) -> str:
    """Returns the part of a path below `runs`, or its last name."""
    parts = path.parts
    below = parts[len(parts) - parts[::-1].index(RUNS_NAME) :] if RUNS_NAME in parts else ()
    return "/".join(below) or path.name


def _collect(path: Path, name: str) -> Run:
    run, notes = RunDirectory(path), []
    events = read_events(path)
    if run.metrics.exists():
        log = read_log(run.metrics)
    elif events:
        log = RunLog(notes=["The run has no metrics.csv yet."])
    else:
        raise UserError(
            f"{path} has no metrics.csv and no events, so there is nothing to report; give the directory of a run that "
            "has trained with its log (trainer.logger is not false)"
        )
    try:
        results = read_results(run.evaluations)
    except (UserError, OSError) as error:
        results = []
        notes.append(f"Evaluations are left out: {error}")
    recipe = _read_recipe(run.recipe, notes)
    episodes = _read_episodes(run.rollouts, notes)
    return Run(
        name=name,
        path=path,
        summary=summarise_run(path),
        log=log,
        events=events,
        crashes=read_crashes(path),
        results=results,
        samples=[] if episodes else _read_samples(run.rollouts, notes),
        episodes=episodes,
        recipe=recipe,
        num_recipes=bool(recipe) + sum(1 for _ in path.glob("config.resume-*.yaml")),
        notes=[*_note_recipes([recipe, *_read_resumed(path)]), *log.notes, *notes],
    )


def parse_recipe_text(text: str) -> Any:
    """Returns what a recipe holds; None if it cannot be parsed, because anything may stand in the file."""
    try:
        return parse_recipe(text.encode())
    except (ValueError, yaml.YAMLError, RecursionError):
        return None


def _read_resumed(path: Path) -> list[str]:
    """Returns the recipes of all starts but the first; one that cannot be read is left out."""
    return [_read_recipe(file, []) for file in sorted(path.glob("config.resume-*.yaml"))]


def _note_recipes(texts: Sequence[str]) -> list[str]:
    recipes = [recipe for recipe in map(parse_recipe_text, texts) if isinstance(recipe, dict)]
    return [f"{note}." for note in dict.fromkeys(map(note_unrepeatable, recipes)) if note is not None]


def _read_recipe(path: Path, notes: list[str]) -> str:
    if not path.is_file():
        return ""
    try:
        with open_file(path) as file:
            data = file.read(_MAX_RECIPE_BYTES + 1)
    except OSError as error:
        notes.append(f"The recipe is left out: {error.strerror}.")
        return ""
    if len(data) > _MAX_RECIPE_BYTES:
        notes.append(f"The recipe was cut after {_MAX_RECIPE_BYTES:,} bytes.")
    return data[:_MAX_RECIPE_BYTES].decode("utf-8", errors="replace")


def _read_samples(directory: Path, notes: list[str]) -> list[Sample]:
    """Returns the first answers of the newest rollout."""
    newest = max(directory.glob("*.jsonl"), key=lambda path: path.name, default=None)
    if newest is None or not newest.is_file():
        return []
    return [sample for line in _read_lines(newest, notes) if (sample := _decode_sample(line)) is not None]


def _read_lines(path: Path, notes: list[str]) -> list[bytes]:
    """Returns the first lines of a rollout's file."""
    try:
        with open_file(path) as file:
            return file.read(_MAX_SAMPLE_BYTES).split(b"\n")[:MAX_SAMPLES]
    except OSError as error:
        notes.append(f"Samples are left out: {error.strerror}.")
        return []


def _read_episodes(directory: Path, notes: list[str]) -> dict[Path, list[Episode]]:
    """Returns the first episodes of the first rollout and of the newest; none if answers have no turns."""
    files = sorted(path for path in directory.glob("*.jsonl") if path.is_file())
    read = {path: _read_lines(path, notes) for path in dict.fromkeys([*files[:1], *files[-1:]])}
    decoded = {path: [one for line in lines if (one := _decode_episode(line))] for path, lines in read.items()}
    return {path: episodes for path, episodes in decoded.items() if episodes}


def _decode_episode(line: bytes) -> Episode | None:
    try:
        content: Any = load_json(line)
    except (ValueError, RecursionError):
        return None
    turns = content.get("turns") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    shown = []
    for turn in [*_list_asked(content), *turns][:_MAX_TURNS]:
        calls = f"\n{json.dumps(turn['tool_calls'], ensure_ascii=False)}" if "tool_calls" in turn else ""
        reward = f", reward {turn['reward']:g}" if isinstance(turn.get("reward"), int | float) else ""
        text = f"{turn.get('content', '')}{calls}"[:_MAX_SAMPLE_CHARACTERS]
        shown.append((printable(f"{turn.get('role')}{reward}"[:_MAX_SAMPLE_CHARACTERS]), text))
    parts = [f"{name} {content[name]}" for name in ("prompt", "answer", "reward", "ending") if name in content]
    parts += [f"{name} {value:g}" for name, value in content.items() if _is_reward(name, value)]
    return Episode(printable(", ".join(parts)[:_MAX_SAMPLE_CHARACTERS]), shown)


def _list_asked(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages before the model's first turn."""
    messages = content.get("messages")
    return [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []


def _is_reward(name: str, value: Any) -> bool:
    return name.startswith("reward_") and isinstance(value, int | float)


def _decode_sample(line: bytes) -> Sample | None:
    try:
        content: Any = load_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        return None
    parts = [f"{name} {content[name]}" for name in ("prompt", "answer", "reward") if name in content]
    return Sample(printable(", ".join(parts)[:_MAX_SAMPLE_CHARACTERS]), content["text"][:_MAX_SAMPLE_CHARACTERS])
