"""Groups of blocks that are recomputed together: the gradients are those without recomputation, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from genesis.base.errors import UserError
from genesis.model.adapter import AdapterConfig, attach_adapters
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.recomputation import check_groups
from genesis.objectives import CrossEntropy
from genesis.objectives.objective import TOKENS
from genesis.objectives.vocabulary import WHOLE
from genesis.optim.transfers import Traffic
from genesis.strategies.activation_offload import ActivationOffload
from genesis.strategies.degrees import Degrees
from genesis.strategies.mesh import WorldMesh
from genesis.strategies.micro_batches import train_in_turn
from genesis.strategies.wrap import ShardOptions, apply_wrappers
from genesis_callbacks.testing import run_ranks
from tests.fakecuda.compiler import find_compiler
from tests.train.support import SEQ_LEN, TINY, whole, window_of_rank

# Five blocks, so that the last group of three is smaller.
DENSE = replace(TINY, num_layers=5, dropout=0.1)
MIXED = replace(
    DENSE,
    ffn_dim=None,
    feed_forward=MixtureConfig(
        num_experts=4, top_k=2, ffn_dim=16, shared_ffn_dim=16, scores="sigmoid", balance_loss=0.1, z_loss=0.1
    ),
)
LINEAR = replace(
    MIXED,
    linear_attention=GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, attention_every=3),
)
ADAPTERS = AdapterConfig(rank=4, dropout=0.1)
GROUPS = {"activation_checkpointing": "block", "blocks_per_recomputation": 3}


def gradients_of(
    shape: DecoderConfig,
    adapter: AdapterConfig | None = None,
    shard: dict[str, Any] | None = None,
    expert_parallel: int = 1,
    traffic: Traffic | None = None,
    **wrappers: Any,
) -> dict[str, Tensor]:
    """Returns the whole gradients of two micro-batches, or of each rank's under FSDP2."""
    with torch.device("meta"):
        decoder = Decoder(shape)
        if adapter is not None:
            attach_adapters(decoder, adapter)
    options = None
    if shard is not None:
        mesh = WorldMesh(Degrees(ep=expert_parallel).resolve(dist.get_world_size()), "cpu")
        defaults: dict[str, Any] = {
            "mesh": mesh.shard,
            "reshard_after_forward": True,
            "blocks_per_unit": 1,
            "max_gathers_in_flight": 2,
            "precision": MixedPrecisionPolicy(cast_forward_inputs=False),
            "cpu_offload": 0.0,
            "experts": (mesh.experts, mesh.expert_shard) if expert_parallel > 1 else None,
        }
        options = ShardOptions(**(defaults | shard))
    offload = None if traffic is None else ActivationOffload(traffic)
    apply_wrappers(decoder, shard=options, offload=offload, **wrappers)
    decoder.to_empty(device="cpu")
    decoder.init_weights(0)
    torch.manual_seed(1)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if shard is not None else (0, 4)
    window = window_of_rank(0, rank, world_size)
    loss = train_in_turn(
        decoder,
        window.micro_batches[:2],
        CrossEntropy(),
        {TOKENS: 0.1},
        vocabulary=WHOLE,
        backward=lambda scaled, _: scaled.backward(),
    )
    loss.to_backward.backward()
    return {name: whole(p.grad) for name, p in decoder.named_parameters() if p.grad is not None}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert any(float(gradient.abs().max()) > 0 for gradient in one.values())


@pytest.mark.parametrize(
    ("shape", "adapter"),
    [
        pytest.param(MIXED, None, id="experts"),
        pytest.param(DENSE, None, id="dense", marks=pytest.mark.slow),
        pytest.param(LINEAR, None, id="linear_attention", marks=[pytest.mark.slow, pytest.mark.each]),
        pytest.param(DENSE, ADAPTERS, id="adapters", marks=[pytest.mark.slow, pytest.mark.each]),
    ],
)
def test_gradients_with_groups_are_those_without_recomputation(
    shape: DecoderConfig, adapter: AdapterConfig | None
) -> None:
    plain = gradients_of(shape, adapter)
    assert_equal(plain, gradients_of(shape, adapter, **GROUPS))
    assert_equal(plain, gradients_of(shape, adapter, activation_checkpointing="block", blocks_per_recomputation=9))


