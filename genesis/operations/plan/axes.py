"""What tensor, context and pipeline parallelism divide, and the time that they add to a step.

Ranks are numbered as `genesis.strategies.degrees` has them: tensor parallelism innermost, pipeline outermost. An axis
whose ranks lie in one node uses the node's link, any other the network.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from genesis.model.decoder import DecoderConfig
from genesis.model.stages import count_operations, divide_layers
from genesis.operations.plan.bandwidths import Bandwidths, Link
from genesis.operations.plan.layout import Layout, Workload, product_bytes
from genesis.operations.plan.state import Parameter, build_shared_model

_ENTRY_AND_EXIT: Final = 2
"""Collectives around a part that tensor parallelism cuts: rows are gathered before it and summed after it."""


@dataclass(frozen=True)
class AxisTimes:
    """Seconds of a step that nothing hides, by axis.

    Args:
        tensor: Gathers and sums of rows around each part of a block.
        context: Exchanges of heads for tokens around each mixer.
        pipeline: Transfers of the stream between stages.
        bubble: Waiting for the first and the last micro-batch.
        imbalance: Waiting for the stage with the most work.
    """

    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    imbalance: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.tensor + self.context + self.pipeline + self.bubble + self.imbalance


def find_strides(layout: Layout) -> dict[str, tuple[int, int]]:
    """Returns the distance between neighbours on each axis, and their number, for axes of several ranks."""
    tensor, context, shards = layout.tensor_parallel, layout.context_parallel, layout.ranks_per_shard_group
    per_stage = layout.num_ranks // layout.pipeline_parallel
    found = {
        "tensor": (1, tensor),
        "context": (tensor, context),
        # What tensor and context parallelism do not cut is sharded over their ranks as well.
        "shards": (1, shards if layout.is_sharded else 1),
        "copies": (shards if layout.is_sharded else 1, per_stage // (shards if layout.is_sharded else 1)),
        "experts": (1, layout.expert_parallel),
        "pipeline": (per_stage, layout.pipeline_parallel),
    }
    return {name: place for name, place in found.items() if place[1] > 1}


def is_in_node(axis: str, layout: Layout, bandwidths: Bandwidths) -> bool:
    """Returns whether the ranks that communicate along an axis lie in one node."""
    stride, num_ranks = find_strides(layout).get(axis, (1, 1))
    span, per_node = stride * num_ranks, bandwidths.devices_per_node
    return layout.num_ranks <= per_node or (span <= per_node and per_node % span == 0)


def find_link(axis: str, layout: Layout, bandwidths: Bandwidths) -> Link:
    """Returns the link of the ranks that communicate along an axis."""
    return bandwidths.link(is_in_node=is_in_node(axis, layout, bandwidths))


def time_axes(workload: Workload, layout: Layout, bandwidths: Bandwidths, compute: float, passes: float) -> AxisTimes:
    """Returns the seconds that the axes beside data parallelism add to a step.

    Args:
        workload: What is trained.
        layout: How it is spread.
        bandwidths: What moves how fast.
        compute: The seconds of a rank's products, if all stages had as many.
        passes: How often a block runs for a micro-batch: forward, backward, and forward again where it is recomputed.
    """
    tensor, context, stages = layout.tensor_parallel, layout.context_parallel, layout.pipeline_parallel
    if tensor * context * stages == 1:
        return AxisTimes()
    decoder, element = workload.decoder, product_bytes(workload, layout)
    num_micro_batches = workload.num_micro_batches(layout)
    tokens = workload.micro_batch_size * workload.rows_per_sequence * workload.seq_len
    of_stage = num_micro_batches * passes / stages
    stream = tokens * decoder.dim * element
    found = {}
    if tensor > 1:
        link = find_link("tensor", layout, bandwidths)
        one = link.time(stream / context * (tensor - 1) / tensor)
        found["tensor"] = of_stage * _ENTRY_AND_EXIT * build_shared_model(workload, tensor).num_cut_parts * one
    if context > 1:
        link = find_link("context", layout, bandwidths)
        share = (context - 1) / context
        found["context"] = of_stage * sum(
            sum(link.time(tokens / context * width / tensor * element * share) for width in widths)
            for widths in _list_exchanged(decoder)
        )
    if stages > 1:
        link = find_link("pipeline", layout, bandwidths)
        # Forth with the stream and back with its gradient, at each boundary of a rank's stages.
        transfers = 2 * num_micro_batches * layout.stages_per_rank
        found["pipeline"] = transfers * link.time(stream / (context * tensor))
        heaviest = _share_of_heaviest(workload, layout) * stages
        found["imbalance"] = (heaviest - 1.0) * compute
        found["bubble"] = heaviest * compute * (stages - 1) / (layout.stages_per_rank * num_micro_batches)
    return AxisTimes(**found)


def _list_exchanged(decoder: DecoderConfig) -> list[tuple[int, int]]:
    """Returns the numbers of a token that context parallelism exchanges before each mixer and after it."""
    found: list[tuple[int, int]] = []
    for mixer, layers in decoder.list_mixers():
        heads = mixer.attention_heads(decoder.dim)
        widths = (3 * decoder.dim, decoder.dim)
        if heads is not None:
            query = heads.num_heads * heads.head_dim
            widths = (query + 2 * heads.num_kv_heads * heads.head_dim, query)
        found += [widths] * len(layers)
    return found


@dataclass(frozen=True)
class Place:
    """What a rank of a pipeline runs; without a pipeline everything.

    Args:
        blocks: The numbers of its blocks.
        has_embedding: Whether it has the first stage.
        has_head: Whether it has the last stage.
        has_tied_embeddings: Whether the output weight is the embedding.
        rank: Its place in the pipeline, from 0.
        num_ranks: Ranks of the pipeline.
        stages_per_rank: Stages that it has.
    """

    blocks: tuple[int, ...]
    has_embedding: bool = True
    has_head: bool = True
    has_tied_embeddings: bool = False
    rank: int = 0
    num_ranks: int = 1
    stages_per_rank: int = 1

    def has(self, parameter: Parameter) -> bool:
        """Returns whether the rank holds a parameter."""
        if parameter.block is not None:
            return parameter.block in self.blocks
        if parameter.name == "embedding.weight":
            return self.has_embedding or (self.has_head and self.has_tied_embeddings)
        return self.has_head

    @property
    def num_inputs(self) -> int:
        """Stages of the rank that receive the stream."""
        return self.stages_per_rank - self.has_embedding

    @property
    def num_outputs(self) -> int:
        """Stages of the rank that send the stream on, and receive its gradient."""
        return self.stages_per_rank - self.has_head

    def count_forwards(self, num_micro_batches: int) -> int:
        """Returns how many forwards of its stages the rank has made before its first backward, which it keeps.

        References:
            Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv:2104.04473.
        """
        last = self.num_ranks - 1
        if self.stages_per_rank == 1:
            return min(num_micro_batches, last - self.rank + 1)
        per_round = num_micro_batches // max(1, num_micro_batches // self.num_ranks)
        forwards = (self.stages_per_rank - 1) * per_round + 2 * (last - self.rank) + 1
        return min(num_micro_batches * self.stages_per_rank, forwards)

    def count_in_flight(self, num_micro_batches: int) -> int:
        """Returns the micro-batches of which the rank keeps activations before its first backward."""
        return -(-self.count_forwards(num_micro_batches) // self.stages_per_rank)


@lru_cache(maxsize=1024)
def list_places(workload: Workload, layout: Layout) -> tuple[Place, ...]:
    """Returns what each rank of the pipeline runs: consecutive blocks, so that the slowest stage has least to do."""
    decoder, num_ranks = workload.decoder, layout.pipeline_parallel
    if num_ranks == 1:
        return (Place(tuple(range(decoder.num_layers))),)
    stages = divide_layers(decoder, layout.num_stages, layout.layers_per_stage)
    return tuple(
        Place(
            tuple(block for stage in stages[rank::num_ranks] for block in stage),
            has_embedding=rank == 0,
            has_head=rank == num_ranks - 1,
            has_tied_embeddings=decoder.has_tied_embeddings,
            rank=rank,
            num_ranks=num_ranks,
            stages_per_rank=layout.stages_per_rank,
        )
        for rank in range(num_ranks)
    )


def _share_of_heaviest(workload: Workload, layout: Layout) -> float:
    """Returns the share of a step's products that the rank of the pipeline with the most has."""
    blocks, head = count_operations(workload.decoder, workload.seq_len)
    places = list_places(workload, layout)
    most = max(sum(blocks[block] for block in place.blocks) + head * place.has_head for place in places)
    return most / (sum(blocks) + head)
