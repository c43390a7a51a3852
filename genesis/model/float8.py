"""Training with products of float8 matrices, by torchao: which linear layers compute so, and how they are converted.

A converted layer keeps its parameters. It casts weight, input and gradient to float8 for each product, each with one
scale that follows from the largest value of the whole tensor (dynamic scaling, tensorwise). Checkpoints, optimizer and
export therefore see the same tensors under the same names. Because a scale belongs to a whole micro-batch, the output
of a token depends, by rounding, on the other tokens of its micro-batch.

CUDA devices multiply float8 themselves. On the CPU torchao emulates the products: it rounds to float8 and multiplies
in float32, for proofs and not for speed.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from genesis.base.device import has_float8, is_host
from genesis.base.errors import UserError, numbered
from genesis.model.adapter import check_patterns, choose_by_name, find_linears, find_stacks, list_names
from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.language_model import LanguageModel
from genesis.model.part import Part
from genesis_callbacks.checkpoint.device_proof import DeviceProof

PACKAGE: Final = "torchao"
ALIGNMENT: Final = 16
"""Widths and numbers of tokens are multiples of it: the kernels' condition."""
_PROOF_TOLERANCE: Final = 1e-2


@dataclass(frozen=True, kw_only=True)
class Float8Options:
    """The linear layers of the blocks that train with float8 products.

    Args:
        include: Patterns of the layers, such as `*.feed_forward.*`; a pattern matches a whole name
            (`blocks.0.attention.query`), with `*` and `?` as in a shell.
        exclude: Patterns of layers among these that keep the precision of the run.

    Raises:
        UserError: A value is invalid.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):  # YAML and JSON give lists
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise UserError(f"model.float8.{name} is {value!r}: it must be a list of texts")
            object.__setattr__(self, name, tuple(value))
        if not self.include:
            raise UserError(
                "model.float8.include is empty: give ['*'] for all linear layers, or leave out model.float8"
            )


class Float8Choice(NamedTuple):
    """What becomes of the layers of the blocks, by name.

    Args:
        layers: Those that are converted.
        left_out: Those that keep the precision of the run although a pattern includes them, with the reason.
    """

    layers: Mapping[str, nn.Linear]
    left_out: Mapping[str, str]

    def describe(self) -> str:
        """Returns one line: how many layers are converted, and which are left out for which reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(name)
        left = "".join(
            f"; {len(names)} {reason} and keep the precision of the run: {list_names(names)}"
            for reason, names in by_reason.items()
        )
        return f"float8: {numbered(len(self.layers), 'linear layers')}{left}"


def choose_layers(decoder: LanguageModel, options: Float8Options) -> Float8Choice:
    """Returns the linear layers of the blocks that are converted, and those that are left out. Pure.

    Embedding and head lie outside of the blocks; routers and stacks of experts are no linear layers.

    Raises:
        UserError: A pattern matches no layer, or no layer remains.
    """
    linears = find_linears(decoder)
    for name in ("include", "exclude"):
        check_patterns(f"model.float8.{name}", getattr(options, name), linears, "linear layer of the blocks")
    left_out = dict.fromkeys(find_stacks(decoder), "are stacks of routed experts")
    layers: dict[str, nn.Linear] = {}
    for name, layer in choose_by_name(linears, options.include, options.exclude).items():
        parent, _, own = name.rpartition(".")
        part = decoder.get_submodule(parent)
        if isinstance(part, Part) and own in part.precise_layers:
            left_out[name] = "need more digits than float8 has"
        elif layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT:
            left_out[name] = f"have a width that is no multiple of {ALIGNMENT}"
        else:
            layers[name] = layer
    if not layers:
        choice = Float8Choice(layers, left_out)
        raise UserError(f"model.float8 converts no layer ({choice.describe()}): leave it out")
    return Float8Choice(layers, left_out)


def convert_layers(decoder: LanguageModel, choice: Float8Choice, device: torch.device) -> None:
    """Converts the chosen layers of a decoder in place; parameters and their names stay.

    Args:
        decoder: Not wrapped yet, on the meta device or not.
        choice: Of `choose_layers` for this decoder.
        device: Where the model will be; on the CPU products are emulated.

    Raises:
        UserError: torchao is not installed.
    """
    torchao = load_torchao()
    torchao.convert_to_float8_training(
        decoder,
        module_filter_fn=lambda module, name: name in choice.layers,
        config=torchao.Float8LinearConfig(emulate=is_host(device.type)),
    )


def find_float8_layers(decoder: nn.Module) -> dict[str, Any]:
    """Returns the converted layers of a decoder, by name."""
    # By a module that is only imported if a layer was converted.
    return {name: module for name, module in decoder.named_modules() if hasattr(module, "linear_mm_config")}


def check_float8(config: DecoderConfig, options: Float8Options | None) -> None:
    """Refuses patterns of layers that match none, without building the model.

    Raises:
        UserError: A pattern matches no layer, or no layer remains.
    """
    if options is not None:
        with torch.device("meta"):
            choose_layers(build_model(config), options)


def check_device(device: torch.device) -> None:
    """Refuses a device on which the products would be neither computed nor emulated.

    Raises:
        UserError: The device has no float8 products.
    """
    if not is_host(device.type) and not has_float8(device):
        raise UserError(
            f"model.float8 is given, and {device} multiplies no float8 (CUDA devices of capability 8.9 or higher do, "
            "such as L4, H100 and B200): leave out model.float8"
        )


def load_torchao() -> Any:
    """Returns the module `torchao.float8`.

    Raises:
        UserError: torchao is not installed.
    """
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        raise UserError(
            "model.float8 is given, and torchao is not installed: pip install 'genesis-lm[float8]', or leave out "
            "model.float8"
        ) from None
    with _quiet():
        return import_module(f"{PACKAGE}.float8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what the import of torchao prints: kernels that it cannot load, which float8 does not use; a warning."""
    loggers = (logging.getLogger(PACKAGE), logging.getLogger("torch.utils._pytree"))
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "invalid escape sequence")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- the proof of a device


def list_float8_proofs(options: Float8Options | None) -> tuple[DeviceProof, ...]:
    """Returns the proof of the device's float8 products if a run has them; its name has torchao's version."""
    if options is None:
        return ()
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:  # refused before anything is built
        return ()
    return (DeviceProof("float8", f"{PACKAGE} {found}", "unproved", prove_float8),)


def prove_float8(device: torch.device) -> None:
    """Compares output and gradients of a converted layer on a device with those that the CPU emulates.

    Raises:
        RuntimeError: They differ by more than their rounding.
    """
    torchao = load_torchao()
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(64, 128, generator=generator) for _ in range(2))
    found = []
    for place in (torch.device("cpu"), device):
        layer = nn.Linear(128, 64, bias=False, device=place)
        layer.weight.data.copy_(weight)
        converted = torchao.convert_to_float8_training(
            layer, config=torchao.Float8LinearConfig(emulate=is_host(place.type))
        )
        x = inputs.to(place).requires_grad_()
        with torch.autocast(place.type, enabled=False):
            out: Tensor = converted(x)
            torch.autograd.backward(out.square().sum())
        assert x.grad is not None
        found.append([value.detach().float().cpu() for value in (out, x.grad, converted.weight.grad)])
    for name, expected, value in zip(
        ("output", "gradient of the input", "gradient of the weight"), *found, strict=True
    ):
        error = float((value - expected).norm() / expected.norm())
        if not error <= _PROOF_TOLERANCE:
            raise RuntimeError(f"the {name} of a float8 layer differs from the CPU's by {error:.1%}")
