"""Distillation through the commands: with a teacher or its cache, resumed, and refused where they do not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import read_manifest, read_tensors
from tests.cli.conftest import Genesis, Outcome
from tests.cli.test_run import losses
from tests.cli.tiny import build_recipe, write_recipe
from tests.data.corpora import make_documents, write_corpus
from tests.objectives.teachers import TEACHER, make_teacher

OBJECTIVE: dict[str, Any] = {"top_k": 8, "temperature": 2.0, "teacher_share": 0.5}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "run", tiny_corpus)


@pytest.fixture
def recipe(teacher: Path, tiny_corpus: Path, tmp_path: Path) -> Path:
    recipe = build_recipe(tiny_corpus, tmp_path / "run")
    arguments = {**OBJECTIVE, "teacher": str(teacher)}
    recipe["model"]["objective"] = {
        "class_path": "genesis.objectives.Distillation",
        "init_args": arguments,
    }
    return write_recipe(tmp_path / "recipe.yaml", recipe)


def distill(genesis: Genesis, corpus: Path, teacher: Path, out: Path, *options: str) -> Outcome:
    shape = ("--seq_len", "16", "--top_k", "8", "--temperature", "2", "--batch_size", "2", "--out", str(out))
    return genesis("data", "distill", str(corpus), str(teacher), *shape, *options)


def test_teacher_and_cache_give_the_same_run_bit_for_bit(
    genesis: Genesis, recipe: Path, teacher: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    made = distill(genesis, tiny_corpus, teacher, tmp_path / "cache", "--device", "cpu")
    assert made.status == 0, made.err
    assert "complete" in made.out
    assert "nothing to do" in distill(genesis, tiny_corpus, teacher, tmp_path / "cache", "--device", "cpu").out
    beside, cached = tmp_path / "beside", tmp_path / "cached"
    fitted = genesis("fit", "--config", str(recipe), "--run_dir", str(beside))
    assert fitted.status == 0, fitted.err
    options = ("--model.objective.init_args.cache", str(tmp_path / "cache"))
    fitted = genesis("fit", "--config", str(recipe), "--run_dir", str(cached), *options)
    assert fitted.status == 0, fitted.err
    one, other = (read_tensors(run_dir / "checkpoints/step-00000004") for run_dir in (beside, cached))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert losses(beside) == losses(cached)


@pytest.mark.slow
@pytest.mark.repeat  # `tests/train/test_distillation_ladder.py`, and below a teacher whose run goes on
def test_a_resumed_distillation_equals_one_that_was_never_stopped_and_keeps_its_teacher(
    genesis: Genesis, recipe: Path, teacher: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    options = ("--config", str(recipe))
    assert genesis("fit", *options, "--run_dir", str(straight)).status == 0
    assert genesis("fit", *options, "--trainer.max_steps", "2").status == 0
    resume = (*options, "--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]")
    (other := tmp_path / "others").mkdir()
    refused = genesis(
        "fit", *resume, "--model.objective.init_args.teacher", str(make_teacher(other / "run", tiny_corpus, 8))
    )
    assert refused.status == 2
    assert "teacher is 'blake3:" in refused.err
    assert len([line for line in refused.err.splitlines() if line.startswith("genesis: error")]) == 1
    resumed = genesis("fit", *resume)
    assert resumed.status == 0, resumed.err
    ends = [read_tensors(directory / "checkpoints/step-00000004") for directory in (straight, run_dir)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert losses(straight) == losses(run_dir)
    manifest, checkpoint = read_manifest(run_dir / "checkpoints/step-00000004"), teacher / "checkpoints/step-00000000"
    assert manifest.identity["teacher"] == read_committed_hash(checkpoint)
    assert manifest.recipe["model"]["objective"]["init_args"]["teacher"] == str(checkpoint)
    assert not [name for name in manifest.tensors if "teacher" in name]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["model"]["objective"]["init_args"]["top_k"] == 8
    assert genesis("validate", *options, "--ckpt_path", "latest").status == 0
    changed = genesis("fit", *resume, "--model.objective.init_args.temperature", "3")
    assert changed.status == 2
    assert "model.objective.init_args.temperature is 3.0 and was 2.0" in changed.err


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_cache_is_refused(
    genesis: Genesis, recipe: Path, teacher: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    for name in ("float32", "float16"):
        made = distill(genesis, tiny_corpus, teacher, tmp_path / name, "--log_probs", name)
        assert made.status == 0, made.err
    cache = ("--model.objective.init_args.cache",)
    assert genesis("fit", "--config", str(recipe), *cache, str(tmp_path / "float16")).status == 0
    for options in ((*cache, str(tmp_path / "float32")), ()):
        refused = genesis("fit", "--config", str(recipe), "--ckpt_path", "latest", *options)
        assert refused.status == 2
        assert "teacher_cache is " in refused.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": None}, "model.objective has no teacher"),
        ({"teacher": "runs/none"}, "no such directory"),
        ({"top_k": 0}, "top_k is 0: it must be at least 1"),
        ({"top_k": 301}, "top_k is 301, more than the 300 ids of the tokenizer"),
        ({"temperature": 0.0}, "temperature is 0.0: it must be from 0.01 to 100"),
        ({"teacher_share": 1.5}, "teacher_share is 1.5: it must be from 0 to 1"),
        ({"cache": "nowhere"}, "nowhere is no cache of a teacher"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(
    genesis: Genesis, recipe: Path, options: dict[str, Any], message: str
) -> None:
    content = yaml.safe_load(recipe.read_text())
    content["model"]["objective"]["init_args"].update(options)
    write_recipe(recipe, content)
    refused = genesis("fit", "--config", str(recipe))
    assert refused.status == 2
    assert message in refused.err
    assert len(refused.err.splitlines()) == 1


def test_a_teacher_with_another_tokenizer_is_refused_with_both(
    genesis: Genesis, recipe: Path, teacher: Path, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus", {"web": make_documents(40, 12, seed=1)})
    wanted = read_manifest(teacher / "checkpoints/step-00000000").identity["tokenizer_hash"]
    for refused in (
        genesis("fit", "--config", str(recipe), "--data.corpus", str(corpus)),
        distill(genesis, corpus, teacher, tmp_path / "cache"),
    ):
        assert refused.status == 2
        assert f"has the tokenizer {wanted[:16]}, and the corpus {corpus} has " in refused.err
        assert len(refused.err.splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_a_teacher_that_reads_less_than_a_sequence_is_refused(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path
) -> None:
    short = make_teacher(tmp_path / "short", tiny_corpus, config=replace(TEACHER, max_seq_len=8))
    refused = distill(genesis, tiny_corpus, short, tmp_path / "cache")
    assert refused.status == 2
    assert "reads at most 8 tokens, fewer than seq_len 16" in refused.err


@pytest.mark.slow
def test_a_resume_keeps_its_teacher_while_the_teacher_s_run_goes_on(
    genesis: Genesis, recipe: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    """A new run from the student's weights takes the newest checkpoint of the teacher, if it may change."""
    teaching = write_recipe(tmp_path / "teaching.yaml", build_recipe(tiny_corpus, tmp_path / "teaching"))
    longer = ("--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]")
    options = ("--config", str(recipe), "--model.objective.init_args.teacher", str(tmp_path / "teaching"))
    assert genesis("fit", "--config", str(teaching), "--trainer.max_steps", "2").status == 0
    assert genesis("fit", *options, "--trainer.max_steps", "2").status == 0
    assert genesis("fit", "--config", str(teaching), *longer).status == 0
    resumed = genesis("fit", *options, *longer)
    assert resumed.status == 0, resumed.err
    weights = ("--ckpt_path", str(tmp_path / "run"), "--checkpoint.restore", "weights")
    weights = (*weights, "--checkpoint.allow_changed", "[teacher]")
    assert genesis("fit", *options, *weights, "--run_dir", str(tmp_path / "new")).status == 0
    for name, step in (("run", 2), ("new", 4)):
        taught = read_manifest(tmp_path / name / "checkpoints/step-00000004").identity["teacher"]
        assert taught == read_committed_hash(tmp_path / f"teaching/checkpoints/step-0000000{step}")


