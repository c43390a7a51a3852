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
from genesis.cli.continued import keep_choices
from genesis.cli.fit import fit_main
from genesis.cli.trainer import count_ranks
from genesis.cli.trainer import read_recipe as read_recipe_of
from genesis.data.sizes import resolve_recipe
from genesis.data.skipped import read_ranges
from genesis.generate.checkpoint_reference import LATEST, read_reference
from genesis.objectives.find import find_objective
from genesis.operations.supervise.plan import RecipeFacts, write_facts
from genesis.recipe.imports import allowing, split_allowed
from genesis.recipe.resolved import ResolvedRecipe


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
        with allowing(allowed):
            facts = read_recipe(ResolvedRecipe.complete(resolved, "the recipe"))
    except UserError as error:
        print(f"genesis: error: {error}")
        return 2
    write_facts(Path(out), facts)
    return 0


def read_recipe(recipe: ResolvedRecipe) -> RecipeFacts:
    """Returns what the supervisor needs of a resolved recipe.

    Raises:
        UserError: The recipe has no size of its batches, which printing a recipe does not ask for.
    """
    for name in ("data.micro_batch_size", "data.global_batch_size"):
        if recipe.get(name) is None:
            raise UserError(f"{name} is missing: give a recipe by --config")
    num_ranks = count_ranks(recipe)
    num_nodes = recipe.count("trainer.num_nodes")
    return RecipeFacts(
        run_dir=str(recipe.get("run_dir")),
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        micro_batch_size=recipe.count("data.micro_batch_size"),
        recipe_hash=hash_recipe(recipe.content),
        global_batch_size=_find_batch(recipe, num_ranks * num_nodes),
        unskippable=_find_unskippable(recipe),
        skip_positions=read_ranges(recipe.get("data.skip_positions")),
        note=_note_kernels(recipe) or "",
    )


def _find_kept(recipe: ResolvedRecipe, name: str) -> Mapping[str, Any] | None:
    """Returns the recipe of the run that continues, if there is one and an option is `auto`: it keeps its choices."""
    is_auto = recipe.get(name, AUTO) == AUTO
    return read_recipe_of(read_reference(LATEST, run_dir=Path(str(recipe.get("run_dir"))))) if is_auto else None


def _find_batch(recipe: ResolvedRecipe, num_ranks: int) -> int:
    kept = keep_choices(recipe, _find_kept(recipe, "data.global_batch_size"))
    learns_from = find_objective(recipe.get("model.objective")).learns_from
    return resolve_recipe(recipe.complete_by(kept), num_ranks, learns_from).count("data.global_batch_size")


def _note_kernels(recipe: ResolvedRecipe) -> str | None:
    return note_unrepeatable(_find_kept(recipe, "trainer.deterministic") or recipe.content)


def _find_unskippable(recipe: ResolvedRecipe) -> str:
    if recipe.get("data.prompts") is not None:
        return "prompts"
    unskippable = {"pairs": "pairs of answers", "answers": "single answers"}
    return unskippable.get(find_objective(recipe.get("model.objective")).learns_from, "")


def hash_recipe(resolved: Mapping[str, Any]) -> str:
    """Returns a hash of a resolved recipe by which nodes find that they were given different ones.

    The number of nodes, which changes within a run, and the paths of recipe files are left out.
    """
    trainer = {name: value for name, value in resolved["trainer"].items() if name != "num_nodes"}
    kept = {name: value for name, value in resolved.items() if name != "config"} | {"trainer": trainer}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
