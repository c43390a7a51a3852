"""Measures the peak of a training step by torch's own record of allocations, under each strategy, on CPU.

A fake process group stands for the other ranks: its collectives move nothing, but what is allocated for them is real.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from genesis.data.window import MicroBatch
from genesis.model.adapter import attach_adapters
from genesis.model.decoder import Decoder
from genesis.model.mixture import Mixture
from genesis.objectives import DPO, CrossEntropy
from genesis.objectives.objective import TOKENS, Head
from genesis.objectives.preference import ANSWERS, PAIRS
from genesis.objectives.vocabulary import WHOLE, Vocabulary
from genesis.operations.doctor.observe import read_allocated_peak, record_allocations
from genesis.operations.plan.layout import Layout, Workload
from genesis.optim import build_optimizer
from genesis.strategies import Sharded, expert_parallel
from genesis.strategies.expert_parallel import Exchange, Flight
from genesis.strategies.micro_batches import train_in_turn
from genesis.strategies.pipeline import StagedWindow
from genesis.strategies.wrap import ShardOptions, apply_wrappers, set_resharding
from tests.simulated_ranks import cut_decoder

_MAX_PROFILES = 3
AXES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "stages_per_rank")


@contextmanager
def fake_group(num_ranks: int) -> Iterator[None]:
    """Makes this process the first of `num_ranks`."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(workload: Workload, layout: Layout) -> tuple[Decoder, torch.optim.Optimizer, torch.nn.Module, Sharded | None]:
    """Returns decoder, optimizer, DDP's wrapper and the strategy of other axes, built as the strategies build them."""
    torch.manual_seed(0)
    decoder, strategy = build_on_meta(workload, layout)
    decoder.to_empty(device="cpu")
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter.to_local() if isinstance(parameter, DTensor) else parameter, std=0.02)
    optimizer: Any = build_optimizer(decoder, workload.optimizer)
    wrapped: torch.nn.Module = decoder
    if layout.strategy in ("replicated", "zero1") and layout.num_ranks > 1:
        wrapped = DistributedDataParallel(decoder, gradient_as_bucket_view=True, find_unused_parameters=True,
                                          init_sync=False)  # fmt: skip
        wrapped.register_comm_hook(None, _reduce)  # the fake group's own reduction returns nothing
        if layout.strategy == "zero1":
            groups = [dict(group) for group in optimizer.param_groups]
            built = partial(type(optimizer), algorithms=optimizer.algorithms)
            optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=built, **optimizer.defaults)
    return decoder, optimizer, wrapped, strategy


def build_on_meta(workload: Workload, layout: Layout) -> tuple[Decoder, Sharded | None]:
    """Returns the decoder with adapters and wrappers, of which nothing exists in memory."""
    axes = {name: getattr(layout, name) for name in AXES if getattr(layout, name) > 1}
    if axes:
        options = axes | {"activation_checkpointing": layout.activation_checkpointing}
        return cut_decoder(dist.get_rank(), layout.num_ranks, workload.decoder, options)
    with torch.device("meta"):
        decoder = Decoder(workload.decoder)
        if workload.adapter is not None:
            attach_adapters(decoder, workload.adapter, workload.base)
    shard = None
    if layout.is_sharded:
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if workload.precision == "bf16-mixed" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        copies = layout.num_ranks // layout.ranks_per_shard_group
        mesh = (
            init_device_mesh("cpu", (copies, layout.ranks_per_shard_group), mesh_dim_names=("replicate", "shard"))
            if layout.strategy == "hybrid"
            else init_device_mesh("cpu", (layout.num_ranks,))
        )
        experts = None
        if layout.expert_parallel > 1:
            shared = init_device_mesh(
                "cpu", (layout.ranks_per_expert, layout.expert_parallel), mesh_dim_names=("shard", "experts")
            )
            experts = (shared["experts"], shared["shard"])
        shard = ShardOptions(
            mesh=mesh,
            experts=experts,
            reshard_after_forward=layout.strategy != "grad_op",
            blocks_per_unit=layout.blocks_per_unit,
            max_gathers_in_flight=layout.max_gathers_in_flight,
            precision=precision,
            cpu_offload=layout.cpu_offload,
        )
    apply_wrappers(
        decoder,
        layout.activation_checkpointing,
        False,
        shard,
        blocks_per_recomputation=layout.blocks_per_recomputation,
    )
    for mixture in decoder.modules():
        if isinstance(mixture, Mixture) and mixture.exchange is not None:
            mixture.exchange = EvenExchange(mixture.exchange._group, layout.expert_parallel)
    return decoder, None


