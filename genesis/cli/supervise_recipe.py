"""Resolves the recipe of a supervised run, in a child of the launcher: the supervisor itself imports no torch."""

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from genesis.base.arguments import respell
from genesis.base.determinism import AUTO, note_unrepeatable
from genesis.base.errors import UserError
from genesis.cli.fit import fit_main
from genesis.cli.trainer import count_ranks
from genesis.cli.trainer import read_recipe as read_recipe_of
from genesis.data.sizes import AUTO as AUTO_SIZE
from genesis.data.sizes import resolve_recipe
from genesis.data.skipped import read_ranges
from genesis.generate.checkpoint_reference import LATEST, read_reference
from genesis.objectives import DPO
from genesis.operations.supervise.plan import RecipeFacts, write_facts
from genesis.recipe.imports import allowing, split_allowed


def main(arguments: list[str]) -> int:
    """Writes the facts of a recipe to the file that the first argument names; the others are those of `genesis fit`."""
    out, *fit = arguments
    printed = io.StringIO()
    words, allowed = split_allowed(respell(fit[1:]))
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit), allowing(allowed):
        fit_main([*words, "--print_config"])
    if not printed.getvalue():  # the parser has printed what is wrong with the arguments
        return 2
    resolved = yaml.safe_load(printed.getvalue())
    try:
        facts = read_recipe(resolved)
    except UserError as error:
        print(f"genesis: error: {error}")
        return 2
    write_facts(Path(out), facts)
    return 0


def read_recipe(resolved: Mapping[str, Any]) -> RecipeFacts:
    """Returns what the supervisor needs of a resolved recipe.

    Raises:
        UserError: The recipe has no size of its batches, which printing a recipe does not ask for.
    """
    trainer = resolved["trainer"]
    for name in ("micro_batch_size", "global_batch_size"):
        if resolved["data"].get(name) is None:
            raise UserError(f"data.{name} is missing: give a recipe by --config")
    num_ranks, num_nodes = count_ranks(trainer["devices"], trainer["accelerator"]), int(trainer.get("num_nodes") or 1)
    return RecipeFacts(
        run_dir=str(resolved["run_dir"]),
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        micro_batch_size=int(resolved["data"]["micro_batch_size"]),
        recipe_hash=hash_recipe(resolved),
        global_batch_size=_find_batch(resolved, num_ranks * num_nodes),
        unskippable=_find_unskippable(resolved),
        skip_positions=read_ranges(resolved["data"].get("skip_positions")),
        note=_note_kernels(resolved) or "",
    )


def _find_batch(resolved: Mapping[str, Any], num_ranks: int) -> int:
    """Returns the sequences of a step; a run that continues with `auto` keeps its own number."""
    if resolved["data"]["global_batch_size"] == AUTO_SIZE:
        kept = read_recipe_of(read_reference(LATEST, run_dir=Path(str(resolved["run_dir"]))))
        resolved = kept or resolve_recipe(resolved, resolved["model"]["decoder"]["max_seq_len"], num_ranks)
    return int(resolved["data"]["global_batch_size"])


def _note_kernels(resolved: Mapping[str, Any]) -> str | None:
    """Returns the line about kernels that need not repeat; a run that continues with `auto` keeps its own choice."""
    given, run_dir = resolved["trainer"].get("deterministic"), Path(str(resolved["run_dir"]))
    kept = read_recipe_of(read_reference(LATEST, run_dir=run_dir)) if given in (None, AUTO) else None
    return note_unrepeatable(kept or resolved)


def _find_unskippable(resolved: Mapping[str, Any]) -> str:
    if resolved["data"].get("prompts") is not None:
        return "prompts"
    objective = resolved["model"].get("objective") or {}
    return "pairs of answers" if str(objective.get("class_path")).rpartition(".")[2] == DPO.__name__ else ""


def hash_recipe(resolved: Mapping[str, Any]) -> str:
    """Returns a hash of a resolved recipe by which nodes find that they were given different ones.

    The number of nodes, which changes within a run, and the paths of recipe files are left out.
    """
    trainer = {name: value for name, value in resolved["trainer"].items() if name != "num_nodes"}
    kept = {name: value for name, value in resolved.items() if name != "config"} | {"trainer": trainer}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
