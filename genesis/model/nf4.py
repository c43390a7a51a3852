"""Frozen weights in 4 bits (NF4): linear layers whose weight is four tensors of bytes, and their products.

O  output width     I  input width, a multiple of 64     G  experts, whose weights are a stack

packed      uint8 [O, I / 2]     two codes a byte, the first in the high bits; a code names one of 16 values
scales      uint8 [O, I / 64]    one code for each block of 64 weights of a row: its largest magnitude, less `offset`
scale_max   uint8 [N, 4]         the largest magnitude of each 256 scales, float32 as bytes
offset      uint8 [1, 4]         the mean of all scales, float32 as bytes

Those of a stack have its first dimension, too; scales of scales and the offset are of all its weights.

Codes, blocks and values are those of bitsandbytes' NF4 with double quantisation. The tensors are plain bytes: digests,
sharding by rows, saves and resumes treat them as they treat any other tensor, and no cast of a module can round them.
A weight is computed again for each product, and nothing but the bytes is kept for a backward.

References:
    Dettmers et al., QLoRA, arXiv:2305.14314. Dettmers et al., 8-bit Optimizers, arXiv:2110.02861 (the scales' codes).
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import linear

from genesis.base.device import is_host
from genesis.base.errors import UserError
from genesis.model.compilation import choose_compilation, compile_each_shape
from genesis.model.initial import InitialValues
from genesis.model.part import MATRICES, ParameterGroup, Part

BLOCK: Final = 64
"""Weights of a row that share a scale."""
_NESTED: Final = 256
"""Scales that share a scale of their own."""
BYTES: Final = ("packed", "scales", "scale_max", "offset")
"""The names of the tensors that hold a weight."""
_CHUNK: Final = 1 << 22
"""Weights that are quantised at a time, which takes some 20 bytes for each."""
_LEAST: Final = 1e-38  # a block of zeros has the largest magnitude 0, by which nothing can be divided
_CODE: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of a 4-bit code: quantiles of a normal distribution, scaled to at most 1 (appendix E of QLoRA)."""


@cache
def build_dynamic_code(*, is_signed: bool = True) -> tuple[float, ...]:
    """Returns the 256 values of the dynamic type of 8-bit optimizers, in order: more of them near 0 than near 1.

    Args:
        is_signed: Whether half of them are below 0; otherwise each power of ten has twice as many.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1.0, 2 ** (exponent + (not is_signed)) + 1)
        middles = (bounds[:-1] + bounds[1:]) / 2.0
        scaled = 10 ** (exponent - 6) * middles
        values += [*scaled.tolist(), *((-scaled).tolist() if is_signed else ())]
    return tuple(sorted(values))


@cache
def _list_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the two values of each byte of `packed`, float32 [256, 2], and the values of a scale's code, [256]."""
    code = torch.tensor(_CODE)
    pairs = torch.stack((code.repeat_interleave(len(code)), code.repeat(len(code))), dim=1)
    return pairs.to(device), torch.tensor(build_dynamic_code()).to(device)


# ---- from weights to bytes


