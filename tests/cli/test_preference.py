"""DPO through the commands: with adapters and with all weights, resumed, validated, refused where parts do not fit."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import read_manifest, read_tensors
from tests.cli.conftest import Genesis, Outcome
from tests.cli.test_adapter import make_base
from tests.cli.test_run import committed_steps, losses
from tests.cli.tiny import build_recipe, write_recipe
from tests.data.pair_corpora import SEQ_LEN, write_answer_corpus, write_pair_corpus

SHAPE: dict[str, Any] = {"vocab_size": 400, "max_seq_len": SEQ_LEN}
OBJECTIVE: dict[str, Any] = {"class_path": "genesis.objectives.DPO", "init_args": {"beta": 0.5, "sft_weight": 0.1}}


@pytest.fixture(scope="module")
def pair_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair_corpus(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, pair_corpus: Path) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "imported", pair_corpus, shape=SHAPE)


def recipe_of(pair_corpus: Path, run_dir: Path) -> dict[str, Any]:
    recipe = build_recipe(pair_corpus, run_dir)
    recipe["model"]["decoder"] |= SHAPE
    recipe["model"]["objective"] = OBJECTIVE
    recipe["data"] |= {"seq_len": SEQ_LEN, "global_batch_size": 4}
    return recipe


@pytest.fixture
def adapted(pair_corpus: Path, base: Path, tmp_path: Path) -> Path:
    recipe = recipe_of(pair_corpus, tmp_path / "run")
    return write_recipe(tmp_path / "adapted.yaml", recipe, {"model.adapter": {"rank": 4, "base": str(base)}})


@pytest.fixture
def whole(pair_corpus: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "whole.yaml", recipe_of(pair_corpus, tmp_path / "run"))


def refusal(outcome: Outcome) -> str:
    """The single line of a refused command."""
    assert outcome.status == 2, outcome.err
    (line,) = (line for line in outcome.err.splitlines() if line.startswith("genesis: error"))
    return line


@pytest.mark.slow
@pytest.mark.parametrize("objective", [OBJECTIVE, {"class_path": "genesis.objectives.ORPO"}], ids=["dpo", "orpo"])
def test_adapters_train_on_pairs_resume_and_validate(
    genesis: Genesis, pair_corpus: Path, base: Path, objective: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"model.adapter": {"rank": 4, "base": str(base)}, "model.objective": objective}
    adapted = write_recipe(tmp_path / "adapted.yaml", recipe_of(pair_corpus, tmp_path / "run"), changes)
    options, allowed = ("--config", str(adapted)), ("--checkpoint.allow_changed", "[trainer.max_steps]")
    straight = genesis("fit", *options, "--run_dir", str(tmp_path / "straight"), "--ckpt_path", "latest")
    assert straight.status == 0, straight.err
    assert genesis("fit", *options, "--trainer.max_steps", "2").status == 0
    resumed = genesis("fit", *options, "--ckpt_path", "latest", *allowed)
    assert resumed.status == 0, resumed.err
    ends = [read_tensors(tmp_path / name / "checkpoints/step-00000004") for name in ("straight", "run")]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items() if not name.startswith("state."))
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    header = (tmp_path / "run/metrics.csv").read_text().splitlines()[0]
    for name in ("reward_accuracy", "reward_margin", "rewards_chosen", "log_probs_rejected", "sft_loss"):
        assert f"train/{name}" in header
        assert f"validation/{name}" in header
    assert not (tmp_path / "run/reference").exists()
    validated = genesis("validate", *options, "--ckpt_path", str(tmp_path / "run"))
    assert validated.status == 0, validated.err
    assert "validation/reward_accuracy" in validated.out


@pytest.mark.slow
def test_dropout_is_switched_off_so_that_dpo_starts_at_log_two(
    genesis: Genesis, adapted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--config", str(adapted), "--trainer.max_steps", "1", "--model.adapter.dropout", "0.3")
    plain = ("--model.objective.init_args.sft_weight", "0")
    fitted = genesis("fit", *options, *plain)
    assert fitted.status == 0, fitted.err
    line = "dropout is off (model.adapter.dropout 0.3 in the recipe): DPO compares the probabilities of two forwards"
    assert line in caplog.text
    assert [float(loss) for loss in losses(tmp_path / "run")] == pytest.approx([math.log(2)], abs=1e-6)
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["adapter"]["dropout"] == 0.0
    caplog.clear()
    kept = genesis("fit", *options, *plain, "--model.keeps_dropout", "true", "--run_dir", str(tmp_path / "kept"))
    assert kept.status == 0, kept.err
    assert "dropout is off" not in caplog.text
    recorded = yaml.safe_load((tmp_path / "kept/config.yaml").read_text())
    assert recorded["model"]["adapter"]["dropout"] == 0.3


@pytest.mark.slow
def test_single_answers_train_adapters_and_all_weights_resume_and_validate(
    genesis: Genesis, base: Path, tmp_path: Path
) -> None:
    corpus = write_answer_corpus(tmp_path / "answers")
    recipe = recipe_of(corpus, tmp_path / "run")
    recipe["model"]["objective"] = {"class_path": "genesis.objectives.KTO", "init_args": {"beta": 0.5}}
    options = ("--config", str(write_recipe(tmp_path / "kto.yaml", recipe)))
    latest, allowed = ("--ckpt_path", "latest"), ("--checkpoint.allow_changed", "[trainer.max_steps]")
    for given in (
        ("--model.adapter", f"{{rank: 4, base: {base}}}"),
        ("--model.objective.init_args.reference", str(base)),
    ):
        run = tmp_path / f"run{given[0]}"
        # `tests/train/test_preference_ladder.py` compares the bits with those of a run that was not resumed.
        assert genesis("fit", *options, *given, "--run_dir", str(run), "--trainer.max_steps", "2").status == 0
        resumed = genesis("fit", *options, *given, "--run_dir", str(run), *latest, *allowed)
        assert resumed.status == 0, resumed.err
        assert len(losses(run)) == 4
        validated = genesis("validate", *options, *given, "--run_dir", str(run), "--ckpt_path", str(run))
        assert validated.status == 0, validated.err
        assert "validation/kl" in validated.out
    first = dict(zip(*csv.reader((run / "metrics.csv").read_text().splitlines()[:2]), strict=True))
    assert float(first["train/loss"]) == pytest.approx(0.5, abs=1e-4)
    packed = genesis("fit", *options, *given, "--data.packing", "best_fit", "--run_dir", str(tmp_path / "packed"))
    assert "data.packing is best_fit" in refusal(packed)
    plan = genesis("plan", *options, *given)
    assert plan.status == 0, plan.err
    assert " answers" in plan.out


@pytest.mark.slow
def test_all_weights_start_from_their_reference_whose_log_probs_the_run_keeps(
    genesis: Genesis, whole: Path, base: Path, tmp_path: Path
) -> None:
    reference = ("--model.objective.init_args.reference", str(base))
    options, latest = ("--config", str(whole)), ("--ckpt_path", "latest")
    straight = genesis("fit", *options, *reference, "--run_dir", str(tmp_path / "straight"), *latest)
    assert straight.status == 0, straight.err
    assert genesis("fit", *options, *reference, "--trainer.max_steps", "2").status == 0
    (path,) = (tmp_path / "run/reference").iterdir()
    kept, written = path.read_bytes(), path.stat().st_mtime_ns
    allowed = ("--checkpoint.allow_changed", "[trainer.max_steps]")
    # Without the option, the reference is the one that the checkpoint records.
    resumed = genesis("fit", *options, *latest, *allowed)
    assert resumed.status == 0, resumed.err
    assert path.stat().st_mtime_ns == written
    ends = [read_tensors(tmp_path / name / "checkpoints/step-00000004") for name in ("straight", "run")]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items() if not name.startswith("state."))
    start = base / "checkpoints/step-00000000"
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000004")
    assert manifest.identity["reference"] == read_committed_hash(start)
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert resolved["model"]["objective"]["init_args"]["reference"] == str(start)
    path.write_bytes(kept[:-1])
    with pytest.warns(UserWarning, match="is damaged, or was made with another reference"):
        validated = genesis("validate", *options, "--ckpt_path", str(tmp_path / "run"))
    assert validated.status == 0, validated.err
    assert path.read_bytes() == kept


@pytest.mark.slow
def test_a_new_run_from_the_weights_of_another_has_those_as_its_reference(
    genesis: Genesis, whole: Path, base: Path, tmp_path: Path
) -> None:
    started = genesis("fit", "--config", str(whole), "--ckpt_path", str(base), "--checkpoint.restore", "weights")
    assert started.status == 0, started.err
    again = ("--run_dir", str(tmp_path / "second"), "--ckpt_path", str(tmp_path / "run"))
    second = genesis("fit", "--config", str(whole), *again, "--checkpoint.restore", "weights")
    assert second.status == 0, second.err
    manifest = read_manifest(tmp_path / "second/checkpoints/step-00000004")
    assert manifest.identity["reference"] == read_committed_hash(tmp_path / "run/checkpoints/step-00000004")
    assert committed_steps(tmp_path / "second") == [2, 4]


@pytest.mark.slow
def test_a_resume_with_another_reference_is_refused(
    genesis: Genesis, whole: Path, base: Path, pair_corpus: Path, tmp_path: Path
) -> None:
    options, latest = ("--config", str(whole)), ("--ckpt_path", "latest")
    given = "--model.objective.init_args.reference"
    assert genesis("fit", *options, given, str(base), "--trainer.max_steps", "2").status == 0
    other = make_base(tmp_path / "other", pair_corpus, seed=1, shape=SHAPE)
    line = refusal(genesis("fit", *options, given, str(other), *latest))
    assert "the run that continues was trained with a checkpoint with manifest blake3:" in line
    moved = tmp_path / "moved"
    base.rename(moved)
    try:
        assert "is not there any more: give its new path by" in refusal(genesis("fit", *options, *latest))
        found = genesis(
            "fit", *options, given, str(moved), *latest, "--checkpoint.allow_changed", "[trainer.max_steps]"
        )
        assert found.status == 0, found.err
    finally:
        moved.rename(base)


@pytest.mark.slow
def test_where_the_embedding_is_trained_the_base_is_the_reference_by_a_pass(
    genesis: Genesis, adapted: Path, base: Path, tmp_path: Path
) -> None:
    options = ("--config", str(adapted), "--ckpt_path", "latest")
    fitted = genesis("fit", *options, "--model.adapter.also_train", "[embedding]")
    assert fitted.status == 0, fitted.err
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000004")
    assert manifest.identity["reference"] == read_committed_hash(base / "checkpoints/step-00000000")
    assert len(list((tmp_path / "run/reference").iterdir())) == 1
    # At the first step the policy is its base, so that no pair has a margin.
    first = (tmp_path / "run/metrics.csv").read_text().splitlines()[:2]
    values = dict(zip(*(line.split(",") for line in first), strict=True))
    assert abs(float(values["train/reward_margin"])) < 1e-5


@pytest.mark.slow
def test_objective_and_data_that_do_not_fit_are_refused_in_one_line(
    genesis: Genesis, whole: Path, adapted: Path, tiny_corpus: Path
) -> None:
    assert "preference optimisation has no reference" in refusal(genesis("fit", "--config", str(whole)))
    no_objective = ("--config", str(adapted), "--model.objective", "null")
    assert "data.corpus has pairs of answers" in refusal(genesis("fit", *no_objective))
    sequences = ("--config", str(adapted), "--data.corpus", str(tiny_corpus))
    assert "DPO learns from pairs of answers, and the data have none" in refusal(genesis("fit", *sequences))
    short = ("--config", str(adapted), "--data.seq_len", "16")
    assert "data.seq_len is 16: raise it to" in refusal(genesis("fit", *short))
    reference = ("--config", str(whole), "--model.objective.init_args.reference")
    assert "reference is empty: give a value" in refusal(genesis("fit", *reference, ""))
    no_run = genesis("fit", *reference, str(whole.parent))
    assert f"{whole.parent} " in refusal(no_run)
    none = ("--config", str(adapted), "--data.micro_batch_size", "0")
    assert "data.micro_batch_size is 0; it must be at least 1" in refusal(genesis("fit", *none))
    wrong = ("--config", str(adapted), "--model.objective.init_args.beta", "-1")
    assert "beta is -1: it must be a number above 0" in refusal(genesis("fit", *wrong))