class EvenExchange(Exchange):
    """An exchange whose collectives move nothing: other ranks send as many rows to each expert as this rank does.

    Args:
        group: A group of ranks.
        num_ranks: Ranks that share the experts.
    """

    def __init__(self, group: dist.ProcessGroup, num_ranks: int) -> None:
        super().__init__(group)
        self._num_ranks = num_ranks

    def send(self, rows: torch.Tensor, counts: torch.Tensor) -> Flight:
        even = torch.full_like(counts.view(self._num_ranks, -1), len(rows) // len(counts))
        even[:, 0] += len(rows) // self._num_ranks - even.sum(1)
        splits = [len(rows) // self._num_ranks] * self._num_ranks
        received = all_to_all_single_autograd(rows.contiguous(), splits, splits, self._group)
        return Flight(received, even, expert_parallel._Splits(splits, splits), self._group)


def _reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def build_window(workload: Workload, num_micro_batches: int) -> list[MicroBatch]:
    """Returns the micro-batches of a window."""
    rows, seq_len = workload.micro_batch_size * workload.rows_per_sequence, workload.seq_len
    windows = []
    for _ in range(num_micro_batches):
        ids = torch.randint(workload.decoder.vocab_size, (rows, seq_len))
        documents = torch.zeros((rows, seq_len), dtype=torch.int32)
        if workload.has_documents:
            documents[:, seq_len // 2 :] = 1
        extra = {}
        if workload.objective is DPO:
            answers = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, seq_len).contiguous()
            extra = {ANSWERS: answers, PAIRS: torch.arange(workload.micro_batch_size)}
        windows.append(MicroBatch(ids, ids.clone(), documents, extra=extra))
    return windows


def measure_peak(workload: Workload, layout: Layout) -> int:
    """Returns the most bytes of the second step, on the host and the device together."""
    count = workload.num_micro_batches(layout)
    has_group = dist.is_initialized()  # of real ranks, of which each measures itself
    with (
        nullcontext()
        if has_group or (layout.num_ranks == 1 and not layout.is_sharded)
        else fake_group(layout.num_ranks)
    ):
        decoder, optimizer, wrapped, strategy = build(workload, layout)
        window = build_window(workload, count)
        if strategy is not None and strategy.pipeline is not None:
            step = partial(train_stages, strategy, decoder, optimizer, window)
        else:
            vocabulary = WHOLE if strategy is None else strategy.vocabulary
            step = partial(train, workload, layout, decoder, optimizer, wrapped, window, vocabulary)
        step()
        if wrapped is decoder:  # the record of allocations would not see that they are freed
            decoder.zero_grad()
        held = _count_held(decoder, optimizer, wrapped, window, strategy)
        return held + measure_allocated_peak(step)


def measure_allocated_peak(step: Callable[[], None]) -> int:
    """Returns the most bytes that torch's CPU allocator gives out at once in a step that can be repeated."""
    # The allocator knows what it gave out under earlier profiles: garbage of those would count as released here.
    gc.collect()
    for _ in range(_MAX_PROFILES):
        with record_allocations() as profiled:
            step()
        peak = read_allocated_peak(profiled)
        if peak is not None:
            return peak
    raise AssertionError(f"torch's profiler recorded no allocation in {_MAX_PROFILES} steps")


def train(
    workload: Workload,
    layout: Layout,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    wrapped: torch.nn.Module,
    window: list[MicroBatch],
    vocabulary: Vocabulary = WHOLE,
) -> None:
    for parameter in decoder.parameters():
        parameter.grad = None
    objective = workload.objective()

    def backward(loss: torch.Tensor, _: None) -> None:
        loss.backward()

    keeps = layout.keeps_gathered and len(window) > 1
    is_mixed = workload.precision == "bf16-mixed" and not layout.is_sharded
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        loss = train_in_turn(
            decoder,
            window,
            objective,
            {TOKENS: 1.0, PAIRS: 1.0},
            vocabulary=vocabulary,
            backward=backward,
            gradient_reduction="micro_batch" if layout.reduces_each else "window",
            set_gathering=partial(_set_gathering, decoder) if keeps else None,
        ).to_backward
        if keeps:
            set_resharding(decoder, after_forward=layout.strategy != "grad_op", after_backward=True)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.reducer.prepare_for_backward([loss])
    loss.backward()
    optimizer.step()


def train_stages(
    strategy: Sharded, decoder: Decoder, optimizer: torch.optim.Optimizer, window: list[MicroBatch]
) -> None:
    """Trains the stages of the first rank of a pipeline, whose neighbours the fake group stands for."""
    for parameter in decoder.parameters():
        parameter.grad = None
    forward = strategy.precision_plugin.forward_context
    assert strategy.pipeline is not None
    objective, vocabulary, scales = CrossEntropy(), strategy.vocabulary, {TOKENS: 1.0}

    def build_head(micro_batch: MicroBatch) -> Head:
        return objective.head(micro_batch, vocabulary)

    strategy.pipeline.train(StagedWindow(window, build_head, forward, scales=scales, is_training=True))
    optimizer.step()


def _set_gathering(decoder: Decoder, is_last: bool) -> None:
    set_resharding(decoder, after_forward=False, after_backward=is_last)


def _count_held(decoder: Any, optimizer: Any, wrapped: Any, window: list[MicroBatch], strategy: Any) -> int:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    states = [value for state in inner.state.values() for value in state.values()]
    tensors = [*decoder.parameters(), *(parameter.grad for parameter in decoder.parameters()), *states]
    tensors += [tensor for micro in window for tensor in (micro.input_ids, micro.labels, micro.document_ids)]
    if strategy is not None and strategy.pipeline is not None:  # a schedule keeps what it receives into
        gc.collect()
        tensors += [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu"]
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())
