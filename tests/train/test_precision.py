"""Precisions: what `auto` stands for, which are refused by name, and that sums keep their digits in each."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from genesis.base.errors import UserError
from genesis.model.precision import choose_precision, unify_precision
from genesis.train import precision
from genesis.train.gradients import global_gradient_norm
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_strategy, build_trainer, loader


class Keep(pl.Callback):
    def __init__(self) -> None:
        self.loss_sums: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.loss_sums.append(outputs["loss_sum"])


def fit(precision: str) -> dict[str, Any]:
    """Runs in a process of its own. Returns what it found in plain types."""
    module, keep = build_module(), Keep()
    trainer = build_trainer("auto", 1, 3, [keep], precision=precision)
    trainer.fit(module, loader(3, 0, 1), loader(1, 0, 1))
    return {
        "parameters": {str(parameter.dtype) for parameter in module.parameters()},
        "loss_sum": {str(loss_sum.dtype) for loss_sum in keep.loss_sums},
        "metric": str(module.validation_sums.terms.dtype),
        "default": str(torch.get_default_dtype()),
        "loss_sums": [float(loss_sum) for loss_sum in keep.loss_sums],
    }


def test_bf16_true_trains_in_bfloat16_and_sums_in_float32() -> None:
    (full,), (true,) = run_ranks(fit, 1, "32-true"), run_ranks(fit, 1, "bf16-true")
    assert true["parameters"] == {"torch.bfloat16"}
    assert true["loss_sum"] == {"torch.float32"}
    assert true["metric"] == "torch.float64"
    assert true["default"] == "torch.float32"
    assert true["loss_sums"] == pytest.approx(full["loss_sums"], rel=5e-3)


class Casts(TorchDispatchMode):
    """Counts the casts of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.num_casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_casts += func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)
        return func(*args, **(kwargs or {}))


def fit_and_count(keeps_copies: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Trains three windows in mixed precision. Returns the parameters, and the casts of weights in a window."""
    if not keeps_copies:
        module: Any = precision
        module.cast_once = lambda plugin: None
    trained, casts = build_module(), Casts()
    trainer = build_trainer(build_strategy("replicated"), 1, 3, [], precision="bf16-mixed", gradient_clip_val=0.1)
    with casts:
        trainer.fit(trained, loader(3, 0, 1))
    return {name: parameter.detach() for name, parameter in trained.named_parameters()}, casts.num_casts // 3


def test_a_weight_is_cast_once_a_window_and_no_number_changes() -> None:
    (kept, num_casts), (again, most_casts) = (run_ranks(fit_and_count, 1, kept)[0] for kept in (True, False))
    num_micro_batches = len(next(iter(loader(1, 0, 1))).micro_batches)
    num_weights = sum(name.endswith("weight") and tensor.ndim == 2 for name, tensor in kept.items()) - 1  # embedding
    assert num_micro_batches > 1
    # The head casts its weight in each micro-batch.
    assert num_casts == num_weights + num_micro_batches
    assert most_casts == (num_weights + 1) * num_micro_batches
    assert all(torch.equal(again[name], tensor) for name, tensor in kept.items())


def test_a_forward_without_gradients_leaves_no_copy_that_cuts_a_later_graph() -> None:
    layer, rows = torch.nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    plugin = MixedPrecision("bf16-mixed", "cpu")
    precision.cast_once(plugin)
    with plugin.autocast_context_manager():
        with torch.no_grad():
            layer(rows)  # as the reference of preferences does within a step
        layer(rows).float().sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_another_precision_is_refused_by_name(precision: str) -> None:
    with pytest.raises(UserError, match=f"trainer.precision is '{precision}'.* bf16-mixed, 32-true"):
        fit(precision)


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(300)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    norm = global_gradient_norm(parameters, torch.device("cpu"), num_stage_ranks=1, world_size=1)
    assert norm == pytest.approx(300**0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("accelerator", "has_cuda", "has_bfloat16", "wanted"),
    [
        ("auto", True, True, "bf16-mixed"),
        ("gpu", True, True, "bf16-mixed"),
        ("cuda", True, False, "32-true"),
        ("auto", False, False, "32-true"),
        ("cpu", True, True, "32-true"),
    ],
)
def test_auto_is_bfloat16_where_cuda_has_it(
    accelerator: str, has_cuda: bool, has_bfloat16: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert choose_precision(accelerator) == wanted


def test_a_recipe_without_precision_was_32_true() -> None:
    assert unify_precision({"trainer": {"precision": None}}) == {"trainer": {"precision": "32-true"}}
    assert unify_precision({"trainer": {"precision": "bf16-mixed"}}) == {"trainer": {"precision": "bf16-mixed"}}
    assert unify_precision({"a": 1}) == {"a": 1}
