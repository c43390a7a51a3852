"""Lists the models that clients can request: committed checkpoints of runs, single checkpoints and exports."""

import csv
import difflib
import io
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis.generate.checkpoint_reference import LATEST, Reference, read_reference
from genesis.huggingface.directory import PROOF_NAME, check_files, hash_listed, is_export
from genesis.huggingface.peft import CONFIG_NAME as ADAPTER_NAME
from genesis.huggingface.peft import is_adapter_export, read_peft_config
from genesis.huggingface.shape import find_names
from genesis.model.recipe import build_decoder_config
from genesis.serve.errors import ApiError
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.base.run_directory import COMMITTED_NAME
from genesis_callbacks.base.untrusted import open_file, path_below
from genesis_callbacks.checkpoint import (
    CheckpointError,
    Manifest,
    list_committed,
    read_manifest,
)
from genesis_callbacks.checkpoint.lineage import checkpoints_in

_VALIDATION_LOSS, _TRAIN_LOSS = "validation/loss", "train/loss"


@dataclass(frozen=True)
class Entry:
    """A model that clients can request.

    Attributes:
        id: The model's name for clients.
        path: The checkpoint or export.
        version: A text that changes when other weights replace those at `path`.
        run: The name of the run, or of the export.
        created_seconds: Unix time of the commit.
        step: The checkpoint's step; None for an export.
        tokens_seen: The checkpoint's token count; None if the manifest has no such counter.
        train_loss: The training loss at that step in the run's log, if the log has one.
        validation_loss: The validation loss at that step in the run's log, if the log has one.
        base: For adapters in PEFT's format, the checkpoint beside which they are loaded; else None.
    """

    id: str
    path: Path
    version: str
    run: str
    created_seconds: float
    step: int | None = None
    tokens_seen: int | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    base: Path | None = None


class Catalogue:
    """Lists the models in the given directories; reads a directory again when it has changed. Thread-safe.

    Args:
        paths: Runs, checkpoints or exports.
        adapters: Names and paths of adapters beside the first of `paths`: runs, checkpoints, or directories in PEFT's
            format.
        weights: The directory in which `add` finds further weights; None to add none.

    Raises:
        UserError: A path is not a run, a checkpoint or an export, or is given twice, or adapters have another base.
    """

    def __init__(
        self, paths: Sequence[Path], adapters: Mapping[str, Path] | None = None, weights: Path | None = None
    ) -> None:
        found = self._found = [_find(path) for path in paths]
        self._weights = weights
        self._added: tuple[_Export | _Adapter, ...] = ()
        self._adding = threading.Lock()
        resolved = [reference.path for reference in found]
        for path, given in zip(resolved, paths, strict=True):
            if resolved.count(path) > 1:
                raise UserError(f"{given} is given twice")
        names = _short_names(resolved)
        self._sources: list[_Run | _Export | _Adapter] = [
            _open(reference, name, has_prefix=len(paths) > 1) for reference, name in zip(found, names, strict=True)
        ]
        if adapters:
            base = found[0].find_checkpoint(level="quick").resolve()
            taken = self.by_id()
            for name, path in adapters.items():
                if name in taken:
                    raise UserError(f"--adapter has the name {name!r}, which a model has already: give another one")
                self._sources.append(_Adapter(name, path, base))

    def entries(self) -> list[Entry]:
        """Returns every available model, source by source, the oldest first."""
        return [entry for source in (*self._sources, *self._added) for entry in source.entries()]

    def newest(self) -> dict[str, Entry]:
        """Returns the newest model of each source, under its alias for the newest checkpoint."""
        found = {source.latest_id: source.entries()[-1:] for source in (*self._sources, *self._added)}
        return {name: entries[0] for name, entries in found.items() if entries}

    def by_id(self) -> dict[str, Entry]:
        """Returns every model under its own id, and the newest models also under their aliases."""
        return {**{entry.id: entry for entry in self.entries()}, **self.newest()}

    def add(self, name: str, digest: str) -> Entry:
        """Adds weights that a trainer has written (`genesis.train.served_weights`), and returns their entry.

        Those whose directory has been removed are forgotten.

        Args:
            name: The name of their directory below that of the weights, and of the model.
            digest: What `hash_listed` must give for their proof.

        Raises:
            ApiError: The server adds no weights, or there are no such weights.
            UserError: A file is damaged.
        """
        if self._weights is None:
            raise ApiError(
                "this server loads no further weights: start it with --weights DIR, the directory of a trainer's "
                "weights, and a token",
                status=403,
                code="loads_no_weights",
            )
        try:
            path = path_below(self._weights, name, "the request").resolve()
            found = hash_listed(path)
        except UserError as error:
            raise ApiError(f"no weights {name[:100]!r} in the server's --weights: {error}", param="path") from None
        if "/" in name or found != digest:
            raise ApiError(
                f"the weights {name[:100]!r} have the digest {found[:16]}, and {digest[:16]!r} is asked for: give a "
                "directory directly below --weights, and the digest of what is in it",
                param="digest",
            )
        added: _Export | _Adapter = _Export(path, name)
        if is_adapter_export(path):
            check_files(path)
            added = _Adapter(name, path, self._found[0].find_checkpoint(level="quick").resolve())
        with self._adding:
            self._added = tuple(one for one in self._added if one.entries() and one.latest_id != name)
            if name in self.by_id():
                raise ApiError(f"path is {name!r}, which is the name of a model already", param="path")
            self._added = (*self._added, added)
        (entry,) = added.entries()
        return entry

    def find(self, model: str) -> Entry:
        """Returns the model with the id `model`.

        Raises:
            ApiError: No model has this id; the message names the nearest id.
        """
        by_id = self.by_id()
        if model not in by_id:
            near = difflib.get_close_matches(model[:200], list(by_id), n=1, cutoff=0.0)
            hint = f"did you mean {near[0]}?" if near else "no checkpoint is committed yet"
            raise ApiError(
                f"no such model: {model[:100]!r}; {hint} (GET /v1/models lists all)",
                status=404,
                param="model",
                code="model_not_found",
            )
        return by_id[model]


