"""A reward model through the commands: trained, resumed, validated, planned, described, and refused where it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genesis_callbacks.checkpoint import read_tensors
from tests.cli.conftest import Genesis
from tests.cli.test_adapter import make_base
from tests.cli.test_preference import recipe_of, refusal
from tests.cli.test_run import losses
from tests.cli.tiny import write_recipe
from tests.data.pair_corpora import SEQ_LEN, write_pair_corpus

SHAPE: dict[str, Any] = {"vocab_size": 400, "max_seq_len": SEQ_LEN, "num_scores": 1}
OBJECTIVE: dict[str, Any] = {
    "class_path": "genesis.objectives.RewardModel",
    "init_args": {"center_rewards_coefficient": 0.01},
}


@pytest.fixture(scope="module")
def pair_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_corpus(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def recipe(pair_corpus: Path, tmp_path: Path) -> Path:
    changes = {"model.objective": OBJECTIVE, "model.decoder.num_scores": 1}
    return write_recipe(tmp_path / "reward.yaml", recipe_of(pair_corpus, tmp_path / "run"), changes)


@pytest.mark.slow
def test_a_reward_model_is_trained_resumed_validated_planned_and_described(
    genesis: Genesis, recipe: Path, tmp_path: Path
) -> None:
    options, allowed = ("--config", str(recipe)), ("--checkpoint.allow_changed", "[trainer.max_steps]")
    straight = genesis("fit", *options, "--run_dir", str(tmp_path / "straight"))
    assert straight.status == 0, straight.err
    assert genesis("fit", *options, "--trainer.max_steps", "2").status == 0
    resumed = genesis("fit", *options, "--ckpt_path", "latest", *allowed)
    assert resumed.status == 0, resumed.err
    ends = [read_tensors(tmp_path / name / "checkpoints/step-00000004") for name in ("straight", "run")]
    assert ends[0]["model.decoder.output.weight"].shape == (1, 32)
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items() if not name.startswith("state."))
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    header = (tmp_path / "run/metrics.csv").read_text().splitlines()[0]
    for name in ("loss", "reward_accuracy", "reward_margin", "rewards_chosen", "rewards_rejected"):
        assert f"train/{name}" in header
        assert f"validation/{name}" in header
    validated = genesis("validate", *options, "--ckpt_path", str(tmp_path / "run"))
    assert validated.status == 0, validated.err
    assert "validation/reward_accuracy" in validated.out
    planned = genesis("plan", *options)
    assert planned.status == 0, planned.err
    described = genesis("model", "describe", "--config", str(recipe))
    assert described.status == 0, described.err
    assert "parameters: output" in described.out
    (tmp_path / "text.txt").write_text("some text")
    heldout = ("--heldout", str(tmp_path / "text.txt"))
    for words in (("generate", "--prompt", "a"), ("evaluate", *heldout), ("export", "--gguf", "f16")):
        command, *rest = words
        place = (str(tmp_path / "run"), *((str(tmp_path / "out"),) if command == "export" else ()))
        assert "is a reward model, which scores texts and writes none" in refusal(genesis(command, *place, *rest))


def test_other_objectives_and_models_without_scores_are_refused_in_one_line(
    genesis: Genesis, recipe: Path, pair_corpus: Path, tmp_path: Path
) -> None:
    dpo = genesis("fit", "--config", str(recipe), "--model.objective", "genesis.objectives.CPO")
    assert "the model scores texts (model.decoder.num_scores), and CPO trains one that writes them" in refusal(dpo)
    plain = genesis("fit", "--config", str(recipe), "--model.decoder.num_scores", "null")
    assert "RewardModel trains a model that scores texts, and this one writes them" in refusal(plain)
    assert "RewardModel trains a model that scores texts" in refusal(
        genesis("plan", "--config", str(recipe), "--model.decoder.num_scores", "null")
    )
    sharded = "{class_path: genesis.strategies.Sharded, init_args: {tensor_parallel: 2}}"
    shared = genesis("fit", "--config", str(recipe), "--trainer.devices", "2", "--trainer.strategy", sharded)
    assert "RewardModel does not train under tensor parallelism: set it to 1" in refusal(shared)


@pytest.mark.slow
def test_adapters_are_trained_beside_the_score(
    genesis: Genesis, recipe: Path, pair_corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_base(tmp_path / "scorer", pair_corpus, shape=SHAPE)
    given = ("--model.adapter", f"{{rank: 4, base: {base}, also_train: [head]}}")
    fitted = genesis("fit", "--config", str(recipe), *given)
    assert fitted.status == 0, fitted.err
    assert "model.decoder.output.weight" in (tmp_path / "run/checkpoints/step-00000004/manifest.json").read_text()
    assert "the score head is frozen" not in caplog.text
    beside = ("--model.adapter", f"{{rank: 4, base: {base}}}", "--trainer.max_steps", "1")
    frozen = genesis("fit", "--config", str(recipe), *beside, "--run_dir", str(tmp_path / "frozen"))
    assert frozen.status == 0, frozen.err
    assert "the score head is frozen" in caplog.text
    assert "--model.adapter.also_train '[head]' trains it" in caplog.text
    refused = genesis("export", "--adapter", str(tmp_path / "run"), str(tmp_path / "peft"))
    assert "is a reward model, whose adapters alone have no score: export it with --merge" in refusal(refused)
    merged = genesis("export", "--merge", str(tmp_path / "run"), str(tmp_path / "out"))
    assert merged.status == 0, merged.err
    assert "logits: differ by at most" in merged.out