def test_prompts_are_no_text_to_distil(genesis: Genesis, recipe: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(recipe.read_text())
    del content["data"]["corpus"]
    content["data"]["seq_len"] = 64
    given = Path(__file__).parents[2] / "configs/finetune/gspo"
    content["data"]["prompts"] = {
        "sources": [{"name": "asked", "paths": [str(given / "prompts.jsonl")], "chat": "auto"}],
        "tokenizer": str(tiny_corpus),
        "template": str(given / "chat.jinja"),
        "reward": "reward.py:score",
    }
    refused = genesis("fit", "--config", str(write_recipe(tmp_path / "prompts.yaml", content)))
    assert refused.status == 2
    assert "data.prompts has no text to learn" in refused.err
    assert len(refused.err.splitlines()) == 1


@pytest.mark.slow
def test_an_export_is_a_teacher_and_a_stream_has_no_cache(
    genesis: Genesis, exported: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"class number {n} returns {n * n}"}) + "\n" for n in range(300)))
    recipe = build_recipe(tmp_path / "unused", tmp_path / "run")
    recipe["model"]["decoder"]["vocab_size"] = 700
    arguments = {**OBJECTIVE, "teacher": str(exported)}
    recipe["model"]["objective"] = {
        "class_path": "genesis.objectives.Distillation",
        "init_args": arguments,
    }
    del recipe["data"]["corpus"]
    recipe["data"]["stream"] = {
        "sources": [{"name": "web", "paths": [str(texts)]}], "tokenizer": str(tokenizer_file), "num_workers": 0
    }  # fmt: skip
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    fitted = genesis("fit", "--config", str(path))
    assert fitted.status == 0, fitted.err
    refused = genesis(
        "fit",
        "--config",
        str(path),
        "--run_dir",
        str(tmp_path / "other"),
        "--model.objective.init_args.cache",
        str(tmp_path),
    )
    assert refused.status == 2
    assert "a stream has no fixed sequences" in refused.err
