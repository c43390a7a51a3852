"""Options of the module and the Trainer as a recipe and the command line write them: `model.attention=flex`."""

from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser

from genesis.base.device import is_host
from genesis.base.errors import UserError
from genesis.model.adapter import BASE_FORMATS, BaseFormat
from genesis.model.recomputation import ActivationCheckpointing
from genesis.train.module import GenesisModule

_OF_THE_SHAPE = {"decoder", "optimizer"}
"""Arguments of the module that follow from the workload."""


@dataclass(frozen=True)
class FitOptions:
    """The options of a fit of a benchmark.

    Args:
        model: Keyword arguments of `GenesisModule`.
        deterministic: That of the Trainer: None for Lightning's default, on the CPU.
        activation_checkpointing: That of the strategy.
        base: How the base of adapters stores its weights.
    """

    model: dict[str, Any]
    deterministic: bool | None
    activation_checkpointing: ActivationCheckpointing
    base: BaseFormat


def read_fit_options(options: Sequence[str], device: str) -> FitOptions:
    """Returns the options of a fit on a kind of device.

    Args:
        options: `NAME=VALUE`, such as `model.attention=flex`, `trainer.deterministic=false`,
            `trainer.strategy.activation_checkpointing=block` and, as `genesis plan` has it, `base_dtype=nf4`. A Trainer
            takes only kernels that repeat on accelerators, as `genesis fit` does, unless `deterministic` is false.
        device: The kind of device.

    Raises:
        UserError: `genesis fit` has no such option or value.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GenesisModule, "model", skip=set(_OF_THE_SHAPE), instantiate=False)
    parser.add_argument("--trainer.deterministic", choices=("auto", "true", "false"), default="auto")
    parser.add_argument("--trainer.strategy.activation_checkpointing", type=ActivationCheckpointing, default="none")
    parser.add_argument("--base_dtype", choices=tuple(BASE_FORMATS), default="bfloat16")
    try:
        parsed = parser.instantiate_classes(parser.parse_args([f"--{option}" for option in options]))
    except ArgumentError as error:
        raise UserError(f"{' '.join(options)}: {' '.join(str(error).split())}") from error
    deterministic = parsed.trainer.deterministic != "false"
    return FitOptions(
        vars(parsed.model),
        None if is_host(device) else deterministic,
        parsed.trainer.strategy.activation_checkpointing,
        BASE_FORMATS[parsed.base_dtype],
    )
