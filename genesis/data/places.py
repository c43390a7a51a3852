"""Where the data of a run lie, found from any working directory.

A recipe names the corpus (or a stream's tokenizer and sources) as the user wrote it, mostly relative to the working
directory of the run. A run therefore records, beside its checkpoints, the same place relative to its own directory. A
path of a recipe is looked for in this order, and the first place where something is counts:

1. as the recipe has it, relative to the working directory of now
2. as `RUN/data_places.json` has it, relative to the run's directory
3. relative to the directory that the run was started from, where RUN still ends with the recipe's `run_dir`: for runs
   without that file

Whether what is there is the run's own is decided by hashes, by whoever opens it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from genesis.errors import UserError
from genesis.run_directory import RunDirectory
from genesis_callbacks.files import replace_file

_MAX_BYTES: Final = 1 << 20


class Place(NamedTuple):
    """Where a path of a recipe may lead to, and why there."""

    path: Path
    reason: str


def read_path(recipe: Mapping[str, Any], *keys: str) -> str | None:
    """Returns the path under the nested `keys` of a recipe, None where it has none.

    Example:
        >>> read_path({"data": {"corpus": "corpora/web"}}, "data", "corpus")
        'corpora/web'
    """
    content: Any = recipe
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content if isinstance(content, str) else None


def record_places(run_dir: Path, recipe: Mapping[str, Any]) -> None:
    """Records where the paths of a recipe lead to from the run's directory; earlier records of other paths stay."""
    named = (read_path(recipe, "data", "corpus"), read_path(recipe, "data", "stream", "tokenizer"))
    stream = (recipe.get("data") or {}).get("stream") or {}
    sources = [path for source in stream.get("sources") or () for path in source["paths"] if is_local(path)]
    base = run_dir.resolve()  # "..", from there, leads where the system takes it
    places = {
        given: os.path.relpath(given, base) for given in (*named, *sources) if given is not None and _leads(given)
    }
    if places:
        replace_file(
            RunDirectory(run_dir).data_places, json.dumps({**_read_records(run_dir), **places}, indent=1).encode()
        )


def is_local(given: str) -> bool:
    """Returns whether a source's path is one of this machine that the working directory may change the meaning of."""
    return "://" not in given and "::" not in given


def find_source_path(given: str, run_dir: Path, recipe: Mapping[str, Any], *, name: str) -> str:
    """Returns where a path of the source `name` of a run's stream leads to: itself where something is there.

    Raises:
        UserError: Nothing is at any of the places, which the line names.
    """
    if not is_local(given) or _leads(given):
        return given
    remedy = "give the sources by data.stream.sources in the recipe"
    return os.path.relpath(find_path(given, run_dir, recipe, what=f"the source {name} at", remedy=remedy))


def list_places(given: str, run_dir: Path, recipe: Mapping[str, Any]) -> list[Place]:
    """Returns the places where the path `given` of a run's recipe is looked for, in order."""
    places = [Place(Path(given), f"relative to the working directory {Path.cwd()}")]
    record = _read_records(run_dir).get(given)
    if record is not None:
        places.append(Place(run_dir.resolve() / record, f"recorded in {RunDirectory(run_dir).data_places}"))
    start = _find_start(run_dir, read_path(recipe, "run_dir"))
    if start is not None:
        places.append(Place(start / given, "relative to the directory that the run was started from"))
    unique: dict[Path, Place] = {}
    for place in places:
        unique.setdefault(_absolute(place.path), place)
    return list(unique.values())


def find_path(given: str, run_dir: Path, recipe: Mapping[str, Any], *, what: str, remedy: str) -> Path:
    """Returns where a path of a run's recipe leads to.

    Args:
        given: The path, as the recipe has it.
        run_dir: The run's directory.
        recipe: The run's.
        what: What the path leads to, for an error.
        remedy: How the user names another place.

    Raises:
        UserError: Nothing is at any of the places, which the line names.
    """
    places = list_places(given, run_dir, recipe)
    for place in places:
        if _leads(place.path):
            return place.path
    tried = "; ".join(f"{os.path.normpath(place.path)} ({place.reason})" for place in places)
    raise UserError(f"{what} {given} of the run {run_dir} is not there; looked for at {tried}; {remedy}")


def _leads(path: Path | str) -> bool:
    """Returns whether something is at a path, or matches it where it is a glob."""
    path = Path(path)
    try:
        return path.exists() or any(True for _ in Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except ValueError:  # no glob, either
        return False


def _read_records(run_dir: Path) -> dict[str, str]:
    path = RunDirectory(run_dir).data_places
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, " ".join(str(error).split())) from None
    if not isinstance(records, dict) or not all(isinstance(record, str) for record in records.values()):
        raise _damaged(path, "it is no object of texts")
    return records


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged ({reason}); remove it: a run that goes on writes it again")


def _find_start(run_dir: Path, recorded: str | None) -> Path | None:
    """Returns the directory that `recorded`, the run's directory in its recipe, was relative to."""
    if recorded is None or Path(recorded).is_absolute():
        return None
    parts, named = _absolute(run_dir).parts, Path(os.path.normpath(recorded)).parts
    if not named or ".." in named or parts[-len(named) :] != named:
        return None
    return Path(*parts[: -len(named)])
