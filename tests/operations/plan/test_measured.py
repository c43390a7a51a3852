"""The predicted peak of a step against the peak that torch's allocator records, under every strategy and policy."""

from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch

from genesis.base.device import kind_of
from genesis.base.errors import UserError
from genesis.model.adapter import BASE_FORMATS, AdapterConfig
from genesis.model.attend.table import KERNELS
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import DecoderConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.feed_forward import Dense, FeedForwardConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.norm import NormConfig
from genesis.objectives import DPO
from genesis.operations.plan.layout import Layout, Workload
from genesis.operations.plan.sections import build_sections, build_setting
from genesis.operations.plan.timeline import play_step
from genesis.optim import Muon
from genesis_callbacks.testing import run_ranks
from tests.model import mixture_part
from tests.operations.plan.measure import measure_peak

TOLERANCE: Final = 0.03
KERNELS_TOLERANCE: Final = 0.1
"""Of linear attention, whose kernels hold what no operator shows, and of experts, counted as accelerators have them."""
SHAPE: Final = DecoderConfig(
    dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=192, max_seq_len=128, vocab_size=512
)
ONE: Final = Layout()
FULL: Final = Layout("full", 2, 2)
WORKLOAD: Final = Workload(
    SHAPE,
    seq_len=128,
    micro_batch_size=4,
    global_batch_size=12,
    precision="32-true",
    is_cpu=True,
    has_documents=False,
)
MIXTURE: Final = replace(
    SHAPE,
    ffn_dim=None,
    feed_forward=MixtureConfig(num_experts=4, top_k=2, ffn_dim=96, shared_ffn_dim=64, balance_loss=0.01, z_loss=0.001),
)
LINEAR: Final = replace(
    SHAPE,
    linear_attention=GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, attention_every=2),
)
PIPELINE_TOLERANCE: Final = 0.04
TENSOR_TOLERANCE: Final = 0.08
"""Of a vocabulary that ranks share: the plan takes the chunks of the head of one rank, which hold one more copy."""
SHARED_EXPERTS: Final = replace(FULL, expert_parallel=2)
LORA: Final = AdapterConfig(rank=8)
EXPERT_LORA: Final = replace(LORA, include_experts=("*",))
GROUPS: Final[dict[str, Any]] = {"activation_checkpointing": "block", "blocks_per_recomputation": 3}


def case(layout: Layout, **changes: Any) -> tuple[Workload, Layout]:
    # Three micro-batches a rank: gradients begin to exist in the first one and are reduced in the last one.
    return replace(WORKLOAD, **{"global_batch_size": 12 * layout.num_ranks, **changes}), layout


