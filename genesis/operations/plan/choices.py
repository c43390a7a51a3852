"""Refuses options of a recipe as `genesis fit` does, of which a plan or a description needs no value."""

from collections.abc import Mapping
from typing import Any

from genesis.base.determinism import check_deterministic
from genesis.model.compilation import check_compilation
from genesis.model.decoder import DecoderConfig
from genesis.model.float8 import check_float8
from genesis.model.recipe import read_float8_options


def check_choices(content: Mapping[str, Any], decoder: DecoderConfig, where: str) -> None:
    """Refuses float8, kernels and compilation that are no choice.

    Args:
        content: The recipe.
        decoder: The shape in it.
        where: The recipe's files, for messages.

    Raises:
        UserError: A value is invalid, or a pattern of float8 matches no layer.
    """
    trainer = content.get("trainer")
    if isinstance(trainer, Mapping):
        check_deterministic(trainer.get("deterministic"))
        strategy = trainer.get("strategy")
        options = strategy.get("init_args") if isinstance(strategy, Mapping) else None
        if isinstance(options, Mapping) and "compile_blocks" in options:
            check_compilation(options["compile_blocks"])
    check_float8(decoder, read_float8_options(content, where))
