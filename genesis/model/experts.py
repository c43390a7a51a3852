"""The routed experts of a mixture: the products of rows with the weights of their experts.

N  rows, sorted by expert     G  experts     D  model width     F  width inside an expert

The products run in a loop over the experts, or in one kernel for all of them (`grouped_mm`) where the device has a fast
one. Both are one operator for autograd and torch.compile, so that a compiled block has no break at the numbers of rows,
which the host must know for a loop.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import silu

from genesis.model.cut import held
from genesis.model.expert_products import (
    activate,
    add_bias_by_expert,
    clear_tail,
    find_ends,
    grouped_mm,
    multiply_by_expert,
    suits_grouped,
)
from genesis.model.initial import InitialValues
from genesis.model.part import VECTORS, ParameterGroup, Part

EXPERTS: Final = ParameterGroup("experts", "matrix")
"""The group of the experts' weights, each a stack of one matrix for each expert."""
BIASES: Final = ("gate_bias", "up_bias", "down_bias")
GATE_UP: Final = "gate_up"
DOWN: Final = "down"
STACKS: Final[Mapping[str, tuple[str, ...]]] = {GATE_UP: ("gate", "up"), DOWN: ("down",)}
"""The weights of `Experts` beside which an adapter lies, by the name of the target; their rows follow in its B."""


