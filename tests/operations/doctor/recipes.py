"""Tiny recipes for the doctor, built as `genesis doctor --config` builds them."""

from functools import partial
from pathlib import Path
from typing import Any

import yaml

from genesis.cli.doctor_recipe import build_recipe
from genesis.operations.doctor.recipe import Build, BuiltRecipe, Capacity

DECODER = {
    "vocab_size": 320,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 64,
    "max_seq_len": 32,
}


def write_recipe(directory: Path, corpus: Path, **sections: Any) -> Path:
    """Writes a recipe of a few seconds, with changes by section."""
    recipe: dict[str, dict[str, Any]] = {
        "model": {"decoder": DECODER, "optimizer": {"name": "adamw", "lr": 3e-3}},
        "data": {"corpus": str(corpus), "seq_len": 32, "micro_batch_size": 2, "global_batch_size": 4},
        "checkpoint": {"every_n_steps": 100, "keep_last": 2},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1000, "precision": "32-true"},
    }
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(directory / "run"), **recipe}), encoding="utf-8")
    return path


def builder(recipe: Path) -> Build:
    return partial(build_recipe, ["--config", str(recipe)])


def have_room(built: BuiltRecipe) -> Capacity:
    return Capacity(1 << 34, 1e12)
