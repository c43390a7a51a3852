"""`compile_blocks: auto`: what it stands for where, that it is written down resolved, and that a change is drift."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from genesis.model import compilation
from genesis.model.compilation import choose_compilation, read_compilation, unify_compilation
from genesis_callbacks.checkpoint import read_manifest
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe

REPLICATED = "genesis.strategies.Replicated"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with all that compiled blocks need on a GPU."""
    monkeypatch.setattr(compilation, "is_available", lambda kind: True)
    monkeypatch.setattr(compilation, "find_spec", lambda name: object())
    monkeypatch.setattr(compilation, "read_capability", lambda device: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    return monkeypatch


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("accelerator", "is_compiled"), [("auto", True), ("gpu", True), ("cuda", True), ("cpu", False)]
)
def test_blocks_are_compiled_on_a_gpu_and_not_on_a_cpu(accelerator: str, is_compiled: bool) -> None:
    assert choose_compilation(accelerator) == is_compiled


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("is_available", lambda kind: False),
        ("find_spec", lambda name: None),
        ("read_capability", lambda device: (6, 1)),
    ],
)
def test_without_what_triton_needs_auto_is_false(gpu: pytest.MonkeyPatch, name: str, answer: Any) -> None:
    gpu.setattr(compilation, name, answer)
    assert not choose_compilation("gpu")


def test_without_a_compiler_auto_is_false(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(shutil, "which", lambda name: None)
    gpu.delenv("CC", raising=False)
    assert not choose_compilation("gpu")


@pytest.mark.parametrize(
    ("strategy", "is_compiled"),
    [
        ("replicated", False),
        ({"class_path": REPLICATED}, False),
        ({"class_path": REPLICATED, "init_args": {"compile_blocks": True}}, True),
        ({"class_path": REPLICATED, "init_args": {"compile_blocks": False}}, False),
        (None, False),
    ],
)
def test_every_spelling_of_a_strategy_says_whether_blocks_are_compiled(strategy: Any, is_compiled: bool) -> None:
    recipe = {"trainer": {"strategy": strategy}}
    assert read_compilation(recipe) == is_compiled
    once = unify_compilation(recipe)
    assert unify_compilation(once) == once


def strategy(compile_blocks: bool | str) -> dict[str, Any]:
    return {"class_path": REPLICATED, "init_args": {"compile_blocks": compile_blocks}}


def test_auto_is_written_down_as_what_it_stands_for_and_kept_by_a_resume(
    genesis: Genesis, tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    recipe = write_recipe(
        tmp_path / "recipe.yaml", build_recipe(tiny_corpus, run), {"trainer.strategy": strategy("auto")}
    )
    outcome = genesis("fit", "--config", str(recipe))
    assert outcome.status == 0, outcome.err
    assert not read_compilation(yaml.safe_load((run / "config.yaml").read_text()))
    manifest = read_manifest(run / "checkpoints/step-00000004")
    assert manifest.recipe["trainer"]["strategy"]["init_args"]["compile_blocks"] is False
    # On another machine auto would stand for something else, and the run keeps what it had.
    monkeypatch.setattr("genesis.cli.trainer.choose_compilation", lambda accelerator: True)
    longer = ("--ckpt_path", "latest", "--trainer.max_steps", "5", "--checkpoint.allow_changed", "[trainer.max_steps]")
    outcome = genesis("fit", "--config", str(recipe), *longer)
    assert outcome.status == 0, outcome.err
    resumed = yaml.safe_load((run / "config.resume-1.yaml").read_text())
    assert resumed["trainer"]["strategy"]["init_args"]["compile_blocks"] is False


def test_a_resume_with_compiled_blocks_needs_permission_also_for_a_strategy_that_was_only_named(
    genesis: Genesis, tmp_path: Path, tiny_corpus: Path
) -> None:
    recipe = build_recipe(tiny_corpus, tmp_path / "run")
    assert "strategy" not in recipe["trainer"]
    assert genesis("fit", "--config", str(write_recipe(tmp_path / "recipe.yaml", recipe))).status == 0
    compiled = write_recipe(tmp_path / "compiled.yaml", recipe, {"trainer.strategy": strategy(True)})
    outcome = genesis("fit", "--config", str(compiled), "--ckpt_path", "latest", "--trainer.max_steps", "5")
    assert outcome.status == 2
    assert "trainer.strategy.init_args.compile_blocks is True and was False" in outcome.err
    assert "trainer.strategy.init_args.compile_blocks" in outcome.err.partition("--checkpoint.allow_changed")[2]


def test_auto_outside_of_a_recipe_is_resolved_too() -> None:
    assert torch.cuda.is_available() or not compilation.resolve_compilation("auto")
    assert compilation.resolve_compilation(True)
