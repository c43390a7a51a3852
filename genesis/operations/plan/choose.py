"""Chooses how a number of devices shares a model: every layout that fits, its step time, and why the best one is best.

The reason is counterfactual: without each thing that the chosen layout has, either nothing fits, or a step takes
longer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from genesis.base.errors import UserError, numbered
from genesis.operations.plan.axes import is_in_node
from genesis.operations.plan.bandwidths import Bandwidths
from genesis.operations.plan.layout import FLOAT32_BYTES, HALF_BYTES, Checkpointing, Layout, Strategy, Workload
from genesis.operations.plan.remedies import Budget, list_layouts
from genesis.operations.plan.speed import Rate, StepTime, time_step
from genesis.operations.plan.timeline import Timeline, play_step

_MOST_LISTED: Final = 5
_KEPT: Final = (
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "stages_per_rank",
    "expert_parallel",
    "optimizer_offload",
)
_DTYPES: Final = {FLOAT32_BYTES: "float32", HALF_BYTES: "bfloat16"}
_RECOMPUTED: Final[tuple[Checkpointing, ...]] = ("none", "block")
_MOST_STAGES_PER_RANK: Final = 2
_MOST_SEQUENCES: Final = 8
"""Of a micro-batch: larger ones seldom make products quicker."""
_MOST_CONTEXT: Final = 8
_LEAST_CONTEXT_TOKENS: Final = 8192
"""Tokens of a row that a rank of context parallelism keeps: a shorter share is not worth its exchanges."""
_EQUAL: Final = 1.03
"""Of layouts whose step times differ by less than this factor, the estimate does not know the quickest: the simplest
one is chosen."""


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Args:
        workload: What is trained; only the size of its micro-batches may differ from the recipe's.
        layout: How it is spread.
        timeline: Its memory.
        needed_bytes: Memory that a device must have.
        step: The time of a step.
        num_nodes: Nodes of the devices.
    """

    workload: Workload
    layout: Layout
    timeline: Timeline
    needed_bytes: int
    step: StepTime
    num_nodes: int

    @property
    def complexity(self) -> int:
        """How much somebody has to know to run it; another axis counts twice."""
        return sum(has(self.layout) * (2 if name in _AXES else 1) for name, has in _FEATURES.items())

    @property
    def options(self) -> dict[str, object]:
        """The options of a recipe that make it, as `genesis fit` takes them."""
        layout, usual = self.layout, Layout()
        found: dict[str, object] = {"data.micro_batch_size": self.workload.micro_batch_size}
        if self.num_nodes > 1:
            found["trainer.num_nodes"] = self.num_nodes
        found["trainer.devices"] = layout.num_ranks // self.num_nodes
        if layout.is_sharded or layout.num_ranks > 1:
            found["trainer.strategy"] = f"genesis.strategies.{'Sharded' if layout.is_sharded else 'Replicated'}"
        if layout.is_sharded:
            found["trainer.strategy.shard"] = layout.strategy
        if layout.strategy == "hybrid":
            found["trainer.strategy.ranks_per_shard_group"] = layout.ranks_per_shard_group
        if layout.strategy == "zero1":
            found["trainer.strategy.optimizer_states"] = "sharded"
        # A class that is given again has the defaults of its other options.
        kept = {name: getattr(layout, name) for name in _KEPT if getattr(layout, name) != getattr(usual, name)}
        kept["activation_checkpointing"] = layout.activation_checkpointing
        kept |= {"compile_blocks": "true"} if layout.has_compiled_blocks else {}
        if layout.is_sharded:
            kept |= {} if layout.gather_bytes is None else {"gather_dtype": _DTYPES[layout.gather_bytes]}
            kept |= {} if layout.reduce_bytes == usual.reduce_bytes else {"reduce_dtype": _DTYPES[layout.reduce_bytes]}
            kept |= {"gradient_reduction": "micro_batch"} if layout.reduces_each else {}
        return found | {f"trainer.strategy.{name}": value for name, value in kept.items()}


