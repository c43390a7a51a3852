"""Products of rows with the matrices of their experts, and the activations between two of them.

N  rows, sorted by expert     G  experts     I  input width     O  output width     F  width inside an expert
"""

from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad, silu

from genesis.base.device import read_capability

_GROUPED_CAPABILITY: Final = (8, 0)
GROUPED_ALIGNMENT: Final = 8
"""Elements of bfloat16 in the 16 bytes to which the kernel aligns rows."""
GATE_SLOPE: Final = 1.702
"""The factor in the sigmoid of a clamped gate: that of GPT-OSS, whose product with its argument is close to GELU."""


def suits_grouped(rows: Tensor, dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether one kernel for all experts is available for these operands and faster than a loop."""
    return (
        rows.device.type == "cuda"
        and dtype == torch.bfloat16
        and (read_capability(rows.device) or (0, 0)) >= _GROUPED_CAPABILITY
        and all(size % GROUPED_ALIGNMENT == 0 for size in weight.shape[1:])
    )


def find_ends(counts: Tensor) -> Tensor:
    """Returns the end of each expert's rows, as the kernel takes it."""
    return counts.cumsum(0).to(torch.int32)


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns the products of groups of rows, or of columns, that end there, in one kernel."""
    out: Tensor = torch.nn.functional.grouped_mm(left, right, offs=ends)
    return out


def clear_tail(rows: Tensor, ends: Tensor) -> Tensor:
    """Sets the rows behind the last group, which the kernel leaves as they were in memory, to zero."""
    is_tail = torch.arange(len(rows), device=rows.device) >= ends[-1]
    return rows.masked_fill_(is_tail.unsqueeze(1), 0.0)


# ---- products


def multiply_by_expert(
    rows: Float[Tensor, "N I"], weight: Float[Tensor, "G O I"], counts: Int64[Tensor, " G"], is_grouped: bool
) -> Float[Tensor, "N O"]:
    """Returns each row times the matrix of its expert; zeros for rows behind those of the last expert.

    Args:
        rows: The rows, sorted by expert.
        weight: A matrix for each expert.
        counts: The number of rows of each expert.
        is_grouped: Whether one kernel computes all products; otherwise a loop does, which waits for the device.
    """
    out: Tensor = _multiply(rows.contiguous(), weight, counts, is_grouped)
    return out


@torch.library.custom_op("genesis::multiply_by_expert", mutates_args=())
def _multiply(rows: Tensor, weight: Tensor, counts: Tensor, is_grouped: bool) -> Tensor:
    if is_grouped:
        ends = find_ends(counts)
        return clear_tail(grouped_mm(rows, weight.mT, ends), ends)
    return _loop(rows, weight.mT, counts)


@_multiply.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor, is_grouped: bool) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[1])


@torch.library.custom_op("genesis::multiply_by_expert_rows_backward", mutates_args=())
def backward_rows(grad: Tensor, weight: Tensor, counts: Tensor, is_grouped: bool) -> Tensor:
    """Returns the gradient of the rows of `multiply_by_expert`, by that of its result."""
    grad = grad.contiguous()
    if is_grouped:
        ends = find_ends(counts)
        return clear_tail(grouped_mm(grad, weight, ends), ends)
    return _loop(grad, weight, counts)


@backward_rows.register_fake
def _(grad: Tensor, weight: Tensor, counts: Tensor, is_grouped: bool) -> Tensor:
    return grad.new_empty(len(grad), weight.shape[2])


@torch.library.custom_op("genesis::multiply_by_expert_weight_backward", mutates_args=())
def _backward_weight(grad: Tensor, rows: Tensor, counts: Tensor, is_grouped: bool) -> Tensor:
    grad = grad.contiguous()
    if is_grouped:
        return grouped_mm(grad.T, rows, find_ends(counts))
    found = grad.new_zeros(len(counts), grad.shape[1], rows.shape[1])
    start = 0
    for expert, end in enumerate(counts.cumsum(0).tolist()):
        if start < end:
            torch.mm(grad[start:end].T, rows[start:end], out=found[expert])
        start = end
    return found


@_backward_weight.register_fake
def _(grad: Tensor, rows: Tensor, counts: Tensor, is_grouped: bool) -> Tensor:
    return grad.new_empty(len(counts), grad.shape[1], rows.shape[1])


def _loop(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Returns each row times the matrix, of inputs and outputs, of its expert."""
    out = rows.new_empty(len(rows), matrices.shape[2])
    start = 0
    for expert, end in enumerate(counts.cumsum(0).tolist()):
        if start < end:
            torch.mm(rows[start:end], matrices[expert], out=out[start:end])
        start = end
    out[start:] = 0.0
    return out


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    rows, weight, counts, ctx.is_grouped = inputs
    # The rows are kept only for the gradient of the weight: a frozen stack keeps none.
    kept = rows if ctx.needs_input_grad[1] else None
    ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None, counts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, counts = ctx.saved_tensors
    return (
        None if weight is None else backward_rows(grad, weight, counts, ctx.is_grouped),
        None if rows is None else _backward_weight(grad, rows, counts, ctx.is_grouped),
        None,
        None,
    )


_multiply.register_autograd(_backward, setup_context=_setup_context)


def add_bias_by_expert(
    products: Float[Tensor, "N O"], bias: Float[Tensor, "G O"], counts: Int64[Tensor, " G"], is_grouped: bool
) -> Float[Tensor, "N O"]:
    """Returns each row plus the bias of its expert; rows behind those of the last expert stay.

    As a product with a one for each row, so that the sums of its gradient have one order, too.
    """
    ones = products.new_ones(len(products), 1)
    column = bias.to(products.dtype).unsqueeze(2)
    if is_grouped:  # the kernel needs aligned rows; zeros add nothing
        ones, column = (pad(part, (0, GROUPED_ALIGNMENT - 1)) for part in (ones, column))
    return products + multiply_by_expert(ones, column, counts, is_grouped)


# ---- activations


def activate(gated: Float[Tensor, "N F"], upped: Float[Tensor, "N F"], limit: float | None) -> Float[Tensor, "N F"]:
    """Returns silu(gated) * upped; with a limit, GPT-OSS's clamped form of it.

    Args:
        gated: Rows times `gate`.
        upped: Rows times `up`.
        limit: The greatest value of the gate, and of the magnitude of `upped`; None for SwiGLU.

    References:
        OpenAI, gpt-oss, https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py, `swiglu`.
    """
    if torch.compiler.is_compiling():  # the compiler decides by itself what it keeps for the backward
        return silu(gated) * upped if limit is None else _clamped(gated, upped, limit)
    kind = _SwiGLU if limit is None else _ClampedSwiGLU
    given = (gated, upped) if limit is None else (gated, upped, limit)
    inner: Tensor = kind.apply(*given)  # type: ignore[no-untyped-call]
    return inner


def _clamped(gated: Tensor, upped: Tensor, limit: float) -> Tensor:
    gate = gated.clamp(max=limit)
    return (upped.clamp(-limit, limit) + 1.0) * (gate * (GATE_SLOPE * gate).sigmoid())


class _SwiGLU(torch.autograd.Function):
    """silu(gated) * upped, which keeps its two inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, gated: Tensor, upped: Tensor) -> Tensor:
        ctx.save_for_backward(gated, upped)
        return silu(gated).mul_(upped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gated, upped = ctx.saved_tensors
        (grad,) = grads
        return torch.ops.aten.silu_backward(grad * upped, gated), silu(gated).mul_(grad)


class _ClampedSwiGLU(torch.autograd.Function):
    """`_clamped`, which keeps its two inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, gated: Tensor, upped: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gated, upped)
        ctx.limit = limit
        return _clamped(gated, upped, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gated, upped = (part.detach().requires_grad_() for part in ctx.saved_tensors)
        with torch.enable_grad():
            inner = _clamped(gated, upped, ctx.limit)
        of_gate, of_up = torch.autograd.grad(inner, (gated, upped), grads[0])
        return of_gate, of_up, None
