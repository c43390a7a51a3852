"""`genesis checkpoint diff`: compares the settings and tensors of two checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from genesis.base.console import Console
from genesis.base.errors import numbered
from genesis.cli.checkpoint.shared import (
    CHECKPOINT_HELP,
    build_console,
    build_parser,
    build_table,
    complain,
    format_number,
    print_json,
)
from genesis.generate.checkpoint_reference import find_checkpoint
from genesis.train.recipe_policy import RECIPE_POLICY
from genesis_callbacks.checkpoint import CorruptCheckpointError, Manifest, verify
from genesis_callbacks.checkpoint.compare import TensorComparison, compare_tensors
from genesis_callbacks.checkpoint.drift import Difference, find_drift

_MAX_TENSOR_ROWS = 20
_ON_RESUME = {
    "free": "goes on",
    "allowed": "goes on",
    "warned": "warns",
    "refused": "must be allowed",
    "never": "refused",
}
_DESCRIPTION = """Compares two checkpoints: recipe, versions, counters and tensors, one tensor at a time. The last
column shows what a resume of A with B's setting does: it continues, warns, must be allowed
(--checkpoint.allow_changed) or is refused. Both checkpoints are verified first, with every tensor's digest. Exit status
0 whether they differ or not, 1 if one is damaged.
Example: genesis checkpoint diff runs/a/best runs/b/400"""


def main(argv: list[str]) -> int:
    """Runs `genesis checkpoint diff` and returns its exit status."""
    parser = build_parser("diff", _DESCRIPTION)
    parser.add_argument("a", type=Path, help=CHECKPOINT_HELP)
    parser.add_argument("b", type=Path, help="the other checkpoint, in the same form")
    parser.add_argument("--all", action="store_true", help=f"list all tensors that differ, not only {_MAX_TENSOR_ROWS}")
    arguments = parser.parse_args(argv)
    paths = [find_checkpoint(value, level=None) for value in (arguments.a, arguments.b)]
    try:
        manifests = [verify(path, "deep") for path in paths]  # digests describe only tensors that verify
        tensors = list(compare_tensors(paths[0], manifests[0], paths[1], manifests[1]))
    except CorruptCheckpointError as error:
        return complain(error)
    settings = find_drift(
        manifests[0],
        identity=manifests[1].identity,
        recipe=manifests[1].recipe,
        versions=manifests[1].versions,
        policy=RECIPE_POLICY,
    )
    counts = _compare_counts(*manifests)
    if arguments.json:
        print_json(
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
        _print_diff(build_console(), paths, settings, counts, tensors, None if arguments.all else _MAX_TENSOR_ROWS)
    return 0


def _compare_counts(a: Manifest, b: Manifest) -> dict[str, tuple[Any, Any]]:
    """Returns the counters, ranks and mesh of two checkpoints."""
    counts = {
        name: (a.counters.get(name), b.counters.get(name)) for name in sorted(a.counters.keys() | b.counters.keys())
    }
    return {"step": (a.step, b.step), **counts, "ranks": (a.world_size, b.world_size), "mesh": (a.mesh, b.mesh)}


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
        build_table(
            "counters", ("", "A", "B"), ((name, format_number(a), format_number(b)) for name, (a, b) in counts.items())
        )
    )
    setting_rows = [
        (difference.area, difference.key, str(difference.before), str(difference.now), _ON_RESUME[difference.verdict])
        for difference in settings
    ]
    if setting_rows:
        console.print(build_table("settings that differ", ("area", "key", "A", "B", "on resume"), setting_rows))
    else:
        console.print("settings and versions are the same")
    changed = sorted(
        (comparison for comparison in tensors if comparison.verdict != "same"),
        key=lambda comparison: (comparison.name.partition(".")[0], -(comparison.max_abs_difference or 0.0)),
    )
    tensor_rows = [_tensor_cells(comparison) for comparison in changed[:max_rows]]
    if tensor_rows:
        columns = ("tensor", "what", "max abs difference", "digest in A", "digest in B")
        console.print(build_table("tensors that differ", columns, tensor_rows, right=("max abs difference",)))
    left_out = len(changed) - len(tensor_rows)
    note = f" ({left_out:,} of them not shown: --all)" if left_out else ""
    console.print(f"equal: {numbered(len(tensors) - len(changed), 'tensors')}; different: {len(changed):,}{note}")


def _tensor_cells(comparison: TensorComparison) -> tuple[str, ...]:
    before, now, gap = comparison.before, comparison.now, comparison.max_abs_difference
    what: str = comparison.verdict
    if what == "reshaped" and before is not None and now is not None:
        what = f"{before.dtype} {list(before.shape)} -> {now.dtype} {list(now.shape)}"
    digests = (f"{record.digest:016x}" if record is not None else "" for record in (before, now))
    return comparison.name, what, "" if gap is None else f"{gap:.3e}", *digests
