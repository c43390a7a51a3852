"""Lion of `lion.py`, which no file of Genesis knows: it trains, saves, resumes, is offloaded, sharded and planned."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from genesis.cli.plan import main as plan
from genesis.optim import build_optimizer
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.testing import run_ranks
from tests.cli.conftest import Genesis, genesis  # noqa: F401  # a fixture
from tests.cli.tiny import build_recipe, write_recipe
from tests.extend.lion import Lion
from tests.optim.test_offload import build, differences, shard, values
from tests.optim.test_optimizer import _decoder, _train

LION = Lion(lr=1e-3)
CHOICE = {"class_path": "tests.extend.lion.Lion", "init_args": {"lr": 1e-3}}
ALLOWED = ("--allow_imports", "tests")


def step_as_in_the_paper(weight: Tensor, gradient: Tensor, momentum: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    direction = torch.sign(0.9 * momentum + 0.1 * gradient)
    return weight - 1e-3 * (direction + decay * weight), 0.99 * momentum + 0.01 * gradient


def test_an_update_is_that_of_the_paper() -> None:
    model = _decoder()
    optimizer = build_optimizer(model, LION)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    momenta = {name: torch.zeros_like(weight) for name, weight in before.items()}
    kinds = model.parameter_groups()
    for step in range(3):
        _train(model, [], range(step, step + 1))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            decay = 0.1 if kinds[name].kind in ("matrix", "head") else 0.0
            before[name], momenta[name] = step_as_in_the_paper(before[name], parameter.grad, momenta[name], decay)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=1e-6)
        assert set(optimizer.state[parameter]) == {"momentum"}


def test_offloaded_moments_give_the_same_bits() -> None:
    plain, moved = _decoder(), _decoder()
    optimizer, (offloaded, _) = build_optimizer(plain, LION), build(moved, 0.7, options=LION)
    _train(plain, [optimizer], range(4))
    _train(moved, [offloaded], range(4))
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []


def test_two_ranks_that_shard_it_offloaded_or_not_train_as_one_does() -> None:
    alone, plain = _decoder(), run_ranks(shard, 2, 0.0, LION)
    _train(alone, [build_optimizer(alone, LION)], range(4))
    moved = run_ranks(shard, 2, 0.7, LION)
    assert [differences(one, other) for one, other in zip(plain, moved, strict=True)] == [[], []]
    for name, parameter in alone.named_parameters():
        # The ranks' sums of gradients round differently, and a sign near zero may turn.
        assert (parameter.detach() - plain[0][name]).abs().max() <= 8e-3
        assert (parameter.detach() - plain[0][name]).abs().mean() <= 1e-4


def read_losses(run_dir: Path) -> list[str]:
    with (run_dir / "metrics.csv").open() as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


def read_digests(run_dir: Path, step: int) -> dict[str, Any]:
    return {name: one.digest for name, one in read_manifest(run_dir / f"checkpoints/step-{step:08d}").tensors.items()}


@pytest.mark.slow
def test_a_recipe_that_names_it_trains_and_goes_on_bit_for_bit(
    genesis: Genesis,  # noqa: F811
    tmp_path: Path,
    tiny_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GENESIS_ALLOW_IMPORTS")
    changes = {"model.optimizer": CHOICE, "trainer.max_steps": 6}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"), changes)
    options = ("fit", "--config", str(recipe))
    refused = genesis(*options)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "names code of other packages: tests.extend.lion.Lion" in refused.err
    assert genesis(*options, *ALLOWED, "--run_dir", str(tmp_path / "straight")).status == 0
    allowed = ("--checkpoint.allow_changed", "[trainer.max_steps]")
    assert genesis(*options, *ALLOWED, "--trainer.max_steps", "4").status == 0
    resumed = genesis(*options, *ALLOWED, "--ckpt_path", "latest", *allowed)
    assert resumed.status == 0, resumed.err
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "straight")
    digests = read_digests(tmp_path / "run", 6)
    assert digests == read_digests(tmp_path / "straight", 6)
    assert any(name.endswith(".momentum") for name in digests)
    changed = genesis(*options, *ALLOWED, "--ckpt_path", "latest", *allowed, "--model.optimizer.betas", "[0.8, 0.9]")
    assert changed.status == 2
    assert "model.optimizer.betas" in changed.err
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["optimizer"]
    assert resolved["class_path"] == CHOICE["class_path"]
    assert resolved["init_args"] == {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "adapter_lr": None,
        "adapter_weight_decay": None,
        "betas": [0.9, 0.99],
    }


def test_a_plan_counts_its_one_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GENESIS_ALLOW_IMPORTS", "tests")
    bills = {}
    for name, choice in (("adamw", {"lr": 1e-3}), ("lion", CHOICE)):
        recipe = write_recipe(tmp_path / f"{name}.yaml", build_recipe(tmp_path, tmp_path), {"model.optimizer": choice})
        plan(["--config", str(recipe), "--json", "--from_global_batch_size", "4"])
        bills[name] = yaml.safe_load(capsys.readouterr().out)
    states = {name: bill["strategies"][0]["phases"]["rest"]["optimizer states"] for name, bill in bills.items()}
    assert states["lion"] == pytest.approx(states["adamw"] / 2, rel=0.01)
    assert bills["lion"]["checkpoints"]["checkpoint_bytes"] < bills["adamw"]["checkpoints"]["checkpoint_bytes"]
    assert (bills["lion"]["learning_rate"], bills["adamw"]["learning_rate"] is None) == (None, False)