@pytest.mark.parametrize("blocks_per_group", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_inputs_of_recomputed_blocks_in_host_memory_change_no_gradient(blocks_per_group: int) -> None:
    traffic = Traffic()
    offloaded = gradients_of(
        LINEAR, traffic=traffic, activation_checkpointing="block", blocks_per_recomputation=blocks_per_group
    )
    assert_equal(gradients_of(LINEAR), offloaded)
    moved = traffic.take()
    # Two micro-batches of one row; the input that was moved last is still on the device when its backward begins.
    num_groups, num_bytes = -(-LINEAR.num_layers // blocks_per_group), SEQ_LEN * LINEAR.dim * 4
    assert moved.to_host_bytes == 2 * num_groups * num_bytes
    assert moved.to_device_bytes == 2 * (num_groups - 1) * num_bytes
    assert moved.idle_seconds > 0.0


SHARDS: dict[str, tuple[DecoderConfig, dict[str, Any]]] = {
    "full": (LINEAR, {"shard": {}}),
    "units of three": (MIXED, {"shard": {"blocks_per_unit": 3}}),
    "many prefetches": (DENSE, {"shard": {"max_gathers_in_flight": 4}}),
    "no prefetch": (DENSE, {"shard": {"max_gathers_in_flight": 1}}),
    "not freed": (MIXED, {"shard": {"reshard_after_forward": False}}),
    "in host memory": (DENSE, {"shard": {"cpu_offload": 1.0}}),
    "shared experts": (LINEAR, {"shard": {}, "expert_parallel": 2}),
    "adapters": (DENSE, {"shard": {}, "adapter": ADAPTERS}),
}


QUICK_SHARDS = ("units of three", "adapters")


def compare_shards(names: Sequence[str]) -> list[str]:
    wrong = []
    for name in names:
        shape, options = SHARDS[name]
        plain, grouped = gradients_of(shape, **options), gradients_of(shape, **options, **GROUPS)
        moved = gradients_of(shape, **options, **GROUPS, traffic=Traffic())
        if not plain or any(not torch.equal(plain[key], other[key]) for key in plain for other in (grouped, moved)):
            wrong.append(name)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK_SHARDS, id="quick"),
        pytest.param([name for name in SHARDS if name not in QUICK_SHARDS], id="others", marks=pytest.mark.slow),
    ],
)
def test_gradients_with_groups_are_those_without_under_every_form_of_sharding(names: Sequence[str]) -> None:
    assert run_ranks(compare_shards, 2, names) == [[], []]


def compare_compiled(name: str) -> bool:
    shape, options = {"alone": (DENSE, {}), **SHARDS}[name]
    plain = gradients_of(shape, **options, has_compiled_blocks=True)
    grouped = gradients_of(shape, **options, has_compiled_blocks=True, **GROUPS)
    return bool(plain) and all(torch.equal(plain[key], grouped[key]) for key in plain)


@pytest.mark.slow
@pytest.mark.early
@pytest.mark.timeout(300)  # each shape is compiled twice
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("name", ["alone", "shared experts", "full"])
def test_gradients_with_groups_of_compiled_blocks_are_those_without(name: str) -> None:
    find_compiler()
    assert run_ranks(compare_compiled, 2, name, timeout_seconds=280) == [True, True]


# ---- what is kept, run and gathered


def count_runs(decoder: Decoder) -> list[int]:
    runs: list[int] = []
    for index, block in enumerate(decoder.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    return runs


def test_each_block_runs_twice_and_only_the_inputs_of_groups_are_kept() -> None:
    decoder = Decoder(replace(TINY, num_layers=5))
    decoder.init_weights(0)
    apply_wrappers(decoder, **GROUPS)  # type: ignore[arg-type]  # the options by name
    runs = count_runs(decoder)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = decoder(torch.arange(16)[None] % 61, head=lambda hidden, weight: hidden.sum())
    streams = [tensor for tensor in kept if tensor.shape == (1, 16, 32)]
    assert len(streams) <= 3  # the inputs of two groups, and that of the last norm
    loss.backward()
    assert runs == [0, 1, 2, 3, 4, 3, 4, 0, 1, 2]


def list_gathers() -> list[tuple[str, int]]:
    """Returns the units in the order of their gathers, and whether it was for a forward (0) or in the backward (1)."""
    found: list[tuple[str, int]] = []
    phase = [0]
    original = FSDPParamGroup.unshard

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        if not self.is_unsharded and self._all_gather_result is None:
            found.append((str(self._module_fqn), phase[0]))
        return original(self, *arguments, **options)

    FSDPParamGroup.unshard = watched  # type: ignore[method-assign]
    mesh = WorldMesh(Degrees().resolve(dist.get_world_size()), "cpu")
    options = ShardOptions(
        mesh=mesh.shard,
        reshard_after_forward=True,
        blocks_per_unit=1,
        max_gathers_in_flight=3,
        precision=MixedPrecisionPolicy(cast_forward_inputs=False),
        cpu_offload=0.0,
    )
    decoder = Decoder(replace(TINY, num_layers=6))
    apply_wrappers(decoder, shard=options, **GROUPS)  # type: ignore[arg-type]  # the options by name
    decoder.init_weights(0)
    loss = decoder(torch.arange(16)[None] % 61, head=lambda hidden, weight: hidden.sum())
    phase[0] = 1
    loss.backward()
    return found


def test_the_backward_gathers_each_unit_once() -> None:
    for found in run_ranks(list_gathers, 2):
        in_backward = [name for name, phase in found if phase and "blocks" in name]
        assert sorted(in_backward) == [f"blocks.{index}" for index in range(6)]


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("block", 0), "blocks_per_recomputation is 0; it must be a whole number >= 1"),
        (("none", 3), "blocks_per_recomputation is 3, and activation_checkpointing is 'none': groups"),
        ((2, 3), "blocks_per_recomputation is 3, and activation_checkpointing is 2: groups"),
        (("block", 3, 2), "blocks_per_recomputation 3 is no multiple of blocks_per_unit 2: a unit"),
    ],
)
def test_groups_that_cannot_be_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_groups(*arguments)


@pytest.mark.parametrize("which", ["none", 2])
def test_only_inputs_of_recomputed_blocks_can_be_moved(which: Any) -> None:
    with pytest.raises(UserError, match="activation_offload is true, and activation_checkpointing is"):
        check_groups(which, 1, has_offload=True)
    with pytest.raises(UserError, match="blocks_per_recomputation 1 is no multiple of blocks_per_unit 2"):
        check_groups("block", 1, 2, has_offload=True)