class _Run:
    """The committed checkpoints of a run, or one of them."""

    def __init__(self, path: Path, name: str, prefix: str, only: Path | None = None) -> None:
        self._path, self._name, self._prefix, self._only = path, name, prefix, only
        self._lock = threading.Lock()
        self._marks: object = None
        self._found: list[tuple[Path, Manifest]] = []
        self._log: object = None
        self._entries: list[Entry] = []

    @property
    def latest_id(self) -> str:
        return self._prefix + LATEST

    def entries(self) -> list[Entry]:
        with self._lock:
            paths = [self._only] if self._only else sorted(checkpoints_in(self._path).glob("step-*"))
            marks = [(path.name, _stamp(path / COMMITTED_NAME)) for path in paths]
            log = _stamp(RunDirectory(self._path).metrics)
            if marks != self._marks:
                self._found = self._read()
            if (marks, log) != (self._marks, self._log):
                self._entries = self._describe()
            self._marks, self._log = marks, log
            return self._entries

    def _read(self) -> list[tuple[Path, Manifest]]:
        if self._only is None:
            return list_committed(self._path)
        try:
            return [(self._only, read_manifest(self._only))]
        except CheckpointError:  # the checkpoint was removed; a request for it gets an error
            return []

    def _describe(self) -> list[Entry]:
        losses = read_losses(RunDirectory(self._path).metrics, [manifest.step for _, manifest in self._found])
        entries = []
        for path, manifest in self._found:
            at_step = losses.get(manifest.step, {})
            entries.append(
                Entry(
                    id=self._prefix + path.name,
                    path=path,
                    version=f"{manifest.sequence} {manifest.created_seconds}",
                    run=self._name,
                    created_seconds=manifest.created_seconds,
                    step=manifest.step,
                    tokens_seen=manifest.counters.get("tokens_seen"),
                    train_loss=at_step.get(_TRAIN_LOSS),
                    validation_loss=at_step.get(_VALIDATION_LOSS),
                )
            )
        return entries


