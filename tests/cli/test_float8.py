"""`model.float8` on the command line: recorded in the recipe, part of drift, and no part of an export."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from genesis_callbacks.base.manifest import MANIFEST_NAME
from genesis_callbacks.checkpoint import read_tensors
from tests.cli.conftest import Genesis
from tests.cli.test_bad_input import check_is_one_line

LATEST = ("--ckpt_path", "latest", "--trainer.max_steps", "5", "--checkpoint.allow_changed")
OF_ATTENTION = '{"include": ["*.attention.*"]}'


def test_a_run_records_its_layers_and_goes_on_with_others_only_by_permission(
    genesis: Genesis, recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit = ("fit", "--config", str(recipe))
    first = genesis(*fit, "--model.float8", OF_ATTENTION)
    assert first.status == 0, first.err
    assert "float8: the CPU emulates the products, which is slow" in caplog.text
    assert "float8: 4 linear layers" in caplog.text
    run_dir = recipe.parent / "run"
    saved = json.loads((run_dir / "checkpoints/step-00000004" / MANIFEST_NAME).read_text())["recipe"]
    written = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["model"]["float8"] == written["model"]["float8"] == {"include": ["*.attention.*"], "exclude": []}
    for other in ("null", "{}"):
        refused = genesis(*fit, *LATEST, "[trainer.max_steps]", "--model.float8", other)
        assert refused.status == 2
        assert "model.float8" in refused.err
        assert "--checkpoint.allow_changed" in refused.err
    caplog.clear()
    without = genesis(*fit, *LATEST, "[trainer.max_steps,model.float8*]", "--model.float8", "null")
    assert without.status == 0, without.err
    assert "linear layers" not in caplog.text


@pytest.mark.slow
def test_an_export_holds_the_weights_that_the_optimizer_updates(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    assert genesis("fit", "--config", str(recipe), "--model.float8", "{}").status == 0
    outcome = genesis("export", str(recipe.parent / "run"), str(tmp_path / "out"))
    assert outcome.status == 0, outcome.err
    assert "values bit-equal" in outcome.out
    exported = load_file(tmp_path / "out/model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    saved = read_tensors(recipe.parent / "run/checkpoints/step-00000004", prefix="model.")
    assert exported.dtype == torch.float32
    assert torch.equal(exported, saved["model.decoder.blocks.0.feed_forward.gate.weight"])


def test_a_sequence_that_float8_products_cannot_take_is_refused(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--model.float8", "{}", "--data.seq_len", "12")
    check_is_one_line(refused, "data.seq_len is 12: float8 products need a multiple of 16; give 16")


def test_patterns_without_a_layer_are_refused_before_the_run_has_a_directory(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--model.float8", '{"exclude": ["nope"]}')
    check_is_one_line(refused, "model.float8.exclude", "nope")
    assert not (recipe.parent / "run").exists()
