"""The parameters of a rank and what belongs to them between steps: gradients and optimizer states, in bytes."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from genesis.base.errors import UserError
from genesis.model.adapter import attach_adapters
from genesis.model.decoder import Decoder
from genesis.model.experts import Experts
from genesis.model.nf4 import BYTES
from genesis.model.part import ParameterGroup
from genesis.model.shares import share_matrices
from genesis.operations.plan.layout import FLOAT32_BYTES, Layout, Workload, parameter_bytes
from genesis.operations.plan.stand_ins import EvenMatrices, EvenRows
from genesis.optim.algorithm import Algorithm
from genesis.optim.offload import choose


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model.

    Args:
        name: Its name.
        shape: Its shape.
        is_trained: Whether it is trained.
        group: Its group in the optimizer.
        block: The number of its block; None for the embedding, the last norm and the output weight.
        element_bytes: Bytes of an element at rest.
        is_expert: Whether it is a stack of a matrix for each expert.
        cut: The number of ranks that share it by tensor parallelism, and the dimension along which it is cut; None if
            FSDP2 alone shards it.
    """

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    group: ParameterGroup
    block: int | None
    element_bytes: int
    is_expert: bool = False
    cut: tuple[int, int] | None = None

    @property
    def num_elements(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def num_weights(self) -> int:
        """The weights of the model that it holds: of NF4's tensors, one has two a byte and the others have none."""
        name = self.name.rpartition(".")[2]
        if name not in BYTES:
            return self.num_elements
        return 2 * self.num_elements if name == BYTES[0] else 0

    def local_elements(self, layout: Layout) -> int:
        """Returns the elements of the first rank, which has the most: FSDP2 cuts rows as torch.chunk."""
        num_shards = self.num_shards(layout)
        if layout.is_sharded and self.is_expert and layout.expert_parallel > 1:
            held = self.shape[0] // layout.expert_parallel
            # By experts, or by the rows or columns of each: FSDP2 divides these evenly.
            return -(-held * math.prod(self.shape[1:]) // num_shards)
        shape = list(self.shape)
        if self.cut is not None:
            num_ranks, dim = self.cut
            shape[dim] //= num_ranks
        if num_shards == 1 or not shape:
            return math.prod(shape)
        return -(-shape[0] // num_shards) * math.prod(shape[1:])

    def list_moment_bytes(self, optimizer: Algorithm, layout: Layout | None = None) -> list[int]:
        """Returns the bytes of each moment: of the first rank, or of the whole parameter without a layout."""
        shape = self.shape
        if layout is not None and shape:
            num_cut, dim = self.cut or (1, 0)
            width = shape[-1] // num_cut if dim == len(shape) - 1 else shape[-1]
            shape = (
                (-(-self.local_elements(layout) // width), width) if len(shape) > 1 else (self.local_elements(layout),)
            )
        return optimizer.of(self.group).list_moment_bytes(shape, self.element_bytes)

    def num_shards(self, layout: Layout) -> int:
        """Returns the ranks whose shards are gathered together."""
        if not layout.is_sharded:
            return 1
        if self.cut is not None:
            return layout.ranks_per_shard_group // layout.tensor_parallel
        return layout.ranks_per_expert if self.is_expert else layout.ranks_per_shard_group

    def gathered_elements(self, layout: Layout) -> int:
        """Returns the elements that a rank holds while it has gathered its part, with the padding of shards."""
        return self.num_shards(layout) * self.local_elements(layout)


@dataclass(frozen=True)
class Model:
    """A decoder on the meta device and its parameters.

    Args:
        decoder: The decoder.
        parameters: Its parameters.
        num_cut_parts: The parts of its blocks that tensor parallelism cuts.
    """

    decoder: Decoder
    parameters: tuple[Parameter, ...]
    num_cut_parts: int = 0

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The trained parameters."""
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)


@lru_cache(maxsize=8)
def build_model(workload: Workload) -> Model:
    """Returns the model of a workload, which allocates nothing. Only fields of the model itself matter.

    Raises:
        UserError: The decoder cannot have the adapters.
    """
    own = parameter_bytes(workload)
    try:
        with torch.device("meta"):
            decoder = Decoder(workload.decoder)
            if workload.adapter is not None:
                attach_adapters(decoder, workload.adapter, workload.base)
    except (RuntimeError, OverflowError, TypeError):  # torch's, for more than 2^63 bytes
        raise UserError("the decoder has a tensor of more than 2^63 bytes: lower dim, ffn_dim or vocab_size") from None
    groups = decoder.parameter_groups()
    experts = {id(one) for part in decoder.modules() if isinstance(part, Experts) for one in part.parameters()}
    parameters = tuple(
        Parameter(
            name,
            tuple(parameter.shape),
            parameter.requires_grad,
            groups[name],
            int(name.split(".")[1]) if name.startswith("blocks.") else None,
            min(own, parameter.element_size()),
            id(parameter) in experts,
        )
        for name, parameter in decoder.named_parameters()
    )
    return Model(decoder, parameters)


@lru_cache(maxsize=32)
def build_shared_model(workload: Workload, num_ranks: int) -> Model:
    """Returns the model of a workload whose matrices a number of ranks share, which `check_layout` has allowed."""
    model = build_model(workload)
    if num_ranks == 1:
        return model
    cut, cutter = copy.deepcopy(model.decoder), EvenMatrices(num_ranks)
    share_matrices(cut, EvenRows(num_ranks), cutter)
    names = {module: name for name, module in cut.named_modules()}
    dims = {f"{names[module]}.{name}": dim for (module, name), dim in cutter.dims.items()}
    parameters = (
        replace(one, cut=(num_ranks, dims[one.name])) if one.name in dims else one for one in model.parameters
    )
    shares = [
        share for block in cut.numbered_blocks.values() for share in (block.mixer_share, block.feed_forward_share)
    ]
    return replace(model, parameters=tuple(parameters), num_cut_parts=sum(share is not None for share in shares))


@dataclass(frozen=True)
class StateBytes:
    """What a rank holds between steps.

    Args:
        weights: Trained weights.
        frozen: Weights that are not trained.
        gradients: Gradients of the trained weights in their place between steps.
        optimizer: States of the optimizer.
        moved: Those of them that are in the host's memory by `optimizer_offload`.
        low_precision_copy: Bytes of a copy of the weights in 16 bits, for the textbook's bill.
    """

    weights: int
    frozen: int
    gradients: int
    optimizer: int
    moved: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.frozen + self.gradients + self.optimizer


def count_on_host(model: Model, workload: Workload, layout: Layout, rounded_to: int = 512) -> StateBytes:
    """Returns the part of `count_state` that `cpu_offload` puts into the host's memory."""
    offloaded = layout.list_offloaded(len(model.decoder.blocks))
    some = replace(model, parameters=tuple(one for one in model.parameters if one.block in offloaded))
    return count_state(some, workload, layout, rounded_to)


def count_state(model: Model, workload: Workload, layout: Layout, rounded_to: int = 512) -> StateBytes:
    """Returns what the rank with the most holds between steps."""

    def size(parameters: Iterable[Parameter], bytes_each: int | None = None) -> int:
        return sum(
            _round(parameter.local_elements(layout) * (bytes_each or parameter.element_bytes), rounded_to)
            for parameter in parameters
        )

    trained = model.trained
    return StateBytes(
        weights=size(trained),
        frozen=size(parameter for parameter in model.parameters if not parameter.is_trained),
        gradients=size(trained),
        optimizer=_count_optimizer(trained, workload, layout, rounded_to),
        moved=_count_moved(trained, workload, layout, rounded_to),
    )


def _count_moved(trained: Sequence[Parameter], workload: Workload, layout: Layout, rounded_to: int) -> int:
    """Returns the bytes of moments that `genesis.optim.offload` keeps in the host's memory."""
    if not layout.optimizer_offload or layout.strategy == "zero1":
        return 0
    sizes = [
        sum(_round(size, rounded_to) for size in one.list_moment_bytes(workload.optimizer, layout)) for one in trained
    ]
    return sum(sizes[index] for index in choose(sizes, layout.optimizer_offload))


def _count_optimizer(trained: Sequence[Parameter], workload: Workload, layout: Layout, rounded_to: int) -> int:
    def states(parameter: Parameter) -> int:
        moments = sum(_round(size, rounded_to) for size in parameter.list_moment_bytes(workload.optimizer, layout))
        counts_steps = workload.optimizer.of(parameter.group).counts_steps
        return moments + counts_steps * _round(FLOAT32_BYTES, rounded_to)

    if layout.strategy != "zero1":
        return sum(map(states, trained))
    # ZeroRedundancyOptimizer gives each parameter, the largest first, to the rank that has the least so far.
    elements = [0] * layout.num_ranks
    of_rank = [0] * layout.num_ranks
    for parameter in sorted(trained, key=lambda one: -one.num_elements):
        rank = elements.index(min(elements))
        elements[rank] += parameter.num_elements
        of_rank[rank] += states(parameter)
    return max(of_rank)


def _round(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class TextbookBill:
    """The state of mixed precision as textbooks count it, for a model of so many parameters.

    Two bytes for each weight and each gradient in 16 bits and eight for Adam's moments in float32; with master weights
    in float32 four more. Genesis trains float32 weights and casts them: 16 bytes, of which 4 are the gradients'.
    """

    num_parameters: int

    @property
    def without_master_weights(self) -> int:
        """Weights, gradients and moments."""
        return 12 * self.num_parameters

    @property
    def with_master_weights(self) -> int:
        """The same and float32 weights."""
        return 16 * self.num_parameters
