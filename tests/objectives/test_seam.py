"""An objective with two units: what the step and the log do with it."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as reference_loss

from genesis import objectives
from genesis.base.errors import UserError
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.decoder import Decoder
from genesis.objectives import DPO, CrossEntropy
from genesis.objectives.find import find_objective
from genesis.objectives.objective import TOKENS, Head, HeadResult, Objective, ObjectiveSums
from genesis.objectives.vocabulary import Vocabulary
from genesis.recipe.imports import VARIABLE
from genesis.train.module import GenesisModule
from genesis_callbacks import TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.train.support import GLOBAL_BATCH_SIZE, TINY, build_strategy, build_trainer, loader, rows_of_step

ROWS = "rows"


class RowsAndTokens(Objective):
    """Sums a penalty of each row, and the cross-entropy of its tokens. The penalty's target comes from `prepare`."""

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        return {**super().count(window), ROWS: sum(len(micro.labels) for micro in window.micro_batches)}

    def prepare(self, decoder: Any, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        assert not torch.is_grad_enabled()
        target = (micro_batch.labels != IGNORE_INDEX).sum(1).float()
        return micro_batch.with_tensors({**micro_batch.tensors, "extra.target": target})

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        def compute(hidden: Tensor, weight: Tensor) -> HeadResult:
            distance = (hidden.mean((1, 2)) - micro_batch.extra["target"]).square()
            terms = {ROWS: distance.sum(), TOKENS: vocabulary.sum_cross_entropy(hidden, weight, micro_batch.labels)}
            return HeadResult(terms, {"far_rows": (distance > 9).sum().detach()})

        return compute

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        rows = sums.counts[ROWS]
        return {"loss": sums.terms[ROWS] / rows, "far_share": sums.figures["far_rows"] / rows}


class Keep(pl.Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            self.gradients = {name: p.grad.clone() for name, p in pl_module.decoder.named_parameters()}

    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        """Reads the previous step's line: callbacks of the module run after this one."""
        if trainer.global_step:
            self.on_train_end(trainer)

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def train() -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Trains three steps of the tests' small model, and returns the first gradients and what was logged."""
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    keep = Keep()
    trainer = build_trainer(build_strategy("replicated"), world_size, 3, [TokenCounters(), keep])
    trainer.fit(GenesisModule(TINY, objective=RowsAndTokens()), loader(3, rank, world_size))
    return keep.gradients, keep.logged


def expected_gradients() -> tuple[dict[str, Tensor], float]:
    """Returns the gradients of the first window in one forward over all rows, and the loss per row."""
    model = Decoder(TINY)
    model.init_weights(0)
    rows = rows_of_step(0)
    hidden, weight = model(rows.input_ids, document_ids=rows.document_ids, head=lambda h, w: (h, w))
    distance = (hidden.mean((1, 2)) - (rows.labels != IGNORE_INDEX).sum(1)).square().mean()
    loss = reference_loss((hidden @ weight.T).flatten(0, 1), rows.labels.flatten())
    (distance + loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, distance.item()


@pytest.mark.process
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_term_is_divided_by_its_units_in_the_window_over_all_ranks(world_size: int) -> None:
    expected, loss = expected_gradients()
    (gradients, logged), *others = run_ranks(train, world_size)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=2e-5, atol=1e-6)
    assert logged[0]["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert logged[0]["train/far_share"] * GLOBAL_BATCH_SIZE == 5  # rows with more than 3 valid labels
    assert "train/perplexity" not in logged[0]
    assert all(other[1][0]["train/loss"] == logged[0]["train/loss"] for other in others)


@pytest.mark.parametrize(
    "given", ["DPO", "genesis.objectives.DPO", {"class_path": "genesis.objectives.preference.DPO"}]
)
def test_a_recipe_names_an_objective_as_its_parser_reads_it(given: Any) -> None:
    assert find_objective(given) is DPO
    assert find_objective(None) is CrossEntropy


def test_an_objective_of_another_package_is_imported_only_if_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_objective.py").write_text("from genesis.objectives import CrossEntropy as Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(UserError, match=f"`{VARIABLE}=outside_objective`"):
        find_objective("outside_objective.Mine")
    assert "outside_objective" not in sys.modules
    monkeypatch.setenv(VARIABLE, "outside_objective")
    assert find_objective("outside_objective.Mine") is CrossEntropy
    monkeypatch.delitem(sys.modules, "outside_objective")


def test_what_is_no_objective_is_refused_with_its_value() -> None:
    with pytest.raises(UserError, match=r"model\.objective is 'torch\.nn\.Linear', which is no objective"):
        find_objective("torch.nn.Linear")


def test_no_other_package_asks_for_an_objective_by_its_class_or_its_name() -> None:
    names = "|".join(objectives.__all__)
    known = re.compile(rf"isinstance\([^)]*\b({names})\b|[!=]= \"({names})\"|\bis (not )?({names})\b")
    package = Path(objectives.__file__).parents[1]
    others = (path for path in package.rglob("*.py") if package / "objectives" not in path.parents)
    assert [str(path) for path in others if known.search(path.read_text(encoding="utf-8"))] == []