def list_shapes(*sizes: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the four tensors that hold a weight [O, I], or a stack of weights [G, O, I]."""
    *rows, in_features = sizes
    num_blocks = math.prod(rows) * (in_features // BLOCK)
    return {
        "packed": (*rows, in_features // 2),
        "scales": (*rows, in_features // BLOCK),
        "scale_max": (-(-num_blocks // _NESTED), 4),
        "offset": (1, 4),
    }


def quantise(weight: Float[Tensor, "*G O I"]) -> dict[str, UInt8[Tensor, "..."]]:
    """Returns the four tensors of bytes that hold a weight, or a stack of them. Each code is the nearest one.

    Raises:
        ValueError: The width is no multiple of the block, or a weight is not finite.
    """
    if weight.ndim not in (2, 3) or weight.shape[-1] % BLOCK:
        raise ValueError(f"{tuple(weight.shape)} is no matrix whose width is a multiple of {BLOCK}")
    if weight.ndim == 3:  # one matrix of all rows
        held = quantise(weight.flatten(0, 1))
        return {name: held[name].view(shape) for name, shape in list_shapes(*weight.shape).items()}
    shapes = list_shapes(*weight.shape)
    packed = torch.empty(shapes["packed"], dtype=torch.uint8)
    largest = torch.empty(shapes["scales"], dtype=torch.float32)
    step = max(1, _CHUNK // weight.shape[1])
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        codes, largest[rows] = _encode(weight[rows].float().view(-1, weight.shape[1] // BLOCK, BLOCK), _CODE)
        codes = codes.view(-1, weight.shape[1])
        packed[rows] = (codes[:, ::2] << 4) | codes[:, 1::2]
    if not bool(largest.isfinite().all()):
        raise ValueError("it has values that are not finite")
    # In float64, so that the last bit does not depend on the order in which threads add.
    offset = largest.double().mean().float()
    flat = (largest - offset).flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % _NESTED)).view(-1, _NESTED)
    scales, scale_max = _encode(padded, build_dynamic_code())
    return {
        "packed": packed,
        "scales": scales.flatten()[: len(flat)].view(shapes["scales"]),
        "scale_max": scale_max.contiguous().view(torch.uint8).view(shapes["scale_max"]),
        "offset": offset.view(1).view(torch.uint8).view(shapes["offset"]),
    }


def _encode(blocks: Tensor, code: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Returns the code of each value relative to the largest magnitude of its block (the last dimension), and those."""
    values = torch.tensor(code)
    largest = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / largest.clamp(min=_LEAST)).unsqueeze(-1)).clamp(-1.0, 1.0)
    return torch.bucketize(scaled, (values[:-1] + values[1:]) / 2.0, out_int32=True).to(torch.uint8), largest


# ---- from bytes to weights


def dequantise(tensors: Mapping[str, UInt8[Tensor, "..."]], dtype: torch.dtype) -> Float[Tensor, "*G O I"]:
    """Returns the weight that four tensors hold, by their names in `BYTES`; float32 arithmetic, cast once."""
    weight: Tensor = torch.ops.genesis.nf4_weight(*(tensors[name] for name in BYTES), dtype)
    return weight


def dequantise_rows(tensors: Mapping[str, UInt8[Tensor, "..."]], rows: slice) -> Float[Tensor, "..."]:
    """Returns rows of a weight, or weights of a stack, held by four tensors: float32, and no others in memory."""
    pairs, code = _list_tables(tensors["packed"].device)
    largest = _read_largest(tensors["scales"], tensors["scale_max"], tensors["offset"], code)
    return _scale(tensors["packed"][rows], largest[rows], pairs, torch.float32)


# Three operators of their own, so that torch.compile, checkpoints of activations and a plan see one operation: of the
# traced steps, a compiler would keep the weight of the forward for the backward. They are defined by torch's lower
# interface, because LoRA on 8B calls them 750 times a step, and `custom_op` takes twice as long before it begins.
_LIBRARY: Final = torch.library.Library("genesis", "FRAGMENT")  # type: ignore[no-untyped-call]
HELD: Final = "Tensor packed, Tensor scales, Tensor scale_max, Tensor offset"
"""The four tensors in the schema of an operator."""


def define(schema: str, function: Callable[..., Tensor], allocate: Callable[..., Tensor]) -> None:
    """Defines an operator for all devices, and how an empty tensor like its result is made."""
    _LIBRARY.define(f"{schema} -> Tensor")  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"genesis::{name}", allocate, lib=_LIBRARY)


