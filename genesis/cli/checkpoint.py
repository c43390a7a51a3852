"""`genesis checkpoint list|show|verify|diff|prune|repair`: looks into a run's checkpoints, and puts them in order.

Exit status 0 is good, 1 something bad was found, 2 misuse. What only reads takes no lock and may run beside a training;
`prune` and `repair --apply` refuse while a run holds the directory.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from genesis.arguments import Parser
from genesis.cli.options import PLAIN_WIDTH
from genesis.data.drawn import Drawn, read_drawn
from genesis.errors import UserError, printable
from genesis.train.recipe_policy import RECIPE_POLICY
from genesis_callbacks.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    Difference,
    DirectoryLock,
    Kept,
    Manifest,
    Retention,
    find_drift,
    list_committed,
    plan_removals,
    read_manifest,
    verify,
)
from genesis_callbacks.checkpoint.best import Best, read_best, read_marked_names
from genesis_callbacks.checkpoint.compare import TensorComparison, compare_tensors
from genesis_callbacks.checkpoint.contents import Contents, find_format, find_non_finite, read_contents
from genesis_callbacks.checkpoint.inventory import (
    Entry,
    Repair,
    apply_repair,
    find_problem,
    find_problems,
    newest_whole,
    plan_repairs,
    read_inventory,
    summarise_parts,
    trace_ancestors,
)
from genesis_callbacks.checkpoint.lineage import CHECKPOINTS_NAME, checkpoints_in
from genesis_callbacks.checkpoint.manifest import COMMITTED_NAME, MANIFEST_NAME, encode_manifest, is_checkpoint_name
from genesis_callbacks.checkpoint.restore import read_state
from genesis_callbacks.checkpoint.retain import apply_retention

BAD = 1
_LEVELS = ("quick", "full", "deep")
_MAX_TENSOR_ROWS = 20
_MAX_NAMED = 3
_ON_RESUME = {
    "free": "goes on",
    "allowed": "goes on",
    "warned": "warns",
    "refused": "must be allowed",
    "never": "refused",
}

_LIST_DESCRIPTION = """Lists what lies in a run's checkpoint directory: committed checkpoints in the order of the run,
then saves in flight, and what was put aside. Exit status 1 if a committed one does not verify.
Example: genesis checkpoint list runs/demo/run"""
_SHOW_DESCRIPTION = """Shows what a checkpoint is: counters, recipe, versions, files, tensors by part, ancestors.
Example: genesis checkpoint show runs/demo/run/checkpoints/step-00000800"""
_VERIFY_DESCRIPTION = """Verifies one checkpoint, or all of a run: quick compares counts, names and sizes, full also the
hash of every file, deep also the digest of every tensor. --finite also looks for values that are not finite. Of a
checkpoint of others (a .ckpt, .pt or .pth file, a safetensors file or directory, a DCP directory) it tells what it
holds, and whether that is empty or cut off; no code in it runs. Exit status 1 if one does not verify.
Example: genesis checkpoint verify runs/demo/run --level deep"""
_DIFF_DESCRIPTION = """Compares two checkpoints: recipe, versions, counters and tensors, one tensor at a time. The last
column says what becomes of a setting when A is resumed with B's: it goes on, warns, must be allowed
(--checkpoint.allow_changed) or is refused. Both are verified first, with every tensor's digest. Exit status 0 whether
they differ or not, 1 if one is damaged.
Example: genesis checkpoint diff runs/a runs/b/checkpoints/step-00000400"""
_PRUNE_DESCRIPTION = """Removes older checkpoints of a run, as its own retention would: the newest that verifies always
stays, whatever is asked. Refused while the run trains. Exit status 1 if a newer one is damaged, or none is whole.
Example: genesis checkpoint prune runs/demo/run --keep_last 2 --keep_every_n_steps 400 --dry_run"""
_REPAIR_DESCRIPTION = """Says what to do about everything in a run's checkpoint directory that is broken or left over.
With --apply it does it, while no run holds the directory: what does not verify is renamed to quarantined-..., leftovers
of saves and deletions that never ended are deleted. Exit status 1 if something bad is left.
Example: genesis checkpoint repair runs/demo/run --apply"""


# ---- commands


def list_main(argv: list[str]) -> int:
    """Runs `genesis checkpoint list` and returns its exit status."""
    parser = _build_parser("list", _LIST_DESCRIPTION)
    parser.add_argument("run", type=Path, help="a run's directory")
    parser.add_argument("--level", choices=_LEVELS, default="quick", help="how much is verified; default quick")
    arguments = parser.parse_args(argv)
    entries = read_inventory(arguments.run)
    if not entries:
        raise UserError(f"there is no checkpoint in {arguments.run}; give a run's directory")
    problems = find_problems(entries, arguments.level)
    entries = [entry for entry in entries if entry.state != "committed" or entry.path in problems]
    directory = checkpoints_in(arguments.run)
    best = read_best(directory)
    marks = {} if best is None else _describe_marks(directory, best)
    rows = [
        {
            **_describe_entry(directory, entry, problems, arguments.level),
            "is_best": best is not None and entry.path == directory / best.name,
            "metric": marks.get(entry.path),
        }
        for entry in entries
    ]
    bad = [(path, problem) for path, problem in problems.items() if problem is not None]
    if arguments.json:
        _print_json({"directory": str(directory), "best": best and asdict(best), "checkpoints": rows})
        return BAD if bad else 0
    console = _console()
    now_seconds = time.time()
    console.print(
        _table(
            str(directory),
            ("checkpoint", "step", "tokens", "age", "size", "state", "verified", "metric"),
            (
                (
                    row["name"],
                    _number(row["step"]),
                    _number(row["tokens_seen"]),
                    _duration(now_seconds - row["created_seconds"]),
                    decimal(row["num_bytes"]),
                    row["state"],
                    "no" if row["problem"] else row["verified"] or "",
                    _mark(row["metric"]),
                )
                for row in rows
            ),
            right=("step", "tokens", "age", "size"),
        )
    )
    for path, problem in bad:
        console.print(Text(f"{path.name}: {_without_path(path, problem)}"))
    return BAD if bad else 0


def show_main(argv: list[str]) -> int:
    """Runs `genesis checkpoint show` and returns its exit status."""
    parser = _build_parser("show", _SHOW_DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest)")
    arguments = parser.parse_args(argv)
    path = _find_checkpoint(arguments.checkpoint)
    try:
        manifest = read_manifest(path)
        drawn = read_drawn(read_state(path, manifest))
    except CorruptCheckpointError as error:
        return _complain(error)
    if arguments.json:
        content = {
            "path": str(path),
            "manifest": _as_json(manifest),
            "parts": [asdict(summary) for summary in summarise_parts(manifest)],
            "drawn": {name: asdict(of_source) for name, of_source in drawn.items()},
            "lineage": [{**asdict(ancestor), "state": state} for ancestor, state in trace_ancestors(path, manifest)],
        }
        _print_json(content)
    else:
        _print_manifest(_console(), path, manifest, drawn)
    return 0


def verify_main(argv: list[str]) -> int:
    """Runs `genesis checkpoint verify` and returns its exit status."""
    parser = _build_parser("verify", _VERIFY_DESCRIPTION)
    parser.add_argument("path", type=Path, help="a checkpoint, ours or of others, or a run's directory (all of its)")
    parser.add_argument("--level", choices=_LEVELS, default="full", help="how much is verified of ours; default full")
    parser.add_argument("--finite", action="store_true", help="read every value and look for those not finite")
    arguments = parser.parse_args(argv)
    is_run = (arguments.path / CHECKPOINTS_NAME).is_dir()
    if not is_run and find_format(arguments.path) not in (None, "genesis"):
        return _verify_foreign(arguments.path, is_finite_asked=arguments.finite, as_json=arguments.json)
    if _is_checkpoint(arguments.path):
        problems = {arguments.path: find_problem(arguments.path, arguments.level)}
    else:
        problems = find_problems(read_inventory(arguments.path), arguments.level)
        if not problems:
            raise UserError(f"there is no committed checkpoint in {arguments.path}; `genesis fit` writes them")
    outcomes = {path: None if problem is None else str(problem) for path, problem in problems.items()}
    if arguments.finite:
        outcomes = {path: problem or _describe_non_finite(read_contents(path)) for path, problem in outcomes.items()}
    bad = [problem for problem in outcomes.values() if problem is not None]
    if arguments.json:
        content = [
            {"path": str(path), "is_verified": problem is None, "problem": problem}
            for path, problem in outcomes.items()
        ]
        _print_json({"level": arguments.level, "checkpoints": content})
    else:
        verified = f"verified ({arguments.level}{', finite' if arguments.finite else ''})"
        for path, problem in outcomes.items():
            print(f"{path}: {verified}" if problem is None else f"{path}: BAD: {_without_path(path, problem)}")
    return BAD if bad else 0


def _verify_foreign(path: Path, *, is_finite_asked: bool, as_json: bool) -> int:
    """Tells what a checkpoint of others holds and returns the exit status."""
    contents: Contents | None = None
    problem: str | None = None
    try:
        contents = read_contents(path)
        found = list(contents.problems) if contents.model else [*contents.problems, "holds no tensor of a model"]
        problem = printable("; ".join(found)) or (_describe_non_finite(contents) if is_finite_asked else None)
    except CheckpointError as error:
        problem = str(error)
    if as_json:
        facts = {} if contents is None else _describe_contents(contents)
        _print_json({"checkpoints": [{"path": str(path), "is_verified": problem is None, "problem": problem, **facts}]})
    else:
        print(f"{path}: {'looks whole' if problem is None else f'BAD: {problem}'}")
        if contents is not None:
            _print_contents(contents, is_finite=is_finite_asked and problem is None)
    return BAD if problem is not None else 0


def diff_main(argv: list[str]) -> int:
    """Runs `genesis checkpoint diff` and returns its exit status."""
    parser = _build_parser("diff", _DIFF_DESCRIPTION)
    parser.add_argument("a", type=Path, help="a checkpoint, or a run's directory (its newest)")
    parser.add_argument("b", type=Path, help="the same")
    parser.add_argument("--all", action="store_true", help=f"list every tensor that differs, not {_MAX_TENSOR_ROWS}")
    arguments = parser.parse_args(argv)
    paths = [_find_checkpoint(path) for path in (arguments.a, arguments.b)]
    try:
        manifests = [verify(path, "deep") for path in paths]  # equal digests say something of what verifies alone
        tensors = list(compare_tensors(paths[0], manifests[0], paths[1], manifests[1]))
    except CorruptCheckpointError as error:
        return _complain(error)
    settings = find_drift(
        manifests[0],
        identity=manifests[1].identity,
        recipe=manifests[1].recipe,
        versions=manifests[1].versions,
        policy=RECIPE_POLICY,
    )
    counts = _compare_counts(*manifests)
    if arguments.json:
        _print_json(
            {
                "a": str(paths[0]),
                "b": str(paths[1]),
                "settings": [asdict(difference) for difference in settings],
                "counters": {name: {"a": a, "b": b} for name, (a, b) in counts.items()},
                "num_same_tensors": sum(comparison.verdict == "same" for comparison in tensors),
                "tensors": [_describe_comparison(comparison) for comparison in tensors if comparison.verdict != "same"],
            }
        )
    else:
        _print_diff(_console(), paths, settings, counts, tensors, None if arguments.all else _MAX_TENSOR_ROWS)
    return 0


def prune_main(argv: list[str]) -> int:
    """Runs `genesis checkpoint prune` and returns its exit status."""
    parser = _build_parser("prune", _PRUNE_DESCRIPTION)
    parser.add_argument("run", type=Path, help="a run's directory")
    parser.add_argument("--keep_last", type=_positive, required=True, help="how many of the newest stay")
    parser.add_argument("--keep_every_n_steps", type=_positive, help="those whose step is a multiple of it stay, too")
    parser.add_argument("--dry_run", action="store_true", help="only say what would be removed")
    arguments = parser.parse_args(argv)
    retention = Retention(arguments.keep_last, arguments.keep_every_n_steps)
    directory = checkpoints_in(arguments.run)
    read_inventory(directory)  # refuses what is no directory, before the lock makes one
    with _held(directory, is_needed=not arguments.dry_run):
        entries = {entry.path.name: entry for entry in read_inventory(directory) if entry.state == "committed"}
        newest, bad = newest_whole(list(entries.values()))
        kept = [Kept(path.name, manifest.step, manifest.sequence) for path, manifest in list_committed(directory)]
        newest_name = None if newest is None else newest.path.name
        removals = plan_removals(kept, newest_name, retention, marked=read_marked_names(directory))
        if newest_name is not None and not arguments.dry_run:
            removals = apply_retention(directory, newest_name, retention)
    num_bytes = sum(entries[name].num_bytes for name in removals)
    if arguments.json:
        _print_json(
            {
                "directory": str(directory),
                "newest_verified": newest_name,
                "removed": removals,
                "kept": [name for name in entries if name not in removals],
                "bad": [entry.path.name for entry in bad],
                "num_bytes": num_bytes,
                "is_dry_run": arguments.dry_run,
            }
        )
    else:
        for name in removals:
            print(f"{name}: {'would be removed' if arguments.dry_run else 'removed'}")
        print(f"{len(removals)} of {len(entries)} checkpoints, {decimal(num_bytes)}; newest verified: {newest_name}")
        for entry in bad:
            print(f"{entry.path.name} does not verify: see `genesis checkpoint repair {arguments.run}`")
    return BAD if bad or (newest is None and entries) else 0


def repair_main(argv: list[str]) -> int:
    """Runs `genesis checkpoint repair` and returns its exit status."""
    parser = _build_parser("repair", _REPAIR_DESCRIPTION)
    parser.add_argument("run", type=Path, help="a run's directory")
    parser.add_argument("--level", choices=_LEVELS, default="deep", help="how much is verified; default deep")
    parser.add_argument("--apply", action="store_true", help="do it")
    arguments = parser.parse_args(argv)
    directory = checkpoints_in(arguments.run)
    read_inventory(directory)  # refuses what is no directory, before the lock makes one
    with _held(directory, is_needed=arguments.apply):
        entries = read_inventory(directory)
        problems = find_problems(entries, arguments.level)
        repairs = plan_repairs(entries, problems)
        places = [apply_repair(repair) if arguments.apply else repair.path for repair in repairs]
    whole = [path.name for path, problem in problems.items() if problem is None]
    latest = whole[-1] if whole else None
    rows = [
        {**asdict(repair), "path": str(repair.path), "now_at": None if place is None else str(place)}
        for repair, place in zip(repairs, places, strict=True)
    ]
    if arguments.json:
        _print_json({"directory": str(directory), "repairs": rows, "is_applied": arguments.apply, "latest": latest})
    else:
        _print_repairs(repairs, places, latest, is_applied=arguments.apply)
    left = [repair for repair in repairs if repair.is_bad and not (arguments.apply and repair.action != "none")]
    return BAD if left or (problems and latest is None) else 0


# ---- finding


def _build_parser(name: str, description: str) -> Parser:
    parser = Parser(
        prog=f"genesis checkpoint {name}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _is_checkpoint(path: Path) -> bool:
    if path.is_file():
        raise UserError(
            f"{path} is a file: give a run's directory or one of its checkpoints (`genesis checkpoint verify` also "
            "takes .ckpt, .pt, .pth and .safetensors)"
        )
    if not path.is_dir():
        raise UserError(f"there is no directory {path}; give a run's directory or one of its checkpoints")
    is_named_so = is_checkpoint_name(path.resolve().name)
    return is_named_so or (path / MANIFEST_NAME).exists() or (path / COMMITTED_NAME).exists()


def _find_checkpoint(path: Path) -> Path:
    """Returns `path` if it is a checkpoint, else the newest of the run at `path`."""
    if _is_checkpoint(path):
        return path
    committed = [entry.path for entry in read_inventory(path) if entry.state == "committed"]
    if not committed:
        raise UserError(f"there is no committed checkpoint in {path}; `genesis fit` writes them")
    return committed[-1]


@contextmanager
def _held(directory: Path, *, is_needed: bool) -> Iterator[None]:
    """Holds the directory's lock, if it is needed.

    Raises:
        DirectoryInUseError: A run holds it.
    """
    lock = DirectoryLock(directory) if is_needed else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


# ---- telling


def _without_path(path: Path, problem: object) -> str:
    """Returns what is wrong with the checkpoint at `path`, whose name stands before it already."""
    return str(problem).removeprefix(f"{path}: ")


def _describe_marks(directory: Path, best: Best) -> dict[Path, dict[str, Any]]:
    """Returns the metric of each marked checkpoint by its path; the rank of the best is 1."""
    return {
        directory / marked.name: {"name": best.monitor, "value": marked.value, "rank": place}
        for place, marked in enumerate(best.ranked, start=1)
    }


def _mark(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return ""
    return f"{metric['name']} {metric['value']:.6g}{' (best)' if metric['rank'] == 1 else ''}"


def _describe_entry(
    directory: Path, entry: Entry, problems: Mapping[Path, Exception | None], level: str
) -> dict[str, Any]:
    manifest, problem = entry.manifest, problems.get(entry.path)
    is_verified = entry.path in problems and problem is None
    return {
        "name": str(entry.path.relative_to(directory)),
        "path": str(entry.path),
        "state": entry.state,
        "step": None if manifest is None else manifest.step,
        "tokens_seen": None if manifest is None else manifest.counters.get("tokens_seen"),
        "created_seconds": entry.modified_seconds if manifest is None else manifest.created_seconds,
        "num_bytes": entry.num_bytes,
        "verified": level if is_verified else None,
        "problem": None if problem is None else str(problem),
    }


def _describe_comparison(comparison: TensorComparison) -> dict[str, Any]:
    gap = comparison.max_abs_difference
    sides = {
        side: record and {"shape": record.shape, "dtype": record.dtype, "digest": f"{record.digest:016x}"}
        for side, record in (("a", comparison.before), ("b", comparison.now))
    }
    return {
        "name": comparison.name,
        "verdict": comparison.verdict,
        "max_abs_difference": gap if gap is None or math.isfinite(gap) else str(gap),
        **sides,
    }


_FORMATS = {
    "torch": "a file of torch.save",
    "dcp": "a directory of torch's distributed checkpoint",
    "safetensors": "safetensors",
}


def _describe_non_finite(contents: Contents) -> str | None:
    """Returns which tensors of model and optimizers have values that are not finite, or None; reads all of them."""
    found = find_non_finite(contents)
    if not found:
        return None
    some = printable(", ".join(f"{name} ({count:,} values)" for name, count in list(found.items())[:_MAX_NAMED]))
    return f"{len(found):,} tensors hold values that are not finite, such as {some}"


def _describe_contents(contents: Contents) -> dict[str, Any]:
    optimizers = [
        {
            "optimizer": index,
            "num_parameters": len(parameters),
            "num_tensors": sum(map(len, parameters.values())),
            "num_bytes": sum(tensor.num_bytes for state in parameters.values() for tensor in state.values()),
        }
        for index, parameters in contents.optimizers.items()
    ]
    return {
        "format": contents.format,
        "step": contents.step,
        "num_bytes": contents.num_bytes,
        "model": {
            "num_tensors": len(contents.model),
            "num_bytes": sum(tensor.num_bytes for tensor in contents.model.values()),
        },
        "optimizers": [optimizer for optimizer in optimizers if optimizer["num_tensors"]],
    }


def _compare_counts(a: Manifest, b: Manifest) -> dict[str, tuple[Any, Any]]:
    """Returns the counters, ranks and mesh of two checkpoints."""
    counts = {
        name: (a.counters.get(name), b.counters.get(name)) for name in sorted(a.counters.keys() | b.counters.keys())
    }
    return {"step": (a.step, b.step), **counts, "ranks": (a.world_size, b.world_size), "mesh": (a.mesh, b.mesh)}


def _as_json(manifest: Manifest) -> Any:
    return json.loads(encode_manifest(manifest))


def _print_manifest(console: Console, path: Path, manifest: Manifest, drawn: Mapping[str, Drawn]) -> None:
    """Prints what is asked for most first, and what is long last: files, versions, recipe."""
    age = _duration(time.time() - manifest.created_seconds)
    facts = {
        "step": _number(manifest.step),
        **{name: _number(value) for name, value in manifest.counters.items() if name != "step"},
        "saved": f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(manifest.created_seconds))}, {age} ago",
        "optimizers": "saved" if manifest.has_optimizer else "not saved: it gives weights alone",
        "ranks": f"{manifest.world_size} {manifest.mesh or ''}".strip(),
        "number in its lineage": str(manifest.sequence),
    }
    console.print(_table(str(path), ("", ""), facts.items()))
    _print_parts(console, manifest)
    if drawn:
        _print_drawn(console, drawn)
    _print_lineage(console, path, manifest)
    console.rule("files", align="left")
    files = ((file.name, f"{file.num_bytes:,}", str(file.rank), file.hash[:16]) for file in manifest.files)
    columns = ("file", "bytes", "rank", manifest.hash_algorithm)
    console.print(_table(None, columns, files, right=("bytes", "rank")))
    console.rule("identity and versions", align="left")
    versions = {f"version of {package}": version for package, version in manifest.versions.items()}
    identity = {name: str(value) for name, value in manifest.identity.items()}
    console.print(_table(None, ("", ""), {**identity, **versions}.items()))
    console.rule("recipe", align="left")
    recipe = yaml.safe_dump(dict(manifest.recipe), sort_keys=False).rstrip() if manifest.recipe else "none was given"
    console.print(Text(recipe))


def _print_parts(console: Console, manifest: Manifest) -> None:
    console.rule("tensors by part", align="left")
    rows = [
        (part.part, f"{part.num_tensors:,}", f"{part.num_elements:,}", decimal(part.num_bytes), ", ".join(part.dtypes))
        for part in summarise_parts(manifest)
    ]
    columns = ("part", "tensors", "elements", "size", "dtype")
    console.print(_table(None, columns, rows, right=("tensors", "elements", "size")))


def _print_drawn(console: Console, drawn: Mapping[str, Drawn]) -> None:
    console.rule("data drawn", align="left")
    rows = (
        (
            name,
            _number(one.tokens),
            "" if one.epochs is None else f"{one.epochs:.3f}",
            _number(one.documents),
            _number(one.bad_documents),
        )
        for name, one in drawn.items()
    )
    columns = ("source", "tokens", "epochs", "documents", "bad")
    console.print(_table(None, columns, rows, right=columns[1:]))


def _print_lineage(console: Console, path: Path, manifest: Manifest) -> None:
    console.rule("lineage", align="left")
    chain = trace_ancestors(path, manifest)
    for ancestor, state in chain:
        where = "" if ancestor.directory is None else f" of {ancestor.directory}"
        line = f"descends from {ancestor.name}{where} ({state}), manifest {ancestor.manifest_hash[:23]}"
        console.print(Text(printable(line)))
    if not chain:
        console.print("the first of its run")


def _print_contents(contents: Contents, *, is_finite: bool) -> None:
    facts = _describe_contents(contents)
    at_step = "" if contents.step is None else f", step {contents.step:,}"
    print(f"  is         {_FORMATS[contents.format]}, {decimal(contents.num_bytes)}{at_step}")
    model = facts["model"]
    print(f"  model      {model['num_tensors']:,} tensors, {decimal(model['num_bytes'])}")
    for row in facts["optimizers"]:
        print(
            f"  optimizer  number {row['optimizer']}: {row['num_tensors']:,} tensors for {row['num_parameters']:,} "
            f"parameters, {decimal(row['num_bytes'])}"
        )
    if not facts["optimizers"]:
        print("  optimizer  no state: it holds weights alone")
    if is_finite:
        print("  finite     every value of these")
    print("  not shown  that the bytes are those that were saved: this format has no digests to compare with")


def _print_diff(
    console: Console,
    paths: Sequence[Path],
    settings: Sequence[Difference],
    counts: Mapping[str, tuple[Any, Any]],
    tensors: Sequence[TensorComparison],
    max_rows: int | None,
) -> None:
    console.print(Text(f"A {paths[0]}\nB {paths[1]}"))
    console.print(
        _table("counters", ("", "A", "B"), ((name, _number(a), _number(b)) for name, (a, b) in counts.items()))
    )
    setting_rows = [
        (difference.area, difference.key, str(difference.before), str(difference.now), _ON_RESUME[difference.verdict])
        for difference in settings
    ]
    if setting_rows:
        console.print(_table("settings that differ", ("area", "key", "A", "B", "on resume"), setting_rows))
    else:
        console.print("settings and versions are the same")
    changed = sorted(
        (comparison for comparison in tensors if comparison.verdict != "same"),
        key=lambda comparison: (comparison.name.partition(".")[0], -(comparison.max_abs_difference or 0.0)),
    )
    tensor_rows = [_tensor_cells(comparison) for comparison in changed[:max_rows]]
    if tensor_rows:
        columns = ("tensor", "what", "max abs difference", "digest in A", "digest in B")
        console.print(_table("tensors that differ", columns, tensor_rows, right=("max abs difference",)))
    left_out = len(changed) - len(tensor_rows)
    note = f" ({left_out:,} of them not shown: --all)" if left_out else ""
    console.print(f"{len(tensors) - len(changed):,} tensors are the same, {len(changed):,} differ{note}")


def _tensor_cells(comparison: TensorComparison) -> tuple[str, ...]:
    before, now, gap = comparison.before, comparison.now, comparison.max_abs_difference
    what: str = comparison.verdict
    if what == "reshaped" and before is not None and now is not None:
        what = f"{before.dtype} {list(before.shape)} -> {now.dtype} {list(now.shape)}"
    digests = (f"{record.digest:016x}" if record is not None else "" for record in (before, now))
    return comparison.name, what, "" if gap is None else f"{gap:.3e}", *digests


def _print_repairs(
    repairs: Sequence[Repair], places: Sequence[Path | None], latest: str | None, *, is_applied: bool
) -> None:
    for repair, place in zip(repairs, places, strict=True):
        print(f"{repair.path}\n  what    {_without_path(repair.path, repair.reason)}")
        if not is_applied or repair.action == "none":
            print(f"  to do   {repair.advice}")
        else:
            print(f"  done    {'deleted' if place is None else f'put aside as {place.name}'}")
    if not repairs:
        print("nothing is broken or left over")
    print(f"`--ckpt_path latest` goes on from {latest or 'nothing: no checkpoint verifies'}")


def _complain(error: Exception) -> int:
    print(f"genesis: error: {printable(str(error))}", file=sys.stderr)
    return BAD


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, allow_nan=False, default=str))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def _table(
    title: str | None, columns: Sequence[str], rows: Iterable[Iterable[str]], right: Sequence[str] = ()
) -> Table:
    """Returns a table without the columns in which no row has anything."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_header=any(columns))
    filled = [[printable(cell) for cell in row] for row in rows]
    kept = [number for number in range(len(columns)) if not filled or any(row[number] for row in filled)]
    for number in kept:
        column = columns[number]
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in filled:
        table.add_row(*(Text(row[number]) for number in kept))
    return table


def _number(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _duration(seconds: float) -> str:
    """Returns a length of time in its two largest units: `3 d 4 h`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length} {unit}")
            left %= length
    return " ".join(parts[:2])
