"""Finds the data of a run from any working directory.

A recipe names the corpus (or the tokenizer and sources of a stream or of prompts) as the user wrote the path, mostly
relative to the working directory of the run. A run therefore also records the same path relative to its own directory.
A path of a recipe is searched for in this order, and the first location that exists is used:

1. the path in the recipe, relative to the current working directory
2. the path in `RUN/data_paths.json` (earlier versions: `data_places.json`), relative to the run's directory
3. the path in the recipe, relative to the directory that the run was started from, if RUN still ends with the recipe's
   `run_dir`; this finds the data of runs without that file

This module only finds paths. The code that opens the data compares hashes to decide whether they are the run's own.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_file

TOKENIZER_PATHS: Final = (("data", "corpus"), ("data", "stream", "tokenizer"), ("data", "prompts", "tokenizer"))
"""The keys of a recipe that may lead to the tokenizer of the run, in the order in which they are tried."""
SOURCE_LISTS: Final = ("stream", "prompts")
"""The sections of `data` that list sources."""
_MAX_BYTES: Final = 1 << 20


class Candidate(NamedTuple):
    """A location that a path of a recipe may mean, and the reason for trying that location."""

    path: Path
    reason: str


def read_path(recipe: Mapping[str, Any], *keys: str) -> str | None:
    """Returns the path under the nested `keys` of a recipe, None if the recipe has no text there.

    Example:
        >>> read_path({"data": {"corpus": "corpora/web"}}, "data", "corpus")
        'corpora/web'
    """
    content = _read(recipe, *keys)
    return content if isinstance(content, str) else None


def _read(recipe: Mapping[str, Any], *keys: str) -> Any:
    content: Any = recipe
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def record_paths(run_dir: Path, recipe: Mapping[str, Any]) -> None:
    """Records the paths of a recipe relative to the run's directory, and keeps earlier records of other paths."""
    named = [read_path(recipe, *keys) for keys in TOKENIZER_PATHS]
    listed = [source for kind in SOURCE_LISTS for source in _read(recipe, "data", kind, "sources") or ()]
    sources = [path for source in listed for path in source["paths"] if is_local(path)]
    base = run_dir.resolve()  # behind a symbolic link, ".." means the parent of the link's target
    paths = {
        given: os.path.relpath(given, base) for given in (*named, *sources) if given is not None and _exists(given)
    }
    if paths:
        records = {**_read_records(run_dir), **paths}
        replace_file(RunDirectory(run_dir).data_paths, json.dumps(records, indent=1).encode())


def is_local(given: str) -> bool:
    """Returns whether a source's path is a local path, whose meaning may depend on the working directory."""
    return "://" not in given and "::" not in given


def find_source_path(given: str, run_dir: Path, recipe: Mapping[str, Any], *, name: str) -> str:
    """Returns the location of a path of a source `name` of a run; the path itself if that exists.

    Raises:
        UserError: None of the locations exists; the message lists them.
    """
    if not is_local(given) or _exists(given):
        return given
    remedy = "give the sources in the recipe"
    return os.path.relpath(find_path(given, run_dir, recipe, what=f"the source {name} at", remedy=remedy))


def list_candidates(given: str, run_dir: Path, recipe: Mapping[str, Any]) -> list[Candidate]:
    """Returns the locations at which the path `given` of a run's recipe is searched for, in order."""
    candidates = [Candidate(Path(given), f"relative to the working directory {Path.cwd()}")]
    record = _read_records(run_dir).get(given)
    if record is not None:
        candidates.append(Candidate(run_dir.resolve() / record, f"recorded in {_find_records(run_dir)}"))
    start = _find_start(run_dir, read_path(recipe, "run_dir"))
    if start is not None:
        candidates.append(Candidate(start / given, "relative to the directory that the run was started from"))
    unique: dict[Path, Candidate] = {}
    for candidate in candidates:
        unique.setdefault(_absolute(candidate.path), candidate)
    return list(unique.values())


def find_path(given: str, run_dir: Path, recipe: Mapping[str, Any], *, what: str, remedy: str) -> Path:
    """Returns the location of a path of a run's recipe.

    Args:
        given: The path, as the recipe has it.
        run_dir: The run's directory.
        recipe: The run's recipe.
        what: A name for the data at the path, for an error message.
        remedy: How the user can give another path, for an error message.

    Raises:
        UserError: None of the locations exists; the message lists them.
    """
    candidates = list_candidates(given, run_dir, recipe)
    for candidate in candidates:
        if _exists(candidate.path):
            return candidate.path
    tried = "; ".join(f"{os.path.normpath(candidate.path)} ({candidate.reason})" for candidate in candidates)
    raise UserError(f"{what} {given} of the run {run_dir} does not exist; searched: {tried}; {remedy}")


def _exists(path: Path | str) -> bool:
    """Returns whether a path exists or, as a glob, matches anything."""
    path = Path(path)
    try:
        return path.exists() or any(True for _ in Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except ValueError:  # not a valid glob either
        return False


def _find_records(run_dir: Path) -> Path:
    """Returns the file of recorded paths; where only an earlier version has written one, that file."""
    run = RunDirectory(run_dir)
    is_old = run.old_data_paths.is_file() and not run.data_paths.is_file()
    return run.old_data_paths if is_old else run.data_paths


def _read_records(run_dir: Path) -> dict[str, str]:
    path = _find_records(run_dir)
    if not path.is_file():
        return {}
    try:
        records = load_json(read_file(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, " ".join(str(error).split())) from None
    if not isinstance(records, dict) or not all(
        isinstance(record, str) and "\0" not in record and not Path(record).is_absolute() for record in records.values()
    ):
        raise _damaged(path, "not a JSON object of relative paths")
    return records


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged ({reason}); remove the file, the run writes it again when it resumes")


def _find_start(run_dir: Path, recorded: str | None) -> Path | None:
    """Returns the directory to which `recorded`, the `run_dir` in the recipe, is relative; None if it is unknown."""
    if recorded is None or Path(recorded).is_absolute():
        return None
    parts, named = _absolute(run_dir).parts, Path(os.path.normpath(recorded)).parts
    if not named or ".." in named or parts[-len(named) :] != named:
        return None
    return Path(*parts[: -len(named)])
