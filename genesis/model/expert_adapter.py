"""Adapters on the routed experts of a mixture: two small trained matrices for each expert beside a frozen stack (LoRA).

N  rows, sorted by expert     G  experts     I  input width     O  output width     R  rank

The stacks of `gate` and `up` share an adapter, because transformers stacks them as `gate_up_proj`, which PEFT adapts as
one (`target_parameters`): one A for both, and a B whose first rows belong to `gate`. Products run on the rows of each
expert, so that the update of a whole weight never exists in training.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad, silu

from genesis.model.experts import GROUPED_ALIGNMENT, Experts, clear_tail, find_ends, grouped_mm, suits_grouped
from genesis.model.initial import InitialValues
from genesis.model.part import ADAPTERS, ParameterGroup, Part

GATE_UP: Final = "gate_up"
DOWN: Final = "down"
STACKS: Final[Mapping[str, tuple[str, ...]]] = {GATE_UP: ("gate", "up"), DOWN: ("down",)}
"""The weights of `Experts` beside which an adapter lies, by the name of the target; their rows follow in its B."""
ADAPTER_SUFFIX: Final = "_adapter"


class ExpertAdapter(Part):
    """A pair of matrices for each expert: `scaling * B A x`.

    Args:
        num_experts: Number of experts.
        num_active: Number of experts that see a token.
        in_features: Width of the inputs.
        out_features: Width of the outputs.
        rank: Width between the two matrices.
        scaling: The factor of the update.
        device: The device of the base.
    """

    draws_random_numbers = False

    def __init__(
        self,
        num_experts: int,
        num_active: int,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        scaling: float,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_experts, self.num_active = num_experts, num_active
        self.in_features, self.out_features = in_features, out_features
        self.rank, self.scaling = rank, scaling
        self.lora_A = nn.Parameter(torch.empty(num_experts, rank, in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.empty(num_experts, out_features, rank, device=device, dtype=torch.float32))

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the adapter so that its update is zero; each expert by its number, as the experts are."""
        initial.fill_stack_uniform("lora_A", self.lora_A, 1.0 / math.sqrt(self.in_features))
        nn.init.zeros_(self.lora_B)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of both stacks."""
        return {"lora_A": ADAPTERS, "lora_B": ADAPTERS}

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the adapters of the experts that see a token."""
        return 6 * self.num_active * self.rank * (self.in_features + self.out_features)

    def forward(
        self, rows: Float[Tensor, "N I"], counts: Int64[Tensor, " G"], is_grouped: bool
    ) -> Float[Tensor, "N O"]:
        """Returns the update of each row.

        Args:
            rows: The inputs, in the dtype of the products.
            counts: The number of rows of each expert.
            is_grouped: Whether one kernel computes the products of all experts.
        """
        low_weight, high_weight = (_local(weight).to(rows.dtype) for weight in (self.lora_A, self.lora_B))
        missing = -self.rank % GROUPED_ALIGNMENT
        if is_grouped and missing:  # the kernel needs aligned rows; zeros add nothing
            low_weight, high_weight = pad(low_weight, (0, 0, 0, missing)), pad(high_weight, (0, missing))
        low = multiply_by_expert(rows, low_weight, counts, is_grouped)
        return multiply_by_expert(low * self.scaling, high_weight, counts, is_grouped)


