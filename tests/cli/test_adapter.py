"""Adapters through the commands: trained beside a frozen base, saved, resumed, refused where they do not fit."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from genesis.export.importing import save_weights
from genesis.model.adapter import find_linears
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.nf4 import quantise
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.checkpoint import read_manifest, read_tensors, verify
from tests.cli.conftest import Genesis
from tests.cli.test_run import committed_steps, losses
from tests.cli.tiny import build_recipe, write_recipe
from tests.serve.test_ids import ask_all

ADAPTER: dict[str, Any] = {"rank": 4, "alpha": 8.0, "dropout": 0.1}


def make_base(
    directory: Path,
    corpus: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shape: dict[str, Any] | None = None,
) -> Path:
    """Returns a run with one checkpoint, as an import makes it."""
    config = DecoderConfig(**{**build_recipe(corpus, directory)["model"]["decoder"], **(shape or {})})
    decoder = Decoder(config)
    decoder.init_weights(seed)
    directory.mkdir()
    save_weights(decoder.to(dtype).state_dict(), config, open_tokenizer(corpus), directory / "checkpoints")
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "imported", tiny_corpus)


@pytest.fixture
def tuned(base: Path, tiny_corpus: Path, tmp_path: Path) -> Path:
    """Returns the recipe of a run with adapters."""
    recipe = build_recipe(tiny_corpus, tmp_path / "tuned")
    recipe["model"]["adapter"] = {**ADAPTER, "base": str(base)}
    return write_recipe(tmp_path / "tuned.yaml", recipe)


def hash_tree(directory: Path) -> dict[str, str]:
    """Returns the hash of each file, and when it was last written."""
    return {
        str(path.relative_to(directory)): f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_a_save_holds_the_adapters_alone_and_the_base_is_never_written(
    genesis: Genesis, base: Path, tuned: Path, tmp_path: Path
) -> None:
    before = hash_tree(base)
    fitted = genesis("fit", "--config", str(tuned))
    assert fitted.status == 0, fitted.err
    assert hash_tree(base) == before
    run_dir = tmp_path / "tuned"
    assert committed_steps(run_dir) == [2, 4]
    newest = run_dir / "checkpoints/step-00000004"
    manifest = verify(newest, "deep")
    assert manifest.base is not None
    assert all(name.endswith(("lora_A", "lora_B")) for name in manifest.own_tensors if name.startswith("model."))
    trained = [name for name in manifest.own_tensors if name.startswith("optimizer.")]
    assert len(trained) == 3 * 2 * 7  # a step and two moments for each of two matrices in each of seven layers
    now, then = read_tensors(newest, prefix="model."), read_tensors(base / "checkpoints/step-00000000", prefix="model.")
    assert all(torch.equal(now[name], tensor) for name, tensor in then.items())
    assert len(now) == len(then) + 2 * 7
    assert any(bool(now[name].any()) for name in now if name.endswith("lora_B"))
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert resolved["model"]["adapter"]["base"] == str(base / "checkpoints/step-00000000")


def test_the_base_is_validated_without_the_recipes_adapters(genesis: Genesis, base: Path, tuned: Path) -> None:
    options = ("--config", str(tuned), "--ckpt_path", str(base))
    refused = genesis("validate", *options)
    assert refused.status == 2
    assert "is the base, without adapters" in refused.err
    assert len([line for line in refused.err.splitlines() if line.startswith("genesis: error")]) == 1
    alone = genesis("validate", *options, "--model.adapter", "null")
    assert alone.status == 0, alone.err
    assert "validation/loss" in alone.out


def test_a_base_in_nf4_is_validated_alone_near_the_loss_of_its_own_weights(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path
) -> None:
    recipe = build_recipe(tiny_corpus, tmp_path / "run")
    recipe["model"]["decoder"] |= {"dim": 64, "ffn_dim": 64}  # NF4 has blocks of 64 weights
    config = DecoderConfig(**recipe["model"]["decoder"])
    decoder = Decoder(config)
    decoder.init_weights(0)
    state = decoder.state_dict()
    linears = [f"{name}.weight" for name in find_linears(decoder)]
    packed = {
        f"{name.removesuffix('.weight')}.{part}": held
        for name in linears
        for part, held in quantise(state[name]).items()
    }
    rest = {name: tensor for name, tensor in state.items() if name not in linears}
    losses = {}
    for name, weights in (("plain", state), ("nf4", rest | packed)):
        (tmp_path / name).mkdir()
        save_weights(weights, config, open_tokenizer(tiny_corpus), tmp_path / name / "checkpoints")
        out = tmp_path / f"{name}.json"
        path = write_recipe(tmp_path / "recipe.yaml", recipe)
        words = ("--config", str(path), "--ckpt_path", str(tmp_path / name), "--json", str(out))
        validated = genesis("validate", *words)
        assert validated.status == 0, validated.err
        losses[name] = json.loads(out.read_text())["validation/loss"]
        assert f"{losses[name]:.6f}"[:6] in validated.out
    assert 0.0 < abs(losses["nf4"] - losses["plain"]) < 0.01


@pytest.mark.slow
@pytest.mark.repeat  # `tests/train/test_adapter_ladder.py` kills and resumes
def test_a_resumed_run_equals_one_that_was_never_stopped(genesis: Genesis, tuned: Path, tmp_path: Path) -> None:
    options = ("--config", str(tuned))
    # As a job that restarts itself writes it: there is nothing to resume at first.
    straight = genesis("fit", *options, "--run_dir", str(tmp_path / "straight"), "--ckpt_path", "latest")
    assert straight.status == 0, straight.err
    assert genesis("fit", *options, "--trainer.max_steps", "2").status == 0
    allowed = ("--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]")
    resumed = genesis("fit", *options, *allowed)
    assert resumed.status == 0, resumed.err
    ends = [read_tensors(tmp_path / name / "checkpoints/step-00000004") for name in ("straight", "tuned")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items() if not name.startswith("state."))
    assert losses(tmp_path / "tuned") == losses(tmp_path / "straight")


@pytest.mark.slow
def test_the_recipe_of_an_import_takes_adapters_without_further_options(
    genesis: Genesis, base: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    recipe = build_recipe(tiny_corpus, tmp_path / "tuned")
    recipe["ckpt_path"] = str(base / "checkpoints/step-00000000")
    recipe["checkpoint"]["restore"] = "weights"
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    assert genesis("fit", "--config", str(path), "--run_dir", str(tmp_path / "full")).status == 0
    tuned = genesis("fit", "--config", str(path), "--model.adapter.rank", "2")
    assert tuned.status == 0, tuned.err
    full, adapted = (tmp_path / name / "checkpoints/step-00000004" for name in ("full", "tuned"))
    assert read_manifest(full).base is None
    reference = read_manifest(adapted).base
    assert reference is not None
    assert Path(reference.path) == base / "checkpoints/step-00000000"
    again = genesis("fit", "--config", str(path), "--model.adapter.rank", "2", "--ckpt_path", "latest")
    assert again.status == 0, again.err
    assert genesis("validate", "--config", str(path), "--model.adapter.rank", "2", "--ckpt_path", "latest").status == 0
    changed = genesis("fit", "--config", str(path), "--model.adapter.rank", "3", "--ckpt_path", "latest")
    assert changed.status == 2
    assert "model.adapter.rank is 3 and was 2" in changed.err


@pytest.mark.slow
def test_a_resume_beside_another_base_is_refused(
    genesis: Genesis, base: Path, tuned: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    assert genesis("fit", "--config", str(tuned)).status == 0
    other = make_base(tmp_path / "other", tiny_corpus, seed=1)
    options = ("--config", str(tuned), "--ckpt_path", "latest", "--model.adapter.base")
    for name in (str(other), f"{other}/0"):
        refused = genesis("fit", *options, name)
        assert refused.status == 2
        assert "belong to the base" in refused.err
        assert len(refused.err.splitlines()) == 1
    # The same base at another place is the same base.
    moved = Path(shutil.copytree(base, tmp_path / "moved"))
    goes_on = genesis("fit", *options, str(moved))
    assert goes_on.status == 0, goes_on.err


@pytest.mark.slow
@pytest.mark.repeat  # `tests/train/test_expert_adapters.py`
def test_a_base_in_bfloat16_stays_so_beside_adapters_in_float32(
    genesis: Genesis, tuned: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    small = make_base(tmp_path / "small", tiny_corpus, dtype=torch.bfloat16)
    fitted = genesis("fit", "--config", str(tuned), "--model.adapter.base", str(small))
    assert fitted.status == 0, fitted.err
    tensors = read_tensors(tmp_path / "tuned/checkpoints/step-00000004", prefix="model.")
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors.items()}
    assert dtypes == {"weight": torch.bfloat16, "lora_A": torch.float32, "lora_B": torch.float32}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rank", "17", "model.adapter.rank is 17, more than the width 16 of blocks.0.attention.key: set it to 16 or"),
        ("rank", "0", "rank is 0: it must be at least 1"),
        ("alpha", "0", "alpha is 0, so that adapters add nothing: it must be above 0"),
        ("dropout", "1.0", "dropout of adapters is 1.0"),
        (
            "include",
            "['*.q_proj']",
            "model.adapter.include has '*.q_proj', which matches no linear layer of the blocks",
        ),
        ("exclude", "['*.router']", "model.adapter.exclude has '*.router', which matches no linear layer"),
        ("exclude", "['*']", "takes away every layer of include"),
        ("also_train", "[head]", "model.adapter.also_train has 'head', and the output weight is the embedding"),
        ("base", "nowhere", "no such directory: nowhere"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused_in_one_line(
    genesis: Genesis, tuned: Path, option: str, value: str, message: str
) -> None:
    refused = genesis("fit", "--config", str(tuned), f"--model.adapter.{option}", value)
    assert refused.status == 2
    assert message in refused.err
    assert len(refused.err.splitlines()) == 1, refused.err


@pytest.mark.slow
def test_adapters_are_used_exported_and_trained_further_through_the_commands(
    genesis: Genesis, tuned: Path, tmp_path: Path
) -> None:
    run, prompt = str(tmp_path / "tuned"), ("--prompt", "line", "--max_new_tokens", "4", "--temperature", "0")
    assert genesis("fit", "--config", str(tuned), "--model.adapter.dropout", "0").status == 0
    shown = genesis("generate", run, *prompt, "--device", "cpu")
    assert shown.status == 0, shown.err
    ((status, answer, _),) = ask_all(tmp_path / "tuned", {"model": "latest", "prompt": "line", "max_tokens": 2})
    assert status == 200, answer
    refused = genesis("export", run, str(tmp_path / "out"))
    assert (refused.status, "give --adapter" in refused.err) == (2, True)
    merged = genesis("export", run, str(tmp_path / "merged"), "--merge")
    assert merged.status == 0, merged.err
    assert "merged: logits differ from the adapters' by at most" in merged.out
    assert genesis("generate", str(tmp_path / "merged"), *prompt, "--device", "cpu").out == shown.out
    alone = genesis("export", run, str(tmp_path / "adapter"), "--adapter", "--base_name", "ORG/NAME")
    assert alone.status == 0, alone.err
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "ORG/NAME"
    start = ("--model.adapter.start", str(tmp_path / "adapter"))
    on = genesis("fit", "--config", str(tuned), "--run_dir", str(tmp_path / "on"), *start, "--trainer.max_steps", "1")
    assert on.status == 0, on.err
    before = read_tensors(tmp_path / "tuned/checkpoints/step-00000004", prefix="model.")
    after = read_tensors(tmp_path / "on/checkpoints/step-00000001", prefix="model.")
    name = "model.decoder.blocks.0.attention.query.lora_A"
    assert 0 < float((after[name] - before[name]).abs().max()) < 0.02  # one step of 0.01 away
    other = genesis(
        "fit", "--config", str(tuned), "--run_dir", str(tmp_path / "x"), *start, "--model.adapter.rank", "2"
    )
    assert (other.status, "model.adapter.rank is 2, and the adapters in" in other.err) == (2, True)
