"""Adapters on the routed experts of a mixture: two small trained matrices for each expert beside a frozen stack (LoRA).

N  rows, sorted by expert     G  experts     I  input width     O  output width     R  rank

The stacks of `gate` and `up` share an adapter, because transformers stacks them as `gate_up_proj`, which PEFT adapts as
one (`target_parameters`): one A for both, and a B whose first rows belong to `gate`. Products run on the rows of each
expert, so that the update of a whole weight never exists in training.
"""

import math
from typing import Final, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import pad

from genesis.model.cut import held
from genesis.model.expert_products import GROUPED_ALIGNMENT, multiply_by_expert
from genesis.model.experts import BIASES, DOWN, GATE_UP, STACKS, Experts
from genesis.model.initial import InitialValues
from genesis.model.part import ADAPTERS, ParameterGroup, Part

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
        low_weight, high_weight = (held(weight).to(rows.dtype) for weight in (self.lora_A, self.lora_B))
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
        for name in BIASES:
            self.register_parameter(name, getattr(base, name))
        self.gate_limit = base.gate_limit
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
        return self._run_in_parts(rows, counts) if self.is_on else super().forward(rows, counts)

    def _find_update(self, target: str, rows: Tensor, counts: Tensor) -> Tensor | None:
        adapter = self.list_adapters().get(target) if self.is_on else None
        return None if adapter is None else self._adapt(adapter, rows, counts)

    def _adapt(self, adapter: ExpertAdapter, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the update of an adapter, computed in the dtype of the adapter unless autocast gives another."""
        is_cast = torch.is_autocast_enabled(rows.device.type)
        wide = rows if is_cast else rows.to(adapter.lora_A.dtype)
        update: Tensor = adapter(wide, counts, self.is_grouped(wide))
        return update.to(rows.dtype)


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