class Experts(Part):
    """SwiGLU in each of several experts.

    Args:
        num_experts: Number of experts.
        num_active: Number of experts that see a token.
        dim: Model width.
        ffn_dim: Width inside an expert.
        has_biases: Whether the three products have biases.
        gate_limit: The limit of the clamped activation (`activate`); None for SwiGLU.

    Attributes:
        products: How the products are computed: `loop`, `grouped`, or `auto` for the faster one on the device.
    """

    draws_random_numbers = False

    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        num_active: int,
        dim: int,
        ffn_dim: int,
        *,
        has_biases: bool = False,
        gate_limit: float | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.num_active = num_experts, num_active
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        for name, width in zip(BIASES, (ffn_dim, ffn_dim, dim), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, width)) if has_biases else None)
        self.gate_limit = gate_limit
        self.products: Literal["auto", "loop", "grouped"] = "auto"

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes each expert by its number, so that a rank draws only the experts that it holds; biases are 0."""
        initial.fill_stack("gate", self.gate)
        initial.fill_stack("up", self.up)
        initial.fill_stack_residual("down", self.down)
        for bias in self._list_biases().values():
            nn.init.zeros_(bias)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each weight and bias."""
        return dict.fromkeys(("gate", "up", "down"), EXPERTS) | dict.fromkeys(self._list_biases(), VECTORS)

    def _list_biases(self) -> dict[str, nn.Parameter]:
        return {name: bias for name in BIASES if (bias := getattr(self, name)) is not None}

    @property
    def num_inactive_parameters(self) -> int:
        """The number of weights and biases that a token does not use."""
        num_inactive = self.num_experts - self.num_active
        num_biases = sum(bias.shape[1] for bias in self._list_biases().values())
        return self._count_weights(num_inactive) + num_inactive * num_biases

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the experts that see a token."""
        return 6 * self._count_weights(self.num_active)

    def _count_weights(self, num_experts: int) -> int:
        return num_experts * sum(math.prod(weight.shape[1:]) for weight in (self.gate, self.up, self.down))

    def find_dtype(self, x: Tensor) -> torch.dtype:
        """Returns the dtype of the products of rows like `x`: that of autocast, or the weights' own."""
        is_cast = torch.is_autocast_enabled(x.device.type)
        return torch.get_autocast_dtype(x.device.type) if is_cast else self.gate.dtype

    def forward(self, rows: Float[Tensor, "N D"], counts: Int64[Tensor, " G"]) -> Float[Tensor, "N D"]:
        """Returns the experts' outputs for rows that are sorted by expert.

        Args:
            rows: The inputs. Rows behind those of the last expert belong to no expert; their outputs are zeros.
            counts: The number of rows of each expert.
        """
        if self.gate_limit is not None or self.gate_bias is not None:
            return self._run_in_parts(rows, counts)
        rows = rows.to(self.find_dtype(rows)).contiguous()
        cast = [held(weight).to(rows.dtype) for weight in (self.gate, self.up, self.down)]
        out: Tensor = _run_experts(rows, *cast, counts, self.is_grouped(rows))[0]
        return out

    def _run_in_parts(self, rows: Float[Tensor, "N D"], counts: Int64[Tensor, " G"]) -> Float[Tensor, "N D"]:
        """Returns the outputs by a product for each stack, to each of which adapters and biases can be added."""
        rows = rows.to(self.find_dtype(rows)).contiguous()
        gated, upped = (self._multiply_with_bias(name, rows, counts) for name in STACKS[GATE_UP])
        if (update := self._find_update(GATE_UP, rows, counts)) is not None:
            to_gate, to_up = update.chunk(2, dim=1)
            gated, upped = gated + to_gate, upped + to_up
        inner = activate(gated, upped, self.gate_limit)
        out = self._multiply_with_bias(DOWN, inner, counts)
        return out if (update := self._find_update(DOWN, inner, counts)) is None else out + update

    def _find_update(self, target: str, rows: Tensor, counts: Tensor) -> Tensor | None:
        """Returns what is added to the products of the rows with the stacks of a target; None for nothing."""
        return None

    def _multiply_with_bias(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        products, bias = self._multiply_stack(name, rows, counts), getattr(self, f"{name}_bias")
        return products if bias is None else add_bias_by_expert(products, held(bias), counts, self.is_grouped(rows))

    def _multiply_stack(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns each row times its expert's matrix in a stack."""
        weight = held(getattr(self, name)).to(rows.dtype)
        return multiply_by_expert(rows, weight, counts, self.is_grouped(rows))

    def is_grouped(self, rows: Tensor) -> bool:
        """Returns whether one kernel computes the products of all experts, for rows in their dtype."""
        return self.products == "grouped" or (self.products == "auto" and suits_grouped(rows, rows.dtype, self.gate))


@torch.library.custom_op("genesis::run_experts", mutates_args=())
def _run_experts(
    rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: Tensor, is_grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs, and for the backward the products of the rows with `gate` and `up`."""
    if is_grouped:
        ends = find_ends(counts)
        gated = grouped_mm(rows, gate.mT, ends)
        upped = grouped_mm(rows, up.mT, ends)
        out = grouped_mm(silu(gated).mul_(upped), down.mT, ends)
        return clear_tail(out, ends), gated, upped
    out = torch.empty_like(rows)
    gated, upped = (rows.new_empty(len(rows), gate.shape[1]) for _ in range(2))
    parts = _iterate(counts)
    # One buffer for all experts stays in the cache, and its memory is not returned to the system and zeroed again.
    (buffer,) = _allocate_buffers(parts, gated, 1)
    end = 0
    for expert, start, end in parts:
        if start == end:
            continue
        inner = buffer[: end - start]
        torch.mm(rows[start:end], gate[expert].T, out=gated[start:end])
        torch.mm(rows[start:end], up[expert].T, out=upped[start:end])
        torch.ops.aten.silu.out(gated[start:end], out=inner)
        torch.mm(inner.mul_(upped[start:end]), down[expert].T, out=out[start:end])
    out[end:] = 0.0
    return out, gated, upped


@_run_experts.register_fake
def _(
    rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: Tensor, is_grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inner = (len(rows), gate.shape[1])
    return torch.empty_like(rows), rows.new_empty(inner), rows.new_empty(inner)


@torch.library.custom_op("genesis::run_experts_backward", mutates_args=())
def _run_experts_backward(
    grad: Tensor,
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    counts: Tensor,
    gated: Tensor,
    upped: Tensor,
    is_grouped: bool,
    has_weight_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of the rows and of the weights; empty ones for weights that are not trained."""
    grad = grad.contiguous()
    if is_grouped:
        return _backward_grouped(grad, rows, gate, up, down, find_ends(counts), gated, upped, has_weight_gradients)
    grad_rows = torch.empty_like(rows)
    grads = [torch.empty_like(weight) if has_weight_gradients else weight.new_empty(0) for weight in (gate, up, down)]
    grad_gate, grad_up, grad_down = grads
    parts = _iterate(counts)
    buffers = _allocate_buffers(parts, gated, 3)
    end = 0
    for expert, start, end in parts:
        if start == end:  # its gradient is zeros, which the optimizer sees as it sees any other
            for of_one in grads:
                of_one[expert : expert + 1] = 0.0
            continue
        part, inputs = grad[start:end], rows[start:end]
        grad_inner, grad_upped, other = (buffer[: end - start] for buffer in buffers)
        torch.mm(part, down[expert], out=grad_inner)
        torch.ops.aten.silu.out(gated[start:end], out=grad_upped)
        if has_weight_gradients:
            torch.mul(grad_upped, upped[start:end], out=other)
            torch.mm(part.T, other, out=grad_down[expert])
        grad_upped.mul_(grad_inner)
        grad_inner.mul_(upped[start:end])
        torch.ops.aten.silu_backward.grad_input(grad_inner, gated[start:end], grad_input=other)
        torch.mm(other, gate[expert], out=grad_rows[start:end])
        grad_rows[start:end].addmm_(grad_upped, up[expert])
        if has_weight_gradients:
            torch.mm(other.T, inputs, out=grad_gate[expert])
            torch.mm(grad_upped.T, inputs, out=grad_up[expert])
    grad_rows[end:] = 0.0
    return grad_rows, grad_gate, grad_up, grad_down


@_run_experts_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    counts: Tensor,
    gated: Tensor,
    upped: Tensor,
    is_grouped: bool,
    has_weight_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = (torch.empty_like(w) if has_weight_gradients else w.new_empty(0) for w in (gate, up, down))
    return torch.empty_like(rows), *weights  # type: ignore[return-value]  # three of them


def _backward_grouped(
    grad: Tensor,
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    ends: Tensor,
    gated: Tensor,
    upped: Tensor,
    has_weight_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_gated, grad_upped, inner = _backward_swiglu(grouped_mm(grad, down, ends), gated, upped)
    grad_rows = grouped_mm(grad_gated, gate, ends).add_(grouped_mm(grad_upped, up, ends))
    grad_rows = clear_tail(grad_rows, ends)
    if not has_weight_gradients:
        return grad_rows, gate.new_empty(0), up.new_empty(0), down.new_empty(0)
    return (
        grad_rows,
        grouped_mm(grad_gated.T, rows, ends),
        grouped_mm(grad_upped.T, rows, ends),
        grouped_mm(grad.T, inner, ends),
    )


def _backward_swiglu(grad: Tensor, gated: Tensor, upped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `gated` and `upped`, and silu(gated) * upped, which the forward did not keep."""
    activated = silu(gated)
    grad_gated = torch.ops.aten.silu_backward(grad * upped, gated)
    return grad_gated, grad.mul_(activated), activated.mul_(upped)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.is_grouped = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    has_weight_gradients = any(ctx.needs_input_grad[1:4])
    saved = ctx.saved_tensors
    grads = _run_experts_backward(grad, *saved, ctx.is_grouped, has_weight_gradients)
    weights = grads[1:] if has_weight_gradients else (None,) * 3
    return (grads[0], *weights, None, None)


_run_experts.register_autograd(_backward, setup_context=_setup_context)


def _iterate(counts: Tensor) -> list[tuple[int, int, int]]:
    """Returns the number, the first row and the end of each expert. Waits for the device."""
    ends = counts.cumsum(0).tolist()
    return [(expert, start, end) for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def _allocate_buffers(parts: list[tuple[int, int, int]], like: Tensor, number: int) -> list[Tensor]:
    most = max((end - start for _, start, end in parts), default=0)
    return [like.new_empty(most, like.shape[1]) for _ in range(number)]
