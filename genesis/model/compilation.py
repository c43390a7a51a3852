"""Compiled functions with one form for each shape; what `compile_blocks: auto` stands for, and its spelling."""

import os
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final, Literal

import torch

from genesis.base.device import is_available, read_capability
from genesis.base.errors import UserError
from genesis.model.precision import AUTO, CUDA_ACCELERATORS

CompileBlocks = Literal["auto"] | bool
_CUDA: Final = torch.device("cuda")
_OPTION: Final = "compile_blocks"
_TRITON_CAPABILITY: Final = (7, 0)
_MAX_FORMS: Final = 64


def check_compilation(given: Any) -> None:
    """Refuses a value of a strategy's `compile_blocks` that is no choice.

    Raises:
        UserError: It is neither auto, true nor false.
    """
    if given != AUTO and not isinstance(given, bool):
        shown = "null" if given is None else given
        raise UserError(f"trainer.strategy.init_args.compile_blocks is {shown}: give auto, true or false")


def choose_compilation(accelerator: str) -> bool:
    """Returns what `auto` stands for: true on CUDA devices for which Triton is installed, else false.

    Triton builds a part of each kernel by a C compiler, without which it fails in the first step.

    Args:
        accelerator: As the Trainer takes it.
    """
    if accelerator not in CUDA_ACCELERATORS or not is_available("cuda") or find_spec("triton") is None:
        return False
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    has_compiler = any(shutil.which(name) is not None for name in compilers if name)
    return has_compiler and (read_capability(_CUDA) or (0, 0)) >= _TRITON_CAPABILITY


def compile_each_shape(
    function: Callable[..., Any], *, fullgraph: bool = False, is_rounded: bool = False
) -> Callable[..., Any]:
    """Returns `function` with a compiled form for each shape, whatever other shapes the process has met before.

    A form for all shapes would follow from the first ones: its sums may then differ between a run that was never killed
    and a resumed run, whose first batch is another one. A validation, a skipped window and each kind of block have
    forms of their own, so that torch's limit of forms is raised.

    Args:
        function: What is compiled; forwards of several blocks share a limit.
        fullgraph: Whether it is an error if torch cannot compile all of it.
        is_rounded: Whether each product and each sum is rounded, as on a CPU; otherwise a GPU rounds `a * b + c` once.
    """
    torch._dynamo.config.recompile_limit = max(_MAX_FORMS, torch._dynamo.config.recompile_limit)
    options: dict[str, Any] = {"options": {"emulate_precision_casts": True}} if is_rounded else {}
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=fullgraph, dynamic=False, **options)
    return compiled


def resolve_compilation(given: CompileBlocks, accelerator: str = AUTO) -> bool:
    """Returns whether blocks are compiled: `given`, or what `auto` stands for."""
    return choose_compilation(accelerator) if given == AUTO else bool(given)


def unify_compilation(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe whose strategy is a class with `compile_blocks`, as a strategy that is only named has it."""
    trainer = recipe.get("trainer")
    if not isinstance(trainer, Mapping) or not isinstance(trainer.get("strategy"), str | Mapping):
        return recipe
    given = trainer["strategy"]
    strategy = {"class_path": given} if isinstance(given, str) else given
    options = strategy.get("init_args") or {}
    if not isinstance(options, Mapping):
        return recipe
    options = {**options, _OPTION: options.get(_OPTION, False)}
    return {**recipe, "trainer": {**trainer, "strategy": {**strategy, "init_args": options}}}


def read_compilation(recipe: Mapping[str, Any]) -> bool:
    """Returns whether a run's recipe, which is resolved, compiles its blocks; false without a strategy of ours."""
    trainer = unify_compilation(recipe).get("trainer")
    strategy = trainer.get("strategy") if isinstance(trainer, Mapping) else None
    return isinstance(strategy, Mapping) and strategy.get("init_args", {}).get(_OPTION) is True
