"""A model of transformers through the real commands: imported, trained, exported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genesis_callbacks.checkpoint import find_latest
from tests.commands import run_genesis
from tests.model.foreign.models import configure, make_theirs


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("kind", ["gemma3_text", "gemma3"])
def test_an_imported_model_trains_by_its_recipe_and_goes_back(tmp_path: Path, tiny_corpus: Path, kind: str) -> None:
    make_theirs(configure(kind)).save_pretrained(tmp_path / "theirs")

    def run(*words: str | Path) -> str:
        done = run_genesis(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout + done.stderr)

    assert "train on: genesis fit" in run("import", "theirs", "run", "--as", "transformers", "--no_tokenizer")
    sizes = ("--data.seq_len", "16", "--data.global_batch_size", "4", "--data.num_epochs", "null")
    recipe = ("--config", "run/recipe.yaml", "--data.corpus", tiny_corpus, "--trainer.accelerator", "cpu")
    run("fit", *recipe, *sizes, "--trainer.max_steps", "2")
    latest = find_latest(tmp_path / "run-continued")
    assert latest is not None
    assert latest.name == "step-00000002"
    assert "bit-equal" in run("export", "run-continued", "back", "--dtype", "float32")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    equal = {name for name, tensor in before.items() if torch.equal(after[name], tensor)}
    assert equal == {name for name in before if "vision" in name or "multi_modal" in name}
    card = (tmp_path / "back/README.md").read_text()
    assert ("AutoModelForImageTextToText" if kind == "gemma3" else "AutoModelForCausalLM") in card
