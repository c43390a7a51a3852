"""The dtypes of a run's computations: Lightning's plugins, adapted to windows.

bf16-mixed   parameters in float32, computed in bfloat16: by autocast, or under `Sharded` by the dtype of gathers.
             Autocast casts a weight once for a window (`cast_once`), except in compiled and in recomputed blocks
32-true      all in float32; on CUDA, products of matrices take TF32
16-mixed     parameters in float32, computed in float16 with a gradient scaler; not under `Sharded`
bf16-true    parameters, gradients and optimizer state in bfloat16; sums of losses stay in float32
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from torch import nn
from torchmetrics import Metric

from genesis.base.errors import UserError
from genesis.model.precision import AUTO, FULL, MIXED
from genesis.strategies import Replicated, Sharded

_TRAINABLE: Final = (MIXED, FULL, "16-mixed", "bf16-true")


class TrueBFloat16(HalfPrecision):
    """`bf16-true` for windows, whose tensors are integers; metrics and new tensors keep their types.

    Lightning's own maps over the batch, which fails for a frozen dataclass, and sets bfloat16 as default type while a
    step runs, so that a sum that starts from zero would lose its digits.
    """

    def __init__(self) -> None:
        super().__init__("bf16-true")

    def convert_input(self, data: Any) -> Any:
        """Returns the window as it is."""
        return data

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts the module's parameters, but not the sums of its metrics."""
        for child in module.children():
            if not isinstance(child, Metric):
                child.to(torch.bfloat16)
        return module

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Changes nothing."""
        yield


class GatheredBFloat16(Precision):
    """`bf16-mixed` if FSDP2 gathers the parameters in bfloat16, so that autocast would only cast back and forth."""

    precision = MIXED


def cast_once(plugin: MixedPrecision) -> None:
    """Makes autocast keep the narrow copy of a weight for a whole window, in which no weight changes.

    Lightning switches this cache off, so that each micro-batch casts all weights again. A copy belongs to the graph of
    every micro-batch: each of their gradients is cast and added to the weight's in float32, as without the cache.
    """
    dtype = torch.bfloat16 if plugin.precision == MIXED else torch.float16
    # In the instance, and no class of our own: its name is the key of the scaler's state in checkpoints.
    vars(plugin)["autocast_context_manager"] = partial(torch.autocast, plugin.device, dtype=dtype)


def prepare_precision(strategy: Strategy) -> None:
    """Replaces the precision plugin of a Trainer's strategy by one that fits windows, before the model is built.

    Raises:
        UserError: Genesis cannot train in this precision.
    """
    # In the module's `setup`, because Lightning lets the plugin convert the module after that hook.
    plugin = strategy.precision_plugin
    if plugin.precision not in _TRAINABLE:
        remedy = ", ".join(_TRAINABLE)
        reason = (
            "whose gradients underflow without a scaler" if plugin.precision == "16-true" else "which is unknown here"
        )
        raise UserError(f"trainer.precision is {plugin.precision!r}, {reason}; give one of {remedy}, or {AUTO}")
    if plugin.precision == "bf16-true":
        strategy.precision_plugin = TrueBFloat16()
    elif plugin.precision == MIXED and isinstance(strategy, Sharded) and strategy.computed_dtype == torch.bfloat16:
        strategy.precision_plugin = GatheredBFloat16()
    elif (
        isinstance(plugin, MixedPrecision)
        and isinstance(strategy, Replicated)  # under `Sharded` the copies would hold the whole model on each rank
        and strategy.activation_checkpointing == "none"  # the copies of a recomputed block would outlive its forward
    ):
        cast_once(plugin)
    if strategy.root_device.type == "cuda" and torch.get_float32_matmul_precision() == "highest":
        torch.set_float32_matmul_precision("high")