def _dequantise(packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    return _find_computation(packed.device.type)(packed, scales, scale_max, offset, *_list_tables(packed.device), dtype)


def allocate_weight(packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor like the weight that four tensors hold."""
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


define(f"nf4_weight({HELD}, ScalarType dtype)", _dequantise, allocate_weight)


@cache
def _find_computation(kind: str) -> Callable[..., Tensor]:
    """Returns the arithmetic for a kind of device: on a GPU compiled, because its steps are one kernel then."""
    return compile_each_shape(compute, is_rounded=True) if not is_host(kind) and choose_compilation(kind) else compute


def compute(
    packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor, pairs: Tensor, code: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns the weight that four tensors hold, by the tables of values; what a GPU compiles."""
    return _scale(packed, _read_largest(scales, scale_max, offset, code), pairs, dtype)


def _read_largest(scales: Tensor, scale_max: Tensor, offset: Tensor, code: Tensor) -> Tensor:
    """Returns the largest magnitude of each block, float32 [O, I / 64]."""
    values = code[scales.flatten().int()]
    wide = scale_max.view(torch.float32).expand(-1, _NESTED).reshape(-1)[: len(values)]
    return (values * wide + offset.view(torch.float32).view(1)).view(scales.shape)


def _scale(packed: Tensor, largest: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    # One look-up of 8 bytes for each byte, in the place of two shifts and two look-ups of 4.
    values = torch.nn.functional.embedding(packed.int(), pairs)
    return (values.view(-1, BLOCK) * largest.reshape(-1, 1)).view(*packed.shape[:-1], -1).to(dtype)


# ---- products


def _multiply(x: Tensor, packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor) -> Tensor:
    return linear(x, _dequantise(packed, scales, scale_max, offset, x.dtype))


def _allocate_product(x: Tensor, packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor) -> Tensor:
    return linear(x, allocate_weight(packed, scales, scale_max, offset, x.dtype))


def _multiply_gradient(grad: Tensor, packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor) -> Tensor:
    return grad @ _dequantise(packed, scales, scale_max, offset, grad.dtype)


def _allocate_gradient(grad: Tensor, packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor) -> Tensor:
    return grad @ allocate_weight(packed, scales, scale_max, offset, grad.dtype)


define(f"nf4_linear(Tensor x, {HELD})", _multiply, _allocate_product)
define(f"nf4_linear_backward(Tensor grad, {HELD})", _multiply_gradient, _allocate_gradient)


class _Product(torch.autograd.Function):
    """`x W'`, which keeps bytes alone for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, scale_max: Tensor, offset: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scales, scale_max, offset)
        out: Tensor = torch.ops.genesis.nf4_linear(x, packed, scales, scale_max, offset)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.genesis.nf4_linear_backward(grad, *ctx.saved_tensors), None, None, None, None


class Nf4Weight(nn.Module):
    """What a layer has whose weight is four tensors of bytes, in the place of the parameter `weight`."""

    packed: nn.Parameter
    scales: nn.Parameter
    scale_max: nn.Parameter
    offset: nn.Parameter

    def hold_bytes(self, *sizes: int, device: torch.device) -> None:
        """Registers the four tensors that hold a weight, or a stack, of these sizes, without values."""
        for name, shape in list_shapes(*sizes).items():
            empty = torch.empty(shape, dtype=torch.uint8, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @property
    def weight(self) -> Float[Tensor, "*G O I"]:
        """The weight, computed again in float32."""
        return dequantise({name: getattr(self, name) for name in BYTES}, torch.float32)

    def multiply(self, x: Float[Tensor, "*N I"], bias: Float[Tensor, " O"] | None) -> Float[Tensor, "*N O"]:
        """Returns `x W' + bias`, in the dtype of `x` or of autocast."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out: Tensor = _Product.apply(x, *(getattr(self, name) for name in BYTES))  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(out.dtype)


class Nf4Part(Nf4Weight, Part):
    """A frozen part whose weight is four tensors of bytes."""

    draws_random_numbers = False

    def init_weights(self, initial: InitialValues) -> None:
        """Refuses: a weight of bytes has no initial values.

        Raises:
            UserError: Always.
        """
        raise UserError("an NF4 base has no initial weights: give its checkpoint, as `genesis import` writes it")

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each of the four tensors, which are never trained."""
        return dict.fromkeys(BYTES, MATRICES)

    @property
    def flops_per_token(self) -> int:
        """0: the part around this one counts the weight."""
        return 0


class Nf4Linear(Nf4Part, nn.Linear):  # type: ignore[override]  # no parameter `weight`
    """A frozen linear layer whose weight is four tensors of bytes.

    Args:
        layer: The layer whose place it takes, for its shape, its device and its bias.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.hold_bytes(self.out_features, self.in_features, device=layer.weight.device)

    def forward(self, x: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """Returns `x W' + b`."""
        return self.multiply(x, self.bias)
