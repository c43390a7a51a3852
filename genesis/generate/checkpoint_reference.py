"""Resolves the values by which users name checkpoints, runs and exports on the command line.

    RUN                        a run: its directory, the `checkpoints` in it, or its name in `runs/`
    RUN/latest, RUN/best       the newest checkpoint of the run, and the best one by its monitored metric
    RUN/400, RUN/step-00000400 the checkpoint of that step
    latest, best, 400          the same in the run that the command works on (`genesis fit`, `genesis validate`)
    PATH                       a checkpoint's directory
    EXPORT                     a directory in Hugging Face's layout, or one that `genesis export` wrote

An existing path takes precedence over a name in `runs/`, and `./latest` is always a path. This module renames nothing:
only a fit quarantines damaged checkpoints, those of its own run.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.base.run_directory import RUNS_NAME, RunDirectory
from genesis.huggingface.directory import is_export
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.base.run_directory import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    checkpoint_name,
    is_checkpoint_name,
    step_of,
)
from genesis_callbacks.checkpoint import (
    Manifest,
    VerifyLevel,
    find_best,
    find_latest,
    list_committed,
    read_manifest,
    verify,
)
from genesis_callbacks.checkpoint.inventory import read_inventory
from genesis_callbacks.checkpoint.lineage import checkpoints_in

LATEST: Final = "latest"
_LAST: Final = "last"
"""What Lightning calls the newest checkpoint."""
BEST: Final = "best"
_STEP = re.compile(r"[0-9]{1,18}")
_MAX_LISTED = 8
_MAX_NAME = 40

Selector = Literal["latest", "best"] | int
"""Selects a checkpoint of a run: the newest, the best, or the one of a step."""


@dataclass(frozen=True)
class Reference:
    """A resolved value of the command line.

    Attributes:
        value: The value as the user gave it.
        kind: The kind of directory that `path` is.
        path: The directory of the checkpoint, the run or the export.
        selector: For a run, the selected checkpoint; None if the value names the run alone.
    """

    value: str
    kind: Literal["checkpoint", "run", "export"]
    path: Path
    selector: Selector | None = None

    @property
    def run(self) -> RunDirectory:
        """The run that `path` is, or that contains it."""
        return RunDirectory.of(self.path)

    def select(self, selector: Selector) -> "Reference":
        """Returns the reference to a checkpoint of this run.

        Raises:
            UserError: The reference already names one checkpoint, or an export.
        """
        if self.kind != "run" or self.selector is not None:
            raise UserError(f"{self.value} is not a run, so that it has no {selector}: give the run's directory")
        return replace(self, selector=selector)

    def find_checkpoint(self, *, level: VerifyLevel | None) -> Path:
        """Returns the directory of the referenced checkpoint.

        Args:
            level: How thoroughly the newest checkpoint of a run is verified; a checkpoint that does not verify is
                skipped with a warning. None takes the newest one unverified, for commands that inspect it.

        Raises:
            UserError: There is no such checkpoint.
        """
        if self.kind == "export":
            raise UserError(f"{self.path} is an export, not a checkpoint; convert it with `genesis import`")
        if self.kind == "checkpoint":
            return self.path
        if isinstance(self.selector, int):
            return _find_step(self.path, self.selector)
        found = find_best(self.path) if self.selector == BEST else _find_newest(self.path, level)
        if found is None and self.selector == BEST:
            raise UserError(
                f"{self.path} has no best checkpoint; `genesis checkpoint list {self.path}` lists its checkpoints"
            )
        if found is None:
            raise UserError(f"{self.path} has no committed checkpoint; `genesis fit` writes them")
        return found


def read_selector(text: str) -> Selector | None:
    """Returns the checkpoint that a word selects in a run; None for any other word.

    Example:
        >>> read_selector("best"), read_selector("400"), read_selector("step-00000400"), read_selector("demo")
        ('best', 400, 400, None)
    """
    if text in (LATEST, _LAST):
        return "latest"
    if text == BEST:
        return "best"
    if len(text) < _MAX_NAME and is_checkpoint_name(text):
        return step_of(text)
    return int(text) if _STEP.fullmatch(text) else None


def read_reference(value: Path | str, *, run_dir: Path | None = None) -> Reference:
    """Resolves a value by names and existing paths alone; no checkpoint is opened.

    Args:
        value: The value as the user gave it.
        run_dir: The run that the command works on, if any; the directory need not exist yet.

    Raises:
        UserError: The value is empty, or nothing exists there; the message lists every path that was tried.
    """
    path, text = Path(value), str(value)
    if not text.strip():  # as a path, it would be the working directory
        raise UserError("the name of a run or checkpoint is empty: give a run, RUN/best, RUN/STEP, or a path")
    selector = read_selector(text)
    if run_dir is not None and selector is not None:
        return Reference(text, "run", run_dir, selector)
    places = [path] if path.is_absolute() or path.parts[:1] == ("..",) else [path, Path(RUNS_NAME, path)]
    there = [place for place in places if place.is_dir()]
    for place in there:
        if (kind := _classify(place)) is not None:
            return Reference(text, kind, place)
    selector = read_selector(path.name)
    if selector is not None and not there:
        for place in places:
            if _classify(place.parent) == "run":
                return Reference(text, "run", RunDirectory.of(place.parent).path, selector)
    if there:  # a run without checkpoints, or any other directory: the code that opens it reports what is missing
        return Reference(text, "run", there[0])
    if path.is_file():
        raise UserError(
            f"{path} is a file: give a run's directory or one of its checkpoints (`genesis checkpoint verify` also "
            "takes .ckpt, .pt, .pth and .safetensors)"
        )
    tried = " and ".join(map(str, places))
    raise UserError(f"no such directory: {tried}; give a run, RUN/best, RUN/STEP, or a checkpoint's directory")


def find_checkpoint(value: Path | str, *, level: VerifyLevel | None = "quick") -> Path:
    """Returns the checkpoint for a value; see `read_reference` and `Reference.find_checkpoint`.

    Raises:
        UserError: There is no such checkpoint.
    """
    return read_reference(value).find_checkpoint(level=level)


def verify_shown(checkpoint: Path, level: VerifyLevel = "full") -> Manifest:
    """Returns the manifest of a checkpoint that verifies, and shows how many of its bytes are hashed.

    Raises:
        CheckpointError: The checkpoint does not verify; see `genesis_callbacks.checkpoint.verify`.
    """
    num_bytes = sum(file.num_bytes for file in read_manifest(checkpoint).files)
    with stage(f"verifying {checkpoint.name}", num_bytes, "bytes") as shown:
        return verify(checkpoint, level, report=shown.advance)


def find_run(value: Path | str) -> Path:
    """Returns the run's directory for a value, for commands that work on all checkpoints of a run.

    Raises:
        UserError: The value names one checkpoint, or an export.
    """
    reference = read_reference(value)
    if reference.kind != "run" or reference.selector is not None:
        what = "an export" if reference.kind == "export" else "one checkpoint"
        raise UserError(f"{value} is {what}, but the command needs all checkpoints of a run: give the run's directory")
    return reference.path


def find_export(value: Path | str) -> Path:
    """Returns the directory of the export for a value.

    Raises:
        UserError: The value names something else, or nothing.
    """
    if not any(place.is_dir() for place in (Path(value), Path(RUNS_NAME, value))):
        raise UserError(
            f"no such directory: {value}; give a directory in Hugging Face's layout, such as `genesis export` writes"
        )
    reference = read_reference(value)
    if reference.kind == "checkpoint" or (reference.kind == "run" and list_committed(reference.path)):
        raise UserError(f"{value} is a {reference.kind}, not an export; `genesis export {value} OUT` exports it")
    return reference.path


def _classify(place: Path) -> Literal["checkpoint", "run", "export"] | None:
    """Returns the kind of a directory, by the names in it; None if the names do not show it."""
    if not place.is_dir():
        return None
    is_named_so = is_checkpoint_name(place.resolve().name)
    if is_named_so or (place / COMMITTED_NAME).exists() or (place / MANIFEST_NAME).exists():
        return "checkpoint"
    if is_export(place):
        return "export"
    is_run = RunDirectory(place).checkpoints.is_dir() or RunDirectory(place).recipe.exists()
    return "run" if is_run or any(is_checkpoint_name(entry.name) for entry in place.iterdir()) else None


def _find_newest(run: Path, level: VerifyLevel | None) -> Path | None:
    if level is not None:
        return find_latest(run, level=level, quarantine_bad=False)
    committed = [entry.path for entry in read_inventory(run) if entry.state == "committed"]
    return committed[-1] if committed else None


def _find_step(run: Path, step: int) -> Path:
    path = checkpoints_in(run) / checkpoint_name(step)
    if path.is_dir():
        return path
    steps = [f"{manifest.step:,}" for _, manifest in list_committed(run)]
    has = f"its steps are {', '.join(steps[-_MAX_LISTED:])}" if steps else "it has no checkpoint at all"
    raise UserError(f"{run} has no checkpoint of step {step:,}; {has}")


def find_recorded(given: str, recorded_hash: str | None) -> Path:
    """Returns the checkpoint that a value names; of a run that was trained further, the one with a recorded hash.

    Args:
        given: The value.
        recorded_hash: The hash of the manifest that a run recorded; None for the newest checkpoint.

    Raises:
        UserError: There is no such checkpoint.
    """
    reference = read_reference(given)
    found = reference.find_checkpoint(level="quick")
    if recorded_hash is None or reference.kind != "run" or read_committed_hash(found) == recorded_hash:
        return found
    committed = (path for path, _ in list_committed(reference.path))
    return next((path for path in committed if read_committed_hash(path) == recorded_hash), found)
