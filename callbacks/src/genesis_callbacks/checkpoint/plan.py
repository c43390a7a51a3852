"""Plans a save from the ranks' reports: checks that they hold every element, and assigns parts to writers. Pure."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..base.checkpoint_errors import CorruptCheckpointError, SaveFailedError
from ..base.local_shards import LocalShard, TensorKind, TensorShard
from .tiling import check_tiling

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
    """The parts that each rank writes, in order."""

    shards_by_writer: tuple[tuple[TensorShard, ...], ...]


def _hold_all(_: str) -> bool:
    return True


def plan_save(shards_by_rank: Sequence[Sequence[TensorShard]], is_held: Callable[[str], bool] = _hold_all) -> SavePlan:
    """Returns the parts of each writer: a block is written by the rank with the fewest bytes so far among its holders.

    Rank 0 writes each buffer that it holds, because DDP takes rank 0's buffers as the valid ones.

    Args:
        shards_by_rank: The parts that each rank holds.
        is_held: Returns whether the save holds the tensor of a name; no rank writes the others.

    Raises:
        SaveFailedError: The ranks disagree about a tensor's shape or dtype, or do not hold all of it together.
    """
    # One dictionary lookup for each part that a rank reports: hashing parts takes most of the time of a plan for a
    # thousand ranks.
    holders: dict[TensorShard, list[int]] = {}
    blocks_by_name: dict[str, list[TensorShard]] = defaultdict(list)
    for rank, parts in enumerate(shards_by_rank):
        for part in parts:
            ranks = holders.setdefault(part, [])
            if not ranks:
                blocks_by_name[part.name].append(part)
            ranks.append(rank)
    for name, blocks in blocks_by_name.items():
        if len({(block.shape, block.dtype, block.kind) for block in blocks}) > 1:
            seen = "; ".join(f"rank {holders[block][0]}: {block.dtype} {block.shape}" for block in blocks)
            raise SaveFailedError(f"{name}: the ranks disagree about it ({seen})")
        try:
            check_tiling(name, blocks[0].shape, [(block.offsets, block.sizes) for block in blocks])
        except CorruptCheckpointError as error:
            raise SaveFailedError(f"the ranks do not hold a whole tensor together: {error}") from error
    # Every rank makes this plan by itself, so the order must not depend on the process: Python's hashes of strings do.
    # Large parts come first, which balances the writers.
    loads = [0] * len(shards_by_rank)
    shards_by_writer: list[list[TensorShard]] = [[] for _ in shards_by_rank]
    for part, ranks in sorted(holders.items(), key=lambda item: (-item[0].num_bytes, item[0].name, item[0].offsets)):
        if not is_held(part.name):
            continue
        writer = ranks[0] if part.kind == "buffer" else min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] += part.num_bytes
        shards_by_writer[writer].append(part)
    return SavePlan(
        tuple(tuple(sorted(parts, key=lambda part: (part.name, part.offsets))) for parts in shards_by_writer)
    )


def merge_digests(digests_by_rank: Sequence[dict[TensorShard, int]]) -> dict[str, int]:
    """Returns each tensor's digest: the sum over its blocks, each counted once however many ranks hold it.

    Raises:
        SaveFailedError: Ranks that should hold the same block hold different values. Buffers may differ, and rank 0's
            are saved: DDP lets them differ, and sends rank 0's to all ranks before the next forward.
    """
    totals: dict[str, int] = defaultdict(int)
    first_holder: dict[TensorShard, int] = {}
    for rank, digests in enumerate(digests_by_rank):
        for part, digest in digests.items():
            if part not in first_holder:
                first_holder[part] = rank
                totals[part.name] = (totals[part.name] + digest) % (1 << 64)
            elif part.kind != "buffer" and digests_by_rank[first_holder[part]][part] != digest:
                raise SaveFailedError(
                    f"{part.name}: rank {rank} holds other values than rank {first_holder[part]}: "
                    "the replicas have drifted apart"
                )
    return dict(totals)