@dataclass(frozen=True)
class Recommendation:
    """The layouts that fit, and the one to take.

    Args:
        choices: The best ones, the recommended one first.
        num_tried: Layouts that were tried.
        reasons: Why the recommended one has what it has.
        warnings: What to know of it.
        least_needed: If none fits, the least memory that a device must have.
    """

    choices: tuple[Choice, ...]
    num_tried: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    least_needed: int


_FEATURES: Final[dict[str, Callable[[Layout], bool]]] = {
    "sharded parameters": lambda layout: layout.is_sharded,
    "groups of shards": lambda layout: layout.strategy == "hybrid",
    "recomputed blocks": lambda layout: layout.activation_checkpointing != "none",
    "tensor parallelism": lambda layout: layout.tensor_parallel > 1,
    "context parallelism": lambda layout: layout.context_parallel > 1,
    "a pipeline": lambda layout: layout.pipeline_parallel > 1,
    "several stages a rank": lambda layout: layout.stages_per_rank > 1,
}
"""What a layout may have, by the words of a reason."""
_AXES: Final = ("tensor parallelism", "context parallelism", "a pipeline")


def recommend(
    workload: Workload, own: Layout, num_ranks: int, budget: Budget, rate: Rate, bandwidths: Bandwidths
) -> Recommendation:
    """Returns the layouts of a number of devices that fit, the recommended one first.

    Args:
        workload: What is trained.
        own: The recipe's layout, whose other options stay.
        num_ranks: The number of devices.
        budget: The memory of each.
        rate: The rate of each.
        bandwidths: What moves how fast.
    """
    tried = [
        choice
        for layout in _list_candidates(workload, own, num_ranks, bandwidths)
        for choice in _try_sizes(workload, layout, budget, rate, bandwidths)
    ]
    fitting = [one for one in tried if budget.fits(one.timeline.peak_bytes)]
    least = min((one.needed_bytes for one in tried), default=0)
    if not fitting:
        return Recommendation((), len(tried), (), (), least)
    quickest = min(one.step.seconds for one in fitting)
    equal = [one for one in fitting if one.step.seconds <= quickest * _EQUAL]
    best = min(equal, key=lambda one: (one.complexity, one.step.seconds))
    others = sorted((one for one in fitting if one is not best), key=lambda one: one.step.seconds)
    listed = [best]
    for one in others:  # of layouts that differ in the size of micro-batches the quickest
        if len(listed) < _MOST_LISTED and all(one.layout != known.layout for known in listed):
            listed.append(one)
    reasons = tuple(_explain(best, tried, budget))
    alone = time_alone(workload, own, budget, rate, bandwidths)
    return Recommendation(tuple(listed), len(tried), reasons, tuple(_warn(best, alone, bandwidths)), least)


