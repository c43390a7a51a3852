"""`genesis checkpoint show`: describes a checkpoint."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.text import Text

from genesis.base.console import Console
from genesis.base.errors import numbered, printable
from genesis.cli.checkpoint.shared import (
    CHECKPOINT_HELP,
    build_console,
    build_parser,
    build_table,
    complain,
    format_duration,
    format_number,
    print_json,
)
from genesis.data.usage import DataUsage, read_data_usage
from genesis.generate.checkpoint_reference import find_checkpoint
from genesis.recipe.yaml import dump_yaml
from genesis_callbacks.base.manifest import encode_manifest
from genesis_callbacks.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    Manifest,
    read_manifest,
)
from genesis_callbacks.checkpoint.inventory import summarise_parts, trace_ancestors
from genesis_callbacks.checkpoint.state import read_state
from genesis_callbacks.checkpoint.tensor_places import find_base

_DESCRIPTION = """Describes a checkpoint: counters, recipe, versions, files, tensors by part, ancestors.
Example: genesis checkpoint show runs/demo/run/800"""


def main(argv: list[str]) -> int:
    """Runs `genesis checkpoint show` and returns its exit status."""
    parser = build_parser("show", _DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)
    arguments = parser.parse_args(argv)
    path = find_checkpoint(arguments.checkpoint, level=None)
    try:
        manifest = read_manifest(path)
        usage = read_data_usage(read_state(path, manifest))
    except CorruptCheckpointError as error:
        return complain(error)
    if arguments.json:
        content = {
            "path": str(path),
            "manifest": _as_json(manifest),
            "parts": [asdict(summary) for summary in summarise_parts(manifest)],
            "data_usage": {name: asdict(one) for name, one in usage.items()},
            "lineage": [{**asdict(ancestor), "state": state} for ancestor, state in trace_ancestors(path, manifest)],
        }
        print_json(content)
    else:
        _print_manifest(build_console(), path, manifest, usage)
    return 0


def _as_json(manifest: Manifest) -> Any:
    return json.loads(encode_manifest(manifest))


def _print_manifest(console: Console, path: Path, manifest: Manifest, usage: Mapping[str, DataUsage]) -> None:
    """Prints the most requested facts first, and the long sections last: files, versions, recipe."""
    age = format_duration(time.time() - manifest.created_seconds)
    facts = {
        "step": format_number(manifest.step),
        **{name: format_number(value) for name, value in manifest.counters.items() if name != "step"},
        "saved": f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(manifest.created_seconds))}, {age} ago",
        **_describe_base(path, manifest),
        "optimizers": "saved" if manifest.has_optimizer else "not saved: only the weights can be loaded",
        "ranks": f"{manifest.world_size} {manifest.mesh or ''}".strip(),
        "number in its lineage": str(manifest.sequence),
    }
    console.print(build_table(str(path), ("", ""), facts.items()))
    _print_parts(console, manifest)
    if usage:
        _print_usage(console, usage)
    _print_lineage(console, path, manifest)
    console.rule("files", align="left")
    files = ((file.name, f"{file.num_bytes:,}", str(file.rank), file.hash[:16]) for file in manifest.files)
    columns = ("file", "bytes", "rank", manifest.hash_algorithm)
    console.print(build_table(None, columns, files, right=("bytes", "rank")))
    console.rule("identity and versions", align="left")
    versions = {
        name if name.partition(".")[0] == "device" else f"version of {name}": value
        for name, value in manifest.versions.items()
    }
    identity = {name: str(value) for name, value in manifest.identity.items()}
    console.print(build_table(None, ("", ""), {**identity, **versions}.items()))
    console.rule("recipe", align="left")
    recipe = dump_yaml(dict(manifest.recipe)).rstrip() if manifest.recipe else "not recorded"
    console.print(Text(recipe))


def _describe_base(path: Path, manifest: Manifest) -> dict[str, str]:
    """Returns the row about the base that holds some of the tensors; none where there is no base."""
    base = manifest.base
    if base is None:
        return {}
    try:
        place, _ = find_base(path, base)
    except CheckpointError as error:
        where = f"NOT FOUND: {error}"
    else:
        where = str(place)
    return {"base": printable(f"{numbered(len(base.names), 'tensors')} in {where}")}


def _print_parts(console: Console, manifest: Manifest) -> None:
    console.rule("tensors by part", align="left")
    rows = [
        (part.part, f"{part.num_tensors:,}", f"{part.num_elements:,}", decimal(part.num_bytes), ", ".join(part.dtypes))
        for part in summarise_parts(manifest)
    ]
    columns = ("part", "tensors", "elements", "size", "dtype")
    console.print(build_table(None, columns, rows, right=("tensors", "elements", "size")))


def _print_usage(console: Console, usage: Mapping[str, DataUsage]) -> None:
    console.rule("data consumed", align="left")
    rows = (
        (
            name,
            format_number(one.tokens),
            "" if one.epochs is None else f"{one.epochs:.3f}",
            format_number(one.documents),
            format_number(one.bad_documents),
        )
        for name, one in usage.items()
    )
    columns = ("source", "tokens", "epochs", "documents", "bad")
    console.print(build_table(None, columns, rows, right=columns[1:]))


def _print_lineage(console: Console, path: Path, manifest: Manifest) -> None:
    console.rule("lineage", align="left")
    chain = trace_ancestors(path, manifest)
    for ancestor, state in chain:
        where = "" if ancestor.directory is None else f" of {ancestor.directory}"
        line = f"descends from {ancestor.name}{where} ({state}), manifest {ancestor.manifest_hash[:23]}"
        console.print(Text(printable(line)))
    if not chain:
        console.print("the first of its run")
