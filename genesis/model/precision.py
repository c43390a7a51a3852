"""The names of precisions: what `auto` stands for on a device, and one spelling where there are several."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from genesis.base.device import has_bfloat16, is_available

AUTO: Final = "auto"
FULL: Final = "32-true"
MIXED: Final = "bf16-mixed"
CUDA_ACCELERATORS: Final = ("auto", "cuda", "gpu")
_SPELLINGS: Final = {None: FULL, 32: FULL, "32": FULL, "bf16": MIXED, 16: "16-mixed", "16": "16-mixed"}


def choose_precision(accelerator: str) -> str:
    """Returns what `auto` stands for: `bf16-mixed` on CUDA devices that have bfloat16, else `32-true`.

    Args:
        accelerator: As the Trainer takes it.
    """
    is_cuda = accelerator in CUDA_ACCELERATORS and is_available("cuda")
    return MIXED if is_cuda and has_bfloat16("cuda") else FULL


def product_dtype(precision: str) -> torch.dtype:
    """Returns the dtype in which a run with this precision computes products, and so queries, keys and values."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32


def unify_precision(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe with one spelling of its precision; none at all meant `32-true`, as Lightning has it."""
    trainer = recipe.get("trainer")
    if not isinstance(trainer, Mapping) or not isinstance(trainer.get("precision"), str | int | None):
        return recipe
    given = trainer.get("precision")
    return {**recipe, "trainer": {**trainer, "precision": _SPELLINGS.get(given, given)}}
