"""Adapters on experts through the commands: merged beside the checkpoints, resumed, and a teacher for a student."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.export.importing import save_weights
from genesis.generate.load import load_decoder
from genesis.huggingface.shape import name_part
from genesis.model.decoder import Decoder
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import build_decoder_config
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.checkpoint import read_manifest, read_tensors
from tests.cli.conftest import Genesis
from tests.cli.test_run import committed_steps, losses
from tests.cli.tiny import build_recipe, write_recipe

MIXTURE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_dim": 24}
ADAPTER: dict[str, Any] = {"rank": 4, "alpha": 8.0, "include_experts": ["*"]}
IDS = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.slow


def build_mixture_recipe(corpus: Path, run_dir: Path, **mixture: Any) -> dict[str, Any]:
    recipe = build_recipe(corpus, run_dir)
    decoder = recipe["model"]["decoder"]
    del decoder["ffn_dim"]
    decoder["feed_forward"] = name_part(MixtureConfig, {**MIXTURE, **mixture})
    return recipe


@pytest.fixture
def tuned(genesis: Genesis, tiny_corpus: Path, tmp_path: Path) -> Path:
    """Returns the recipe of a run with adapters on experts, which has taken two of its four steps."""
    recipe = build_mixture_recipe(tiny_corpus, tmp_path / "tuned")
    config = build_decoder_config(recipe["model"]["decoder"], where="the recipe")
    decoder = Decoder(config)
    decoder.init_weights(0)
    (tmp_path / "base").mkdir()
    save_weights(decoder.state_dict(), config, open_tokenizer(tiny_corpus), tmp_path / "base/checkpoints")
    recipe["model"]["adapter"] = {**ADAPTER, "base": str(tmp_path / "base")}
    path = write_recipe(tmp_path / "tuned.yaml", recipe)
    begun = genesis("fit", "--config", str(path), "--trainer.max_steps", "2")
    assert begun.status == 0, begun.err
    return path


RESUME = ("--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]")


def test_a_merged_export_within_the_run_has_the_logits_of_the_adapters_and_the_run_is_resumed(
    genesis: Genesis, tuned: Path, tmp_path: Path
) -> None:
    run, alone = tmp_path / "tuned", tmp_path / "alone"
    shutil.copytree(run, alone)
    straight = genesis("fit", "--config", str(tuned), "--run_dir", str(alone), *RESUME)
    assert straight.status == 0, straight.err
    exported = genesis("export", str(run), str(run / "merged"), "--merge")
    assert exported.status == 0, exported.err
    assert "merged: logits differ from the adapters' by at most" in exported.out
    with torch.no_grad():
        merged, adapted = (load_decoder(path).decoder(IDS) for path in (run / "merged", run))
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-5)
    resumed = genesis("fit", "--config", str(tuned), *RESUME)
    assert resumed.status == 0, resumed.err
    assert committed_steps(run) == [2, 4]
    ends = [read_tensors(directory / "checkpoints/step-00000004") for directory in (run, alone)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items() if not name.startswith("state."))
    assert losses(run) == losses(alone)
    again = genesis("export", str(run), str(run / "merged"), "--merge")
    assert (again.status, "already exists and is not overwritten" in again.err) == (2, True)
    shown = genesis("generate", str(run / "merged"), "--prompt", "line", "--max_new_tokens", "2", "--device", "cpu")
    assert shown.status == 0, shown.err
    assert genesis("export", f"{run}/2", str(run / "merged-2"), "--merge").status == 0


def test_a_mixture_learns_from_the_cache_of_a_mixture_whose_adapters_were_merged(
    genesis: Genesis, tuned: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    """The commands of configs/finetune/qwen3.5-397b-to-35b-distill.yaml, with tiny models."""
    teacher, cache = tmp_path / "merged", tmp_path / "cache"
    assert genesis("export", str(tmp_path / "tuned"), str(teacher), "--merge").status == 0
    corpus = Path(shutil.copytree(tiny_corpus, tmp_path / "corpus"))  # a plan is written into it
    packed = ("--seq_len", "16", "--packing", "best_fit")
    assert genesis("data", "plan", str(corpus), *packed).status == 0
    shape = (*packed, "--top_k", "8", "--batch_size", "2", "--device", "cpu")
    made = genesis("data", "distill", str(corpus), str(teacher), *shape, "--out", str(cache))
    assert made.status == 0, made.err
    recipe = build_mixture_recipe(corpus, tmp_path / "student", num_experts=3, shared_ffn_dim=16)
    recipe["data"]["packing"] = "best_fit"
    options = {"top_k": 8, "temperature": 1.0, "teacher_share": 0.7}
    recipe["model"]["objective"] = {"class_path": "genesis.objectives.Distillation", "init_args": options}
    path = str(write_recipe(tmp_path / "student.yaml", recipe))
    source = "--model.objective.init_args."
    student = genesis("fit", "--config", path, f"{source}cache", str(cache))
    assert student.status == 0, student.err
    # The same student beside the adapted teacher itself: merging changes no more than rounding.
    beside = ("--run_dir", str(tmp_path / "beside"), f"{source}teacher", str(tmp_path / "tuned"))
    fitted = genesis("fit", "--config", path, *beside)
    assert fitted.status == 0, fitted.err
    cached, live = ([float(loss) for loss in losses(tmp_path / name) if loss] for name in ("student", "beside"))
    assert cached == pytest.approx(live, rel=1e-4)
    assert len(cached) == 4
    assert read_manifest(tmp_path / "student/checkpoints/step-00000004").identity["teacher_cache"] != "none"