CASES: Final[dict[str, tuple[Workload, Layout]]] = {
    "rows shared by two": case(Layout("full", 2, 2, context_parallel=2), global_batch_size=12),
    "matrices shared by two": case(Layout("full", 2, 2, tensor_parallel=2), global_batch_size=12),
    "one device": case(ONE),
    "one device, one micro-batch": case(ONE, global_batch_size=4),
    "one device, documents": case(ONE, has_documents=True),
    "one device, untied": case(ONE, decoder=replace(SHAPE, has_tied_embeddings=False)),
    "one device, bf16-mixed": case(ONE, precision="bf16-mixed"),
    "one device, block, bf16-mixed": case(replace(ONE, activation_checkpointing="block"), precision="bf16-mixed"),
    "one device, muon": case(ONE, optimizer=Muon()),
    "one device, norms after, dropout": case(
        ONE, decoder=replace(SHAPE, norm=NormConfig(placement="after"), dropout=0.1)
    ),
    "one device, qk norms and a window": case(
        ONE,
        decoder=replace(
            SHAPE,
            num_heads=None,
            num_kv_heads=None,
            attention=AttentionConfig(
                num_heads=4, num_kv_heads=2, qk_norm="head", sliding_window=64, window_layers=(0, 2), no_rope_every=4
            ),
        ),
        has_documents=True,
    ),
    "one device, gated attention": case(
        ONE,
        decoder=replace(
            SHAPE,
            num_heads=None,
            num_kv_heads=None,
            attention=AttentionConfig(num_heads=4, num_kv_heads=2, has_output_gate=True, rotary_dim=8),
        ),
    ),
    "experts": case(ONE, decoder=MIXTURE),
    "experts, bf16-mixed": case(ONE, decoder=MIXTURE, precision="bf16-mixed"),
    "experts, block": case(replace(ONE, activation_checkpointing="block"), decoder=MIXTURE),
    "experts, full": case(FULL, decoder=MIXTURE),
    "experts shared by two": case(SHARED_EXPERTS, decoder=MIXTURE),
    "experts shared by two of four": case(Layout("full", 4, 4, expert_parallel=2), decoder=MIXTURE),
    "experts shared by four, their rows sharded by two": case(Layout("full", 8, 8, expert_parallel=4), decoder=MIXTURE),
    "experts shared by two, block": case(replace(SHARED_EXPERTS, activation_checkpointing="block"), decoder=MIXTURE),
    "experts shared by two, bf16-mixed": case(SHARED_EXPERTS, decoder=MIXTURE, precision="bf16-mixed"),
    "experts shared by two, hybrid": case(Layout("hybrid", 4, 2, expert_parallel=2), decoder=MIXTURE),
    "experts shared by two, offload": case(replace(SHARED_EXPERTS, cpu_offload=1.0), decoder=MIXTURE),
    "experts shared by two, half offloaded": case(replace(SHARED_EXPERTS, cpu_offload=0.5), decoder=MIXTURE),
    "full, units of 2, a third offloaded": case(replace(FULL, cpu_offload=0.33, blocks_per_unit=2)),
    "linear": case(ONE, decoder=LINEAR),
    "linear, documents": case(ONE, decoder=LINEAR, has_documents=True),
    "linear, heads alike": case(
        ONE, decoder=replace(LINEAR, linear_attention=GatedDeltaConfig(4, 4, 16, 16, attention_every=2))
    ),
    "linear, block": case(replace(ONE, activation_checkpointing="block"), decoder=LINEAR),
    "linear, bf16-mixed": case(ONE, decoder=LINEAR, precision="bf16-mixed"),
    "linear, a sequence that chunks do not divide": case(ONE, decoder=LINEAR, seq_len=100),
    "linear, full, adapters": case(FULL, decoder=LINEAR, adapter=replace(LORA, exclude=("*.beta", "*.decay"))),
    "linear and experts shared by two": case(
        SHARED_EXPERTS, decoder=replace(MIXTURE, linear_attention=LINEAR.linear_attention)
    ),
    "adapters": case(ONE, adapter=LORA),
    "adapters, bf16-mixed, narrow base": case(ONE, adapter=LORA, base=BASE_FORMATS["bfloat16"], precision="bf16-mixed"),
    "adapters, DoRA": case(ONE, adapter=replace(LORA, dora=True)),
    "adapters, dropout, block": case(
        replace(ONE, activation_checkpointing="block"), adapter=replace(LORA, dropout=0.1)
    ),
    "adapters, full": case(FULL, adapter=LORA),
    "adapters, replicated": case(Layout("replicated", 2), adapter=LORA),
    "adapters of experts": case(ONE, decoder=MIXTURE, adapter=EXPERT_LORA),
    "adapters of experts, down, block": case(
        replace(ONE, activation_checkpointing="block"),
        decoder=MIXTURE,
        adapter=replace(EXPERT_LORA, exclude=("*.gate_up",)),
    ),
    "adapters of experts, narrow base": case(ONE, decoder=MIXTURE, adapter=EXPERT_LORA, base=BASE_FORMATS["bfloat16"]),
    "adapters of experts, bf16-mixed, narrow base": case(
        ONE, decoder=MIXTURE, adapter=EXPERT_LORA, base=BASE_FORMATS["bfloat16"], precision="bf16-mixed"
    ),
    "adapters of experts, full": case(FULL, decoder=MIXTURE, adapter=EXPERT_LORA),
    "adapters of experts shared by two": case(SHARED_EXPERTS, decoder=MIXTURE, adapter=EXPERT_LORA),
    "adapters of experts shared by two, block, bf16-mixed": case(
        replace(SHARED_EXPERTS, activation_checkpointing="block"),
        decoder=MIXTURE,
        adapter=EXPERT_LORA,
        base=BASE_FORMATS["bfloat16"],
        precision="bf16-mixed",
    ),
    "preferences": case(ONE, objective=DPO, adapter=LORA, micro_batch_size=2, global_batch_size=6),
    "replicated, one micro-batch": case(Layout("replicated", 2), global_batch_size=8),
    "full, bf16-mixed": case(FULL, precision="bf16-mixed"),
    "full, one micro-batch": case(FULL, global_batch_size=8),
    "full, four ranks": case(Layout("full", 4, 4)),
    "full, one rank": case(Layout("full", 1, 1)),
    "full, no prefetch": case(replace(FULL, max_gathers_in_flight=1)),
    "full, two blocks a unit": case(replace(FULL, blocks_per_unit=2)),
    "full, kept gathered": case(replace(FULL, keeps_gathered=True)),
    "full, reduced each time": case(replace(FULL, reduces_each=True)),
    "full, untied": case(FULL, decoder=replace(SHAPE, has_tied_embeddings=False)),
    "full, muon": case(FULL, optimizer=Muon()),
    "one device, groups of 3": case(replace(ONE, **GROUPS)),
    "one device, groups of 3, bf16-mixed": case(replace(ONE, **GROUPS), precision="bf16-mixed"),
    "experts, groups of 3": case(replace(ONE, **GROUPS), decoder=MIXTURE),
    "adapters, groups of 3": case(replace(ONE, **GROUPS), adapter=LORA),
    "replicated, groups of 3": case(replace(Layout("replicated", 2), **GROUPS)),
    "full, groups of 3": case(replace(FULL, **GROUPS)),
    "full, units of 2, groups of 4": case(
        replace(FULL, activation_checkpointing="block", blocks_per_recomputation=4, blocks_per_unit=2)
    ),
    "grad_op, groups of 3": case(replace(Layout("grad_op", 2, 2), **GROUPS)),
}
for _layout in (ONE, Layout("replicated", 2), Layout("zero1", 2), FULL, Layout("grad_op", 2, 2), Layout("hybrid", 4, 2),
                replace(FULL, cpu_offload=1.0), replace(FULL, cpu_offload=0.5)):  # fmt: skip
    _policies: tuple[Any, ...] = ("none", "block", 2)
    for _policy in _policies:
        _name = f"{_layout.name}, checkpointing {_policy}"
        CASES[_name] = case(replace(_layout, activation_checkpointing=_policy))


