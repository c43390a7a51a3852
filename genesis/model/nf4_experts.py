"""Routed experts whose frozen stacks are bytes (NF4): their products, with or without adapters.

N  rows, sorted by expert     G  experts     I  input width, a multiple of 64     O  output width

A stack is dequantised whole for each of its products, and forgotten.
"""

from itertools import chain
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from genesis.model.expert_adapter import AdaptedExperts
from genesis.model.expert_products import backward_rows, multiply_by_expert
from genesis.model.experts import STACKS, Experts
from genesis.model.initial import InitialValues
from genesis.model.nf4 import BYTES, HELD, Nf4Part, define, dequantise
from genesis.model.part import VECTORS, ParameterGroup

_STACKS: Final = tuple(chain.from_iterable(STACKS.values()))


# Operators of their own for the reasons of `genesis.model.nf4`; `held` are the four tensors, counts and `is_grouped`.


def _dequantise(held: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    *tensors, counts, is_grouped = held
    return dequantise(dict(zip(BYTES, tensors, strict=True)), dtype), counts, is_grouped


def _multiply(rows: Tensor, *held: Any) -> Tensor:
    return multiply_by_expert(rows, *_dequantise(held, rows.dtype))


def _allocate_product(rows: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(len(rows), packed.shape[1])


def _multiply_gradient(grad: Tensor, *held: Any) -> Tensor:
    of_rows: Tensor = backward_rows(grad, *_dequantise(held, grad.dtype))
    return of_rows


def _allocate_gradient(grad: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(len(grad), 2 * packed.shape[2])


_OTHERS: Final = "Tensor counts, bool is_grouped"
define(f"nf4_by_expert(Tensor rows, {HELD}, {_OTHERS})", _multiply, _allocate_product)
define(f"nf4_by_expert_backward(Tensor grad, {HELD}, {_OTHERS})", _multiply_gradient, _allocate_gradient)


class _Product(torch.autograd.Function):
    """Each row times the matrix of its expert, which keeps bytes alone for its backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *held: Any) -> Tensor:
        *tensors, ctx.is_grouped = held
        ctx.save_for_backward(*tensors)
        out: Tensor = torch.ops.genesis.nf4_by_expert(rows, *held)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.genesis.nf4_by_expert_backward(grad, *ctx.saved_tensors, ctx.is_grouped), *(None,) * 6


class Nf4Stack(Nf4Part):
    """The frozen matrices of all experts, [G, O, I], as four tensors of bytes.

    Args:
        stack: The parameter whose place it takes, for its shape and its device.

    Attributes:
        shape: The shape of the stack.
    """

    def __init__(self, stack: Tensor) -> None:
        super().__init__()
        self.shape = stack.shape
        self.hold_bytes(*stack.shape, device=stack.device)

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.packed.device

    def multiply_by_expert(
        self, rows: Float[Tensor, "N I"], counts: Int64[Tensor, " G"], is_grouped: bool
    ) -> Float[Tensor, "N O"]:
        """Returns each row times the matrix of its expert; see `genesis.model.expert_products.multiply_by_expert`."""
        held = (*(getattr(self, name) for name in BYTES), counts, is_grouped)
        out: Tensor = _Product.apply(rows.contiguous(), *held)  # type: ignore[no-untyped-call]
        return out


class Nf4Experts(AdaptedExperts):
    """Experts whose stacks are bytes, with adapters or without.

    Args:
        base: The experts whose place they take.
        targets: See `AdaptedExperts`, as for the other arguments.
        rank: See there.
        scaling: See there.
    """

    def __init__(self, base: Experts, targets: tuple[str, ...] = (), *, rank: int = 1, scaling: float = 1.0) -> None:
        super().__init__(base, targets, rank=rank, scaling=scaling)
        for name in _STACKS:
            stack = getattr(base, name)
            if isinstance(stack, nn.Parameter):
                delattr(self, name)
                setattr(self, name, Nf4Stack(stack))

    def init_weights(self, initial: InitialValues) -> None:
        """Does nothing: a stack of bytes refuses to be initialized."""

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each bias; the stacks are parts of their own."""
        return dict.fromkeys(self._list_biases(), VECTORS)

    def find_dtype(self, x: Tensor) -> torch.dtype:
        """Returns the dtype of the products: that of autocast, or that of the rows."""
        return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype

    def forward(self, rows: Float[Tensor, "N D"], counts: Int64[Tensor, " G"]) -> Float[Tensor, "N D"]:
        """Returns the outputs of the experts; see `Experts.forward`."""
        return self._run_in_parts(rows, counts)

    def _multiply_stack(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        stack: Nf4Stack = getattr(self, name)
        return stack.multiply_by_expert(rows, counts, self.is_grouped(rows))