def _try_sizes(
    workload: Workload, layout: Layout, budget: Budget, rate: Rate, bandwidths: Bandwidths
) -> Iterator[Choice]:
    """Yields a layout with micro-batches from the smallest on, up to the first that does not fit."""
    for size in sorted({*_powers_of_two(_MOST_SEQUENCES), workload.micro_batch_size}):
        changed = replace(workload, micro_batch_size=size)
        try:
            timeline = play_step(changed, layout)
        except UserError:  # numbers that do not divide each other
            continue
        step = time_step(changed, layout, rate, bandwidths)
        nodes = -(-layout.num_ranks // bandwidths.devices_per_node)
        yield Choice(changed, layout, timeline, budget.needed(timeline.peak_bytes), step, nodes)
        if not budget.fits(timeline.peak_bytes):
            return


def _list_candidates(workload: Workload, own: Layout, num_ranks: int, bandwidths: Bandwidths) -> Iterator[Layout]:
    """Yields layouts that are worth a try."""
    decoder = workload.decoder
    contexts = [
        degree for degree in _powers_of_two(_MOST_CONTEXT) if workload.seq_len // degree >= _LEAST_CONTEXT_TOKENS
    ]
    stages = [degree for degree in range(1, min(num_ranks, decoder.num_layers) + 1) if num_ranks % degree == 0]
    tensors = _powers_of_two(min(num_ranks, bandwidths.devices_per_node))
    for tensor, context, pipeline in product(tensors, contexts or [1], stages):
        per_stage, rest = divmod(num_ranks, pipeline)
        if rest or per_stage % (tensor * context):
            continue
        for strategy, group in _list_strategies(per_stage, tensor * context, bandwidths):
            is_alone = tensor * context * pipeline == 1
            if strategy not in ("full", "hybrid") and not is_alone:
                continue
            for recomputed, rounds in product(_RECOMPUTED, range(1, _MOST_STAGES_PER_RANK + 1)):
                if rounds > 1 and (pipeline == 1 or pipeline * rounds > decoder.num_layers):
                    continue
                yield replace(
                    own,
                    strategy=strategy,
                    num_ranks=num_ranks,
                    ranks_per_shard_group=group,
                    tensor_parallel=tensor,
                    context_parallel=context,
                    pipeline_parallel=pipeline,
                    stages_per_rank=rounds,
                    layers_per_stage=None,
                    activation_checkpointing=recomputed,
                    blocks_per_recomputation=1,
                    blocks_per_unit=1,
                    max_gathers_in_flight=2,
                    activation_offload=False,
                    cpu_offload=0.0,
                    keeps_gathered=False,
                    expert_parallel=own.expert_parallel if group > 1 else 1,
                )


def _list_strategies(per_stage: int, shared: int, bandwidths: Bandwidths) -> Iterator[tuple[Strategy, int]]:
    """Yields strategies and the size of their shard groups."""
    if per_stage == 1:
        yield ("one device" if shared == 1 else "full"), 1
        return
    yield "replicated", 1
    yield "full", per_stage
    node = bandwidths.devices_per_node
    if per_stage > node and per_stage % node == 0 and node % shared == 0:
        yield "hybrid", node


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _explain(best: Choice, tried: list[Choice], budget: Budget) -> Iterator[str]:
    """Yields a reason for each thing that the layout has: what would be without it."""
    for name, has in _FEATURES.items():
        if not has(best.layout):
            continue
        without = [one for one in tried if not has(one.layout)]
        fitting = [one for one in without if budget.fits(one.timeline.peak_bytes)]
        if fitting:
            other = min(fitting, key=lambda one: one.step.seconds)
            factor = other.step.seconds / best.step.seconds
            if factor > _EQUAL:
                yield f"{name}: a step takes {factor:.2f} times as long without, by {other.layout.name}"
            else:
                yield f"{name}: simpler than {other.layout.name}, which takes {factor:.2f} times as long"
        elif without:
            least = min(one.needed_bytes for one in without)
            yield f"{name}: without, a device needs at least {least / 1e9:,.1f} GB"
    if not any(has(best.layout) for has in _FEATURES.values()):
        yield "the model fits whole on each device, and copies of it communicate least"


def time_alone(workload: Workload, own: Layout, budget: Budget, rate: Rate, bandwidths: Bandwidths) -> float | None:
    """Returns the tokens per second of one device alone; None if the model does not fit on it."""
    found = []
    for recomputed in _RECOMPUTED:
        layout = replace(list_layouts(own, 1)[0], activation_checkpointing=recomputed)
        if budget.fits(play_step(workload, layout).peak_bytes):
            found.append(time_step(workload, layout, rate, bandwidths).tokens_per_second)
    return max(found, default=None)


def warn_of_axes(layout: Layout, bandwidths: Bandwidths) -> Iterator[str]:
    """Yields a warning for each axis that communicates in every layer, and crosses nodes."""
    for name in ("tensor", "context"):
        if not is_in_node(name, layout, bandwidths):
            yield (
                f"{name} parallelism crosses nodes of {bandwidths.devices_per_node} devices, and communicates in every "
                "layer over the network: lower its degree to what a node has"
            )


def _warn(best: Choice, alone: float | None, bandwidths: Bandwidths) -> Iterator[str]:
    yield from warn_of_axes(best.layout, bandwidths)
    together, num_ranks = best.step.tokens_per_second, best.layout.num_ranks
    if alone is not None and num_ranks > 1 and alone * num_ranks > together * _WORTH:
        yield (
            f"independent runs on the {numbered(num_ranks, 'devices')}, such as a sweep or several models, train "
            f"{alone * num_ranks / together:.1f} times as many tokens in all: the link is slow for one run"
        )


_WORTH: Final = 1.5
"""So many times as many tokens of independent runs are worth a word."""