# They prove each strategy, part and policy once; the others prove them together.
_QUICK: Final = (
    "one device",
    "one device, documents",
    "one device, bf16-mixed",
    "one device, muon",
    "one device, gated attention",
    "one device, groups of 3",
    "experts",
    "experts shared by two",
    "linear",
    "adapters",
    "adapters, DoRA",
    "adapters of experts",
    "preferences",
    "full, one micro-batch",
    "full, bf16-mixed",
    "full, no prefetch",
    *(f"{layout.name}, checkpointing block" for layout in (Layout("replicated", 2), Layout("zero1", 2), FULL)),
    *(f"{layout.name}, checkpointing 2" for layout in (Layout("grad_op", 2, 2), Layout("hybrid", 4, 2))),
    f"{replace(FULL, cpu_offload=1.0).name}, checkpointing none",
    f"{replace(FULL, cpu_offload=0.5).name}, checkpointing block",
)


def mark(name: str) -> Any:
    return name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow)


def test_each_quick_case_is_a_case() -> None:
    assert set(_QUICK) <= CASES.keys()


@pytest.mark.parametrize("name", [mark(name) for name in CASES])
def test_the_predicted_peak_is_that_of_the_allocator(name: str) -> None:
    workload, layout = CASES[name]
    timeline = play_step(workload, layout)
    predicted = timeline.peak_bytes
    if layout.cpu_offload:  # here the host is the device; old gradients are freed when a step begins
        predicted += timeline.on_host.total - timeline.on_host.gradients
    tolerance = KERNELS_TOLERANCE if workload.decoder.linear_attention or "experts" in name else TOLERANCE
    tolerance = TENSOR_TOLERANCE if layout.tensor_parallel > 1 else tolerance
    assert predicted == pytest.approx(measure_peak(workload, layout), rel=tolerance)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("rounds", "tensor"), [(1, 1), (2, 1), (1, 2)])
def test_the_predicted_peak_of_a_pipeline_is_that_of_the_rank_that_needs_most(rounds: int, tensor: int) -> None:
    layout = Layout("full", 2 * tensor, tensor, tensor_parallel=tensor, pipeline_parallel=2, stages_per_rank=rounds)
    workload = replace(WORKLOAD, global_batch_size=16)
    peaks = play_step(workload, layout).peaks
    predicted = max(sum(terms.values()) for phase, terms in peaks.items() if phase != "save")
    measured = max(run_ranks(measure_peak, layout.num_ranks, workload, layout))
    assert predicted == pytest.approx(measured, rel=PIPELINE_TOLERANCE if tensor == 1 else TENSOR_TOLERANCE)


def test_a_part_of_somebody_else_is_measured_like_any_other() -> None:
    workload = replace(WORKLOAD, decoder=replace(SHAPE, ffn_dim=None, feed_forward=mixture_part.MixtureConfig(4, 96)))
    assert play_step(workload, ONE).peak_bytes == pytest.approx(measure_peak(workload, ONE), rel=0.01)


class Reader(Dense):
    """A part whose work depends on values."""

    def forward(self, x: torch.Tensor, counted: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        return super().forward(x * x.sum().item())


@dataclass(frozen=True)
class ReaderConfig(FeedForwardConfig):
    """Its options."""

    def build(self, dim: int, layer: int) -> Reader:
        return Reader(dim, dim)


def test_a_part_that_reads_values_is_refused_in_one_line_and_real_kernels_come_back() -> None:
    before = dict(KERNELS)
    with pytest.raises(UserError, match="reads values of tensors in its forward") as caught:
        play_step(replace(WORKLOAD, decoder=replace(SHAPE, ffn_dim=None, feed_forward=ReaderConfig())), ONE)
    assert "\n" not in str(caught.value)
    assert before == KERNELS
    assert kind_of(torch.device("meta")) == "meta"


def test_equal_blocks_are_measured_once_and_others_each() -> None:
    sections = build_sections(replace(WORKLOAD, decoder=LINEAR), build_setting(WORKLOAD, ONE))
    assert len({id(block) for block in sections.blocks}) == 2
    assert sections.blocks[0] is sections.blocks[2]
