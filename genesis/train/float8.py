"""Whether a run can train with float8 products (`model.float8`): checked before the model is built."""

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.device import is_host
from genesis.base.errors import UserError
from genesis.model.float8 import ALIGNMENT, Float8Options, check_device, choose_layers, convert_layers, load_torchao
from genesis.model.language_model import LanguageModel
from genesis.model.precision import FULL
from genesis.objectives.objective import Objective


def prepare_float8(strategy: Strategy, objective: Objective, *, has_adapter: bool, seq_len: int | None) -> None:
    """Refuses what does not go together with float8 products, and logs a line where they are slow.

    Args:
        strategy: The Trainer's strategy.
        objective: What training minimises.
        has_adapter: Whether the run trains adapters.
        seq_len: Tokens of a sequence; None if the data are not known.

    Raises:
        UserError: Float8 does not apply to this run; the line names the option in its way.
    """
    load_torchao()
    device, precision = strategy.root_device, strategy.precision_plugin.precision
    check_device(device)
    if has_adapter:
        raise UserError(
            "model.float8 and model.adapter are both given: the base of adapters is frozen, and adapters are too "
            "narrow for float8; leave out one of the two"
        )
    if objective.compares_forwards:
        raise UserError(
            f"model.float8 is given, and {type(objective).__name__} compares probabilities of two forwards, while "
            "float8's rounding of a token depends on the other tokens of its micro-batch: leave out model.float8"
        )
    if precision == "16-mixed" or (precision == FULL and not is_host(device.type)):
        raise UserError(
            f"model.float8 is given, and trainer.precision is {precision!r}: give bf16-mixed or bf16-true, or leave "
            "out model.float8"
        )
    if offloaded := vars(strategy).get("cpu_offload"):
        raise UserError(
            f"model.float8 is given, and trainer.strategy.cpu_offload is {offloaded:g}: FSDP2 gathers no float8 from "
            "the host; set cpu_offload to 0 (optimizer_offload goes together with float8), or leave out model.float8"
        )
    if seq_len is not None and seq_len % ALIGNMENT:
        raise UserError(
            f"model.float8 is given, and data.seq_len is {seq_len}: float8 products need a multiple of {ALIGNMENT}; "
            f"give {seq_len - seq_len % ALIGNMENT or ALIGNMENT}, or leave out model.float8"
        )
    if is_host(device.type):
        rank_zero_info("float8: the CPU emulates the products, which is slow; it proves a recipe and saves nothing")
    elif not vars(strategy).get("compile_blocks", False):
        rank_zero_info(
            "float8: without trainer.strategy.compile_blocks, casts to float8 take longer than the products save"
        )


def apply_float8(decoder: LanguageModel, options: Float8Options, device: torch.device) -> None:
    """Converts the layers of a decoder in place, before the strategy wraps it, and logs how many.

    Args:
        decoder: Newly built.
        options: Which layers.
        device: Where the model will be.

    Raises:
        UserError: A pattern matches no layer, or no layer remains.
    """
    choice = choose_layers(decoder, options)
    convert_layers(decoder, choice, device)
    rank_zero_info(choice.describe())
