"""Whether a layout fits into a device's memory, and the smallest changes that make it fit.

A change is one of: a smaller micro-batch, recomputed activations, gradients that stay sharded, another strategy,
offload, 16-bit products, adapters. All sets of up to three changes are tried; sets that contain another fitting set are
left out, and what remains is ordered by its estimated step time. What changes the result of training comes last.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from genesis.base.errors import UserError
from genesis.model.adapter import BASE_FORMATS, AdapterConfig
from genesis.operations.plan.bandwidths import Bandwidths
from genesis.operations.plan.layout import SHARDED, Checkpointing, Layout, Strategy, Workload
from genesis.operations.plan.speed import Rate, time_step
from genesis.operations.plan.timeline import Timeline, play_step

_MOST_CHANGES = 3
_MOST_REMEDIES = 3


@dataclass(frozen=True)
class Budget:
    """The memory of a device.

    Args:
        memory_bytes: All of it; None for any amount.
        workspace_bytes: What the driver, libraries of kernels and communicators take beside tensors.
        margin_share: Share of the tensors' peak that fragmentation of the allocator may take.
    """

    memory_bytes: int | None
    workspace_bytes: int
    margin_share: float

    def needed(self, peak_bytes: int) -> int:
        """Returns the memory that a device must have."""
        return peak_bytes + self.workspace_bytes + round(peak_bytes * self.margin_share)

    def fits(self, peak_bytes: int) -> bool:
        """Returns whether the device's memory is enough."""
        return self.memory_bytes is None or self.needed(peak_bytes) <= self.memory_bytes


@dataclass(frozen=True)
class Remedy:
    """Changes that make a layout fit.

    Args:
        changes: The options to set, as texts.
        workload: With these changes.
        layout: With these changes.
        needed_bytes: Memory that a device must then have.
        step_seconds: Estimated time of a step.
        slowdown: That time over the time of the layout as it was.
        changes_result: Whether the changes alter what is learned.
    """

    changes: tuple[str, ...]
    workload: Workload
    layout: Layout
    needed_bytes: int
    step_seconds: float
    slowdown: float
    changes_result: bool


@dataclass(frozen=True)
class _Change:
    kind: str
    text: str
    apply: Callable[[Workload, Layout], tuple[Workload, Layout]]
    changes_result: bool = False


def list_layouts(own: Layout, num_ranks: int) -> list[Layout]:
    """Returns the layouts of a number of ranks under every strategy, with the recipe's other options."""
    if num_ranks == 1:
        names: tuple[Strategy, ...] = ("one device",)
    else:
        names = ("replicated", "zero1", "full", "grad_op")
        if own.strategy == "hybrid" and num_ranks % own.ranks_per_shard_group == 0 and num_ranks > 2:
            names = (*names, "hybrid")
    layouts = [_place(own, name, num_ranks) for name in names]
    offloaded = _place(own, "full", num_ranks)
    return [
        *layouts,
        replace(offloaded, cpu_offload=own.cpu_offload or 1.0, optimizer_offload=0.0),
    ]


def _place(own: Layout, name: Strategy, num_ranks: int) -> Layout:
    group = num_ranks if name in ("full", "grad_op") else own.ranks_per_shard_group if name == "hybrid" else 1
    is_sharded = name in SHARDED
    return replace(
        own,
        strategy=name,
        num_ranks=num_ranks,
        ranks_per_shard_group=group,
        cpu_offload=0.0,
        expert_parallel=own.expert_parallel if is_sharded else 1,
        tensor_parallel=1,
        context_parallel=1,
        pipeline_parallel=1,
        stages_per_rank=1,
        layers_per_stage=None,
        keeps_gathered=own.keeps_gathered and is_sharded,
        reduces_each=own.reduces_each and is_sharded,
    )