class _Export:
    """A directory that `genesis export` wrote: one model, named after the directory."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    @property
    def latest_id(self) -> str:
        return self._name

    def entries(self) -> list[Entry]:
        if not is_export(self._path):  # the export was removed; a request for it gets an error
            return []
        stamps = [_stamp(file) for file in sorted(self._path.iterdir())]
        changed = max(stamp[0] for stamp in stamps if stamp is not None)
        return [
            Entry(id=self._name, path=self._path, version=str(stamps), run=self._name, created_seconds=changed / 1e9)
        ]


class _Adapter:
    """Adapters beside a base, under a name of their own."""

    def __init__(self, name: str, path: Path, base: Path) -> None:
        self._name, self._base = name, base
        self._is_peft = is_adapter_export(path)
        self._path = path.resolve() if self._is_peft else read_reference(path).find_checkpoint(level="quick").resolve()
        if self._is_peft:
            manifest = read_manifest(base)
            decoder = build_decoder_config(
                (manifest.recipe.get("model") or {}).get("decoder"), where=f"the recipe in {base}"
            )
            read_peft_config(self._path, find_names(decoder))
            return
        found, wanted = read_manifest(self._path).base, read_committed_hash(base)
        if found is None or found.manifest_hash != wanted:
            what = "holds no adapters" if found is None else f"has adapters for the base {found.path}"
            raise UserError(f"--adapter {name}: {self._path} {what}, and the base is {base}: give adapters for it")

    @property
    def latest_id(self) -> str:
        return self._name

    def entries(self) -> list[Entry]:
        stamp = _stamp(self._path / (ADAPTER_NAME if self._is_peft else COMMITTED_NAME))
        if stamp is None:  # the adapters were removed; a request for them gets an error
            return []
        return [
            Entry(
                id=self._name,
                path=self._path,
                version=str(stamp),
                run=self._name,
                created_seconds=stamp[0] / 1e9,
                base=self._base if self._is_peft else None,
            )
        ]


def _find(value: Path) -> Reference:
    """Returns the reference with a resolved path; a step of a run, or its best one, becomes a single checkpoint."""
    reference = read_reference(value)
    if reference.kind == "run" and reference.selector not in (None, LATEST):
        reference = Reference(reference.value, "checkpoint", reference.find_checkpoint(level="quick"))
    path = reference.run.path if reference.kind == "run" else reference.path
    return replace(reference, path=path.resolve())


def _open(reference: Reference, name: str, *, has_prefix: bool) -> _Run | _Export:
    prefix = f"{name}/" if has_prefix else ""
    path = reference.path
    if reference.kind == "checkpoint":
        read_manifest(path)
        return _Run(RunDirectory.of(path).path, name, prefix, only=path)
    if reference.kind == "export":
        if not (path / PROOF_NAME).exists():
            raise UserError(f"{path} has no {PROOF_NAME}; only exports of genesis can be served: run `genesis import`")
        return _Export(path, name)
    if checkpoints_in(path) != path or RunDirectory(path).recipe.exists() or list_committed(path):
        return _Run(path, name, prefix)
    raise UserError(
        f"{path} is not a run, a checkpoint or an export; give a path that `genesis fit` or `genesis export` wrote"
    )


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that are all different.

    >>> _short_names([Path("/runs/a/run"), Path("/runs/b/run")])
    ['a/run', 'b/run']
    """
    for num_parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def read_losses(path: Path, steps: Iterable[int]) -> dict[int, dict[str, float]]:
    """Returns the losses in a run's log for each of `steps`; steps and losses that the log lacks are left out."""
    wanted = {str(step): step for step in steps}
    losses: dict[int, dict[str, float]] = {}
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8", newline="") as file:
            names = next(csv.reader(file), [])
            rows = [line for line in file if line.partition(",")[0] in wanted]
    except FileNotFoundError:
        return losses
    for row in csv.DictReader(rows, names):
        at_step = losses.setdefault(wanted[row["step"]], {})
        for name in (_TRAIN_LOSS, _VALIDATION_LOSS):
            value = _to_float(row.get(name))
            if value is not None:
                at_step[name] = value
    return losses


def _to_float(text: str | None) -> float | None:
    """Returns the number in a cell; None for an empty or half-written cell and for text that is not a finite number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
