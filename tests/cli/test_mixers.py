"""A sequence mixer that a user brings as one file: from a recipe to a run, its continuation, a plan and a text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from genesis.generate.load import load_decoder
from genesis_callbacks.checkpoint import read_manifest
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe

LATENT = {"num_heads": 4, "latent_dim": 16, "key_dim": 8, "rotary_dim": 4, "value_dim": 10}
ALLOW = ("--allow_imports", "tests.model.latent_attention")


def write_latent(directory: Path, corpus: Path, package: str = "tests.model.latent_attention") -> Path:
    """Writes a recipe whose layers have latent attention, and attention in turn."""
    recipe = build_recipe(corpus, directory / "run")
    decoder: dict[str, Any] = recipe["model"]["decoder"]
    attention = {name: decoder.pop(name) for name in ("num_heads", "num_kv_heads")}
    decoder["num_layers"] = 2
    decoder["mixers"] = [
        {"class_path": f"{package}.LatentAttentionConfig", "init_args": LATENT},
        {"class_path": "genesis.model.attention.AttentionConfig", "init_args": attention},
    ]
    return write_recipe(directory / "recipe.yaml", recipe)


def read_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_decoder(run_dir).decoder.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name"), [("tests.model.latent_attention", "mixer"), ("genesis.model.latent", "attention")]
)
def test_a_run_with_a_mixer_of_an_own_file_goes_on_bit_for_bit_and_is_planned_and_generates(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path, package: str, name: str
) -> None:
    recipe = write_latent(tmp_path, tiny_corpus, package)
    fit = ("fit", "--config", str(recipe), *ALLOW)
    middle = tmp_path / "straight/checkpoints/step-00000002"
    for run, *options in (("straight",), ("parted", "--ckpt_path", str(middle))):
        done = genesis(*fit, "--run_dir", str(tmp_path / run), *options)
        assert done.status == 0, done.err
    straight, parted = (read_weights(tmp_path / run) for run in ("straight", "parted"))
    assert {f"blocks.0.{name}.compress.weight", "blocks.1.attention.key.weight"} <= straight.keys()
    assert all(torch.equal(parted[key], weight) for key, weight in straight.items())
    held = read_manifest(tmp_path / "parted/checkpoints/step-00000004").recipe["model"]["decoder"]["mixers"]
    assert [one["class_path"].rpartition(".")[2] for one in held] == ["LatentAttentionConfig", "AttentionConfig"]
    planned = genesis("plan", "--config", str(recipe), "--json", *ALLOW)
    assert planned.status == 0, planned.err
    assert json.loads(planned.out)["notes"] == []  # its memory is measured like that of every mixer
    options = (str(tmp_path / "parted"), "--prompt", "a", "--max_new_tokens", "5", "--temperature", "0", *ALLOW)
    texts = [genesis("generate", *options, *others) for others in ((), ("--no_cache",))]
    assert texts[0].status == 0, texts[0].err
    assert texts[0].out == texts[1].out


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({"init_args": {**LATENT, "latent_dimm": 1}}, "unknown key 'latent_dimm'; did you mean 'latent_dim'?"),
        ({"init_args": {**LATENT, "num_heads": "four"}}, "num_heads is 'four'; it must be int"),
        ({"class_path": "genesis.model.attention.Attention"}, "class_path is 'genesis.model.attention.Attention'; it"),
    ],
)
def test_a_mistake_in_an_entry_of_the_list_is_reported_with_its_place(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path, entry: dict[str, Any], line: str
) -> None:
    path = write_latent(tmp_path, tiny_corpus)
    recipe = yaml.safe_load(path.read_text())
    recipe["model"]["decoder"]["mixers"][0] |= entry
    refused = genesis("fit", "--config", str(write_recipe(path, recipe)), *ALLOW)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert refused.err.startswith(f"genesis: error: {path}: model.decoder: mixers[0]: {line}")