def find_remedies(
    workload: Workload, layout: Layout, budget: Budget, rate: Rate, bandwidths: Bandwidths
) -> list[Remedy]:
    """Returns the smallest sets of changes that make a layout fit, the quickest first; empty if none does.

    Of sets that change the same options by different amounts the quickest is returned.
    """
    before = time_step(workload, layout, rate, bandwidths).seconds
    found: dict[frozenset[str], Remedy] = {}
    fitting: list[frozenset[str]] = []
    for changes in _list_sets(workload, layout):
        texts = frozenset(change.text for change in changes)
        if any(known <= texts for known in fitting):
            continue
        changed, placed = workload, layout
        for change in changes:
            changed, placed = change.apply(changed, placed)
        try:
            timeline: Timeline = play_step(changed, placed)
        except UserError:  # adapters that the decoder cannot have
            continue
        if not budget.fits(timeline.peak_bytes):
            continue
        fitting.append(texts)
        seconds = time_step(changed, placed, rate, bandwidths).seconds
        remedy = Remedy(
            tuple(change.text for change in changes),
            changed,
            placed,
            budget.needed(timeline.peak_bytes),
            seconds,
            seconds / before,
            any(change.changes_result for change in changes),
        )
        kinds = frozenset(change.kind for change in changes)
        if kinds not in found or seconds < found[kinds].step_seconds:
            found[kinds] = remedy
    in_order = sorted(found.values(), key=lambda one: (one.changes_result, round(one.slowdown, 2), len(one.changes)))
    return in_order[:_MOST_REMEDIES]


def _list_sets(workload: Workload, layout: Layout) -> Iterator[tuple[_Change, ...]]:
    """Yields sets of changes, the smallest first, with one change of a kind."""
    by_kind: dict[str, list[_Change]] = {}
    for change in _list_changes(workload, layout):
        by_kind.setdefault(change.kind, []).append(change)
    for size in range(1, _MOST_CHANGES + 1):
        for kinds in combinations(by_kind, size):
            yield from product(*(by_kind[kind] for kind in kinds))


def _list_changes(workload: Workload, layout: Layout) -> Iterator[_Change]:
    for size in (workload.micro_batch_size // 2, workload.micro_batch_size // 4, 1):
        if 1 <= size < workload.micro_batch_size and workload.micro_batch_size % size == 0:
            yield _Change("micro-batch", f"data.micro_batch_size {size}", _with_micro_batch(size))
    if layout.activation_checkpointing != "block":
        if layout.activation_checkpointing == "none":
            yield _Change("checkpointing", "activation_checkpointing 2", _with_checkpointing(2))
        yield _Change("checkpointing", "activation_checkpointing block", _with_checkpointing("block"))
    if layout.is_sharded and not layout.reduces_each and workload.num_micro_batches(layout) > 1:
        yield _Change("reduction", "gradient_reduction micro_batch", _with_reduction)
    if layout.data_ranks > 1 and layout.strategy != "full":
        yield _Change("strategy", "shard full", _with_full)
    yield from _list_offloads(layout)
    if workload.precision == "32-true" and not workload.is_cpu:
        yield _Change("precision", "trainer.precision bf16-mixed", _with_bfloat16, changes_result=True)
    if workload.adapter is None and workload.objective.learns_from != "prompts":
        yield _Change("adapters", "model.adapter.rank 16, base in bfloat16", _with_adapter, changes_result=True)


def _list_offloads(layout: Layout) -> list[_Change]:
    shares = [share for share in (0.5, 1.0) if share > layout.cpu_offload]
    # The strategy takes only one of them.
    other = ", optimizer_offload 0" if layout.optimizer_offload else ""
    return [_Change("offload", f"shard full, cpu_offload {share:g}{other}", _with_offload(share)) for share in shares]


def _with_micro_batch(size: int) -> Callable[[Workload, Layout], tuple[Workload, Layout]]:
    return lambda workload, layout: (replace(workload, micro_batch_size=size), layout)


def _with_checkpointing(which: Checkpointing) -> Callable[[Workload, Layout], tuple[Workload, Layout]]:
    return lambda workload, layout: (workload, replace(layout, activation_checkpointing=which))


def _with_reduction(workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
    return workload, replace(layout, reduces_each=True)


def _with_full(workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
    per_stage = layout.num_ranks // layout.pipeline_parallel
    return workload, replace(layout, strategy="full", ranks_per_shard_group=per_stage)


def _with_offload(share: float) -> Callable[[Workload, Layout], tuple[Workload, Layout]]:
    def apply(workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
        group = layout.ranks_per_shard_group if layout.is_sharded else layout.num_ranks
        name: Strategy = layout.strategy if layout.is_sharded else "full"
        offloaded = replace(layout, cpu_offload=share, optimizer_offload=0.0)
        return workload, replace(offloaded, strategy=name, ranks_per_shard_group=group)

    return apply


def _with_bfloat16(workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
    return replace(workload, precision="bf16-mixed"), layout


def _with_adapter(workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
    return replace(workload, adapter=AdapterConfig(rank=16), base=BASE_FORMATS["bfloat16"]), layout