class AdaptedExperts(Experts):
    """Experts with adapters. The base's stacks keep their names and dtype, and the adapters are float32.

    Args:
        base: The experts to adapt; their parameters become this part's parameters.
        targets: The stacks with adapters: names in `STACKS`.
        rank: Width between the two matrices of an adapter.
        scaling: The factor of an adapter's update.

    Attributes:
        is_on: Whether the adapters take part; without them these are the base's experts (`adapters_off`).
    """

    gate_up_adapter: ExpertAdapter | None
    down_adapter: ExpertAdapter | None

    def __init__(self, base: Experts, targets: tuple[str, ...], *, rank: int, scaling: float) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.num_active = base.num_experts, base.num_active
        self.gate, self.up, self.down = base.gate, base.up, base.down
        self.products: Literal["auto", "loop", "grouped"] = base.products
        self.is_on = True
        for name in STACKS:
            adapter = None
            if name in targets:
                width_in, width_out = find_widths(base, name)
                adapter = ExpertAdapter(
                    base.num_experts,
                    base.num_active,
                    width_in,
                    width_out,
                    rank=rank,
                    scaling=scaling,
                    device=base.gate.device,
                )
            self.register_module(f"{name}{ADAPTER_SUFFIX}", adapter)

    def list_adapters(self) -> dict[str, ExpertAdapter]:
        """Returns the adapters by the names of their targets."""
        both = {GATE_UP: self.gate_up_adapter, DOWN: self.down_adapter}
        return {name: adapter for name, adapter in both.items() if adapter is not None}

    def forward(self, rows: Float[Tensor, "N D"], counts: Int64[Tensor, " G"]) -> Float[Tensor, "N D"]:
        """Returns the outputs of the base plus the adapters' updates; see `Experts.forward`."""
        return self._run(rows, counts, self.list_adapters()) if self.is_on else super().forward(rows, counts)

    def _run(
        self, rows: Float[Tensor, "N D"], counts: Int64[Tensor, " G"], adapters: Mapping[str, ExpertAdapter]
    ) -> Float[Tensor, "N D"]:
        rows = rows.to(self.find_dtype(rows)).contiguous()
        gated, upped = (self._multiply_stack(name, rows, counts) for name in STACKS[GATE_UP])
        if GATE_UP in adapters:
            to_gate, to_up = self._adapt(adapters[GATE_UP], rows, counts).chunk(2, dim=1)
            gated, upped = gated + to_gate, upped + to_up
        inner = _swiglu(gated, upped)
        out = self._multiply_stack(DOWN, inner, counts)
        return out + self._adapt(adapters[DOWN], inner, counts) if DOWN in adapters else out

    def _multiply_stack(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns each row times its expert's matrix in a stack of the base."""
        weight = _local(getattr(self, name)).to(rows.dtype)
        return multiply_by_expert(rows, weight, counts, self.is_grouped(rows))

    def _adapt(self, adapter: ExpertAdapter, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the update of an adapter, computed in the dtype of the adapter unless autocast gives another."""
        is_cast = torch.is_autocast_enabled(rows.device.type)
        wide = rows if is_cast else rows.to(adapter.lora_A.dtype)
        update: Tensor = adapter(wide, counts, self.is_grouped(wide))
        return update.to(rows.dtype)

    def is_grouped(self, rows: Tensor) -> bool:
        """Returns whether one kernel computes the products of all experts."""
        return self.products == "grouped" or (self.products == "auto" and suits_grouped(rows, rows.dtype, self.gate))


def find_widths(experts: Experts, target: str) -> tuple[int, int]:
    """Returns the widths of inputs and outputs of a target in `STACKS`."""
    weights = [getattr(experts, name) for name in STACKS[target]]
    return weights[0].shape[2], sum(weight.shape[1] for weight in weights)


def find_adapter(weight: str) -> tuple[str, int, int]:
    """Returns where the adapter of an experts' stack is: its module, and which of how many parts of the rows of its B.

    Args:
        weight: The stack's name.

    >>> find_adapter("blocks.0.feed_forward.experts.up")
    ('blocks.0.feed_forward.experts.gate_up_adapter', 1, 2)
    """
    experts, _, name = weight.rpartition(".")
    target = next(target for target, names in STACKS.items() if name in names)
    return f"{experts}.{target}{ADAPTER_SUFFIX}", STACKS[target].index(name), len(STACKS[target])


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _swiglu(gated: Tensor, upped: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler decides by itself what it keeps for the backward
        return silu(gated) * upped
    inner: Tensor = _SwiGLU.apply(gated, upped)  # type: ignore[no-untyped-call]
    return inner


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


# ---- the product of rows with the matrices of their experts


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
