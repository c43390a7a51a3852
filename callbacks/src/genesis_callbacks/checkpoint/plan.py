"""Plans a save from the ranks' reports: checks that they hold every element, and assigns parts to writers. Pure."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..base.checkpoint_errors import CorruptCheckpointError, SaveFailedError
from ..base.local_shards import LocalShard, TensorKind, TensorShard
from .garbage import without_collections
from .tiling import check_tiling

Numbers = NDArray[np.int64]
Digests = NDArray[np.uint64]
_OVERLAPPED_KINDS = ("parameter", "optimizer")


class SharedParts:
    """The parts that ranks plan together, grouped by what a save does with them.

    Args:
        parts: The parts of one rank: of the model, and of its optimizers' state.
        parameters: Tensors with the data of all parameters; None for the parts' own. Parameters and the state of
            optimizers are copied while the next forward runs, and a write to one of these tensors meanwhile is noticed.
        states: Tensors with the data of all states of optimizers; None for the parts' own.

    Attributes:
        shards: The description of each part, in order.
        copied: The parts that the next forward may change, so that they are copied at once.
    """

    def __init__(
        self, parts: list[LocalShard], parameters: list[Tensor] | None = None, states: list[Tensor] | None = None
    ) -> None:
        self.parts = parts
        self.shards = tuple(local.part for local in parts)
        self.copied = [local for local in parts if local.part.kind not in _OVERLAPPED_KINDS]
        self.parameters = self._list("parameter") if parameters is None else parameters
        self.states = self._list("optimizer") if states is None else states

    def _list(self, kind: TensorKind) -> list[Tensor]:
        return [local.data for local in self.parts if local.part.kind == kind]


@dataclass(frozen=True)
class SavePlan:
    """The blocks that each rank holds and those that it writes. Rank 0 alone has the plan.

    Blocks are rows of numbers: with each save the plan goes to rank 0's writer, and at a thousand ranks as many objects
    would take seconds and a gigabyte.

    Attributes:
        tensors: A block of each tensor, which has its name, kind, shape and dtype.
        tensor_of: The number of each block's tensor in `tensors`, `[block]`.
        ranges: The offsets and the sizes of each block, `[block, 2, dim]`; 0 and 1 in the dims that its tensor lacks.
        held: For each rank, the blocks that it reported, in its order.
        written: For each rank, the places in its report of the blocks that it writes, in order.
    """

    tensors: tuple[TensorShard, ...]
    tensor_of: Numbers
    ranges: Numbers
    held: tuple[Numbers, ...]
    written: tuple[Numbers, ...]

    def blocks_of(self, rank: int) -> Numbers:
        """Returns the blocks that a rank writes, in order."""
        return self.held[rank][self.written[rank]]

    def count_bytes(self, blocks: Numbers) -> Numbers:
        """Returns the size of the elements of each of these blocks."""
        item_bytes = np.array([tensor.dtype.itemsize for tensor in self.tensors], dtype=np.int64)
        sizes: Numbers = self.ranges[blocks, 1].prod(axis=-1)
        return sizes * item_bytes[self.tensor_of[blocks]]


def _hold_all(_: str) -> bool:
    return True


@without_collections()
def plan_save(shards_by_rank: Sequence[Sequence[TensorShard]], is_held: Callable[[str], bool] = _hold_all) -> SavePlan:
    """Returns the plan of a save: a block is written by the rank with the fewest bytes so far among its holders.

    Rank 0 writes each buffer that it holds, because DDP takes rank 0's buffers as the valid ones.

    Args:
        shards_by_rank: The parts that each rank holds.
        is_held: Returns whether the save holds the tensor of a name; no rank writes the others.

    Raises:
        SaveFailedError: The ranks disagree about a tensor's shape or dtype, or do not hold all of it together.
    """
    # One dictionary lookup for each part that a rank reports: hashing parts takes most of the time of a plan for a
    # thousand ranks.
    numbers: dict[TensorShard, int] = {}
    held = tuple(
        np.array([numbers.setdefault(part, len(numbers)) for part in parts], dtype=np.int64) for parts in shards_by_rank
    )
    blocks = list(numbers)
    holders: list[list[tuple[int, int]]] = [[] for _ in blocks]
    for rank, of_rank in enumerate(held):
        for place, number in enumerate(of_rank.tolist()):
            holders[number].append((rank, place))
    blocks_by_name: dict[str, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        blocks_by_name[block.name].append(number)
    for name, same in blocks_by_name.items():
        first = blocks[same[0]]
        if len({(blocks[number].shape, blocks[number].dtype, blocks[number].kind) for number in same}) > 1:
            seen = "; ".join(f"rank {holders[it][0][0]}: {blocks[it].dtype} {blocks[it].shape}" for it in same)
            raise SaveFailedError(f"{name}: the ranks disagree about it ({seen})")
        try:
            check_tiling(name, first.shape, [(blocks[number].offsets, blocks[number].sizes) for number in same])
        except CorruptCheckpointError as error:
            raise SaveFailedError(f"the ranks do not hold a whole tensor together: {error}") from error
    # Large parts come first, which balances the writers.
    loads = [0] * len(held)
    written: list[list[int]] = [[] for _ in held]
    for number, part in sorted(enumerate(blocks), key=lambda item: (-item[1].num_bytes, item[1].name, item[1].offsets)):
        if not is_held(part.name):
            continue
        able = holders[number]
        writer, place = able[0] if part.kind == "buffer" else min(able, key=lambda item: (loads[item[0]], item[0]))
        loads[writer] += part.num_bytes
        written[writer].append(place)
    return SavePlan(
        tensors=tuple(blocks[same[0]] for same in blocks_by_name.values()),
        tensor_of=_number_tensors(blocks_by_name, len(blocks)),
        ranges=_find_ranges(blocks),
        held=held,
        written=tuple(
            np.array(sorted(places, key=lambda place: _order(parts[place])), dtype=np.int64)
            for parts, places in zip(shards_by_rank, written, strict=True)
        ),
    )


def _order(part: TensorShard) -> tuple[str, tuple[int, ...]]:
    return part.name, part.offsets


def _number_tensors(blocks_by_name: Mapping[str, Sequence[int]], num_blocks: int) -> Numbers:
    tensor_of = np.empty(num_blocks, dtype=np.int64)
    for number, blocks in enumerate(blocks_by_name.values()):
        tensor_of[blocks] = number
    return tensor_of


def _find_ranges(blocks: Sequence[TensorShard]) -> Numbers:
    num_dims = max((len(block.shape) for block in blocks), default=0)
    ranges = np.zeros((len(blocks), 2, num_dims), dtype=np.int64)
    ranges[:, 1] = 1
    for row, block in zip(ranges, blocks, strict=True):
        row[0, : len(block.shape)], row[1, : len(block.shape)] = block.offsets, block.sizes
    return ranges


def merge_digests(plan: SavePlan, digests_by_rank: Sequence[Digests]) -> dict[str, int]:
    """Returns each tensor's digest: the sum over its blocks, each counted once however many ranks hold it.

    Args:
        plan: The plan.
        digests_by_rank: For each rank, the digests of the blocks that it holds, in the order of its report.

    Raises:
        SaveFailedError: Ranks that should hold the same block hold different values. Buffers may differ, and rank 0's
            are saved: DDP lets them differ, and sends rank 0's to all ranks before the next forward.
    """
    held, found = np.concatenate(plan.held), np.concatenate(digests_by_rank)
    _, first = np.unique(held, return_index=True)  # the first place of each block: its first holder's
    is_buffer = np.array([tensor.kind == "buffer" for tensor in plan.tensors], dtype=bool)
    differing = np.flatnonzero((found != found[first][held]) & ~is_buffer[plan.tensor_of[held]])
    if differing.size:
        ends = np.cumsum([len(of_rank) for of_rank in plan.held])
        place = differing[0]
        rank, other = (int(np.searchsorted(ends, at, side="right")) for at in (place, first[held[place]]))
        raise SaveFailedError(
            f"{plan.tensors[plan.tensor_of[held[place]]].name}: rank {rank} holds other values than rank {other}: "
            "the replicas have drifted apart"
        )
    totals = np.zeros(len(plan.tensors), dtype=np.uint64)
    np.add.at(totals, plan.tensor_of, found[first])  # modulo 2**64, as digests are
    return {tensor.name: total for tensor, total in zip(plan.tensors, totals.tolist(), strict=True)}
