"""Directions of whole matrices: batched on a rank, shared out over ranks where matrices are replicated or sharded.

What a direction is, the algorithm knows (`genesis.optim.algorithm.Algorithm.direct`). Here is who computes which.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import BFloat16, Shaped
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from genesis.base.errors import UserError

# The dtype of torch's Muon. Also on CPUs: those with avx512_bf16 or AMX take a quarter of float32's time.
_DTYPE = torch.bfloat16

BATCH_BYTES = 256 * 2**20
"""Bytes of the matrices that a rank multiplies at once; the products take several times as much memory."""

Direct = Callable[[BFloat16[Tensor, "N rows columns"]], BFloat16[Tensor, "N rows columns"]]
"""Returns the directions of matrices of one shape, no taller than wide."""


def direct_matrices(
    direct: Direct, matrices: Sequence[Tensor], replicas: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Returns the direction of each matrix.

    Args:
        direct: The algorithm's.
        matrices: Two-dimensional matrices.
        replicas: Ranks that hold the same matrices, of which each computes a share; it communicates.
    """
    results: dict[int, Tensor] = {}
    for batch in plan_batches([matrix.shape for matrix in matrices], count_ranks(replicas)):
        members = [matrices[i] for i in batch.members]
        directions = direct_batch(
            direct,
            lambda numbers, members=members: [members[number] for number in numbers],  # type: ignore[misc]
            batch.owners,
            replicas,
        )
        for index, direction in zip(batch.members, directions, strict=True):
            results[index] = turn_back(direction, matrices[index].shape).to(matrices[index].dtype)
    return [results[index] for index in range(len(matrices))]


def count_ranks(group: dist.ProcessGroup | None) -> int:
    """Returns the number of ranks that share the work: 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def count_flops(shape: Sequence[int]) -> int:
    """Returns the number of floating-point operations of an iteration for one matrix, to balance ranks. Pure."""
    small, large = min(shape), max(shape)
    # Two products with the matrix itself and one of its Gram matrix with itself, as Newton-Schulz iterations have.
    return 4 * small * small * large + 2 * small**3


class Batch(NamedTuple):
    """Matrices of one shape that are multiplied together.

    Args:
        members: The numbers of the matrices.
        owners: The rank that computes each matrix; the ranks' counts differ by at most one.
    """

    members: list[int]
    owners: list[int]


def plan_batches(shapes: Sequence[Sequence[int]], num_ranks: int = 1) -> list[Batch]:
    """Returns batches of matrices of one shape (transposed to be wide), with limited size on each rank. Pure.

    The remaining matrices of a shape go to the ranks that have the least to compute so far.

    Args:
        shapes: Rows and columns of each matrix.
        num_ranks: Ranks that share each batch.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, (rows, columns) in enumerate(shapes):
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    batches = []
    load = [0] * num_ranks
    # The most expensive shapes first, because cheap matrices then balance the load of the expensive ones.
    for (rows, columns), indices in sorted(by_shape.items(), key=lambda item: (-count_flops(item[0]), item[0])):
        size = num_ranks * max(1, BATCH_BYTES // max(1, rows * columns * _DTYPE.itemsize))
        for start in range(0, len(indices), size):
            members = indices[start : start + size]
            ranks = sorted(range(num_ranks), key=lambda rank: (load[rank], rank))
            owners = [ranks[number % num_ranks] for number in range(len(members))]
            for owner in owners:
                load[owner] += count_flops((rows, columns))
            batches.append(Batch(members, owners))
    return batches


def direct_batch(
    direct: Direct,
    read: Callable[[Sequence[int]], list[Tensor]],
    owners: Sequence[int],
    replicas: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Returns the directions of one batch of `plan_batches`, transposed to be wide, in bfloat16.

    With a group, each rank computes its share of them and receives the other results: the same bits on every rank,
    even with different GPUs, and no rank repeats another's work. Every rank of the group calls it; it communicates.

    Args:
        direct: The algorithm's.
        read: Returns matrices of the batch by their numbers; in a shared batch only this rank's are read, or one.
        owners: The rank of each matrix within the group.
        replicas: Ranks that hold the same matrices.
    """
    rank = 0 if replicas is None else dist.get_rank(replicas)
    own = [number for number, owner in enumerate(owners) if owner == rank]
    results = _direct_alike(direct, read(own)) if own else []
    if replicas is None:
        return results
    num_ranks = dist.get_world_size(replicas)
    # all_gather needs equal sizes, so ranks with fewer matrices append zeros, which no rank reads.
    like = results[0] if own else torch.zeros_like(_to_wide(read([0])[0]), dtype=_DTYPE)
    per_rank = max(owners.count(other) for other in range(num_ranks))
    given = torch.stack([*results, *(torch.zeros_like(like) for _ in range(per_rank - len(results)))])
    gathered = given.new_empty((num_ranks * per_rank, *like.shape))
    dist.all_gather_into_tensor(gathered, given, group=replicas)
    next_of = [owner * per_rank for owner in range(num_ranks)]
    in_order = []
    for owner in owners:
        in_order.append(gathered[next_of[owner]])
        next_of[owner] += 1
    return in_order


def turn_back(direction: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a matrix of a batch in its original orientation, that of `shape`."""
    return direction if direction.shape == shape else direction.mT


def stack_as(
    matrices: Sequence[Shaped[Tensor, "rows columns"]], dtype: torch.dtype, *, is_turned: bool = False
) -> Shaped[Tensor, "N rows_or_columns columns_or_rows"]:
    """Returns copies of matrices in another dtype, each of them transposed if `is_turned`.

    On a GPU that is one kernel, or two, however many matrices there are: small models wait for launches.
    """
    like = matrices[0]
    # What is turned exists twice for a moment, so that the copy to turn has the smaller dtype.
    held = min(like.dtype, dtype, key=lambda one: one.itemsize) if is_turned else dtype
    stacked = like.new_empty((len(matrices), *like.shape), dtype=held)
    torch._foreach_copy_(list(stacked.unbind()), list(matrices))
    return stacked.mT.to(dtype, memory_format=torch.contiguous_format) if is_turned else stacked


def _direct_alike(direct: Direct, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Returns the directions of matrices of one shape up to transposition, as wide matrices in bfloat16."""
    by_turn: dict[bool, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_turn.setdefault(matrix.shape[0] > matrix.shape[1], []).append(number)
    parts = [
        stack_as([matrices[number] for number in numbers], _DTYPE, is_turned=is_tall)
        for is_tall, numbers in by_turn.items()
    ]
    if len(parts) > 1:
        parts = [torch.cat(parts)]
    directions = direct(parts.pop())
    found = dict(zip((number for numbers in by_turn.values() for number in numbers), directions, strict=True))
    return [found[number] for number in range(len(found))]


def _to_wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def direct_sharded(direct: Direct, updates: Sequence[Tensor], parameters: Sequence[DTensor]) -> list[Tensor]:
    """Returns this rank's part of the directions of matrices that are spread over ranks.

    Each matrix has one owner, which gathers it, computes its direction and sends the rows back: two all-to-alls for all
    matrices together, and no rank repeats another's work. If the shards are replicated (hybrid), the replicas of an
    owner share its matrices and exchange the results. Ranks that share each matrix (tensor parallelism) first divide
    the matrices, by two more all-to-alls. Every rank of the meshes calls it with the same parameters in the same order.

    Args:
        direct: The algorithm's.
        updates: This rank's part of each matrix.
        parameters: The parameters of the updates; their placements define how matrices are spread.

    Raises:
        ValueError: A matrix is spread in another way than by FSDP2, and by rows or columns within that.
    """
    by_ranks: dict[_Ranks, list[int]] = {}
    for index, parameter in enumerate(parameters):
        by_ranks.setdefault(_find_ranks(parameter), []).append(index)
    results: dict[int, Tensor] = {}
    for ranks, members in by_ranks.items():
        own, placed = [updates[i] for i in members], [parameters[i] for i in members]
        if ranks.sharing is None:
            found = _direct_rows(direct, own, [_Rows(*parameter.shape) for parameter in placed], ranks)
        else:
            found = _direct_shared(direct, own, placed, ranks, ranks.sharing)
        results.update(zip(members, found, strict=True))
    return [results[i].to(updates[i].device, updates[i].dtype) for i in range(len(updates))]


class _Rows(NamedTuple):
    """A matrix as rows that are spread over ranks.

    Args:
        num_rows: The number of these rows.
        width: The number of their elements.
        num_joined: How many rows of the matrix, from as many even parts of it, are one row.
    """

    num_rows: int
    width: int
    num_joined: int = 1

    def join(self, matrix: Tensor) -> Tensor:
        """Returns the rows of a matrix."""
        return matrix.reshape(self.num_joined, self.num_rows, -1).transpose(0, 1).reshape(self.num_rows, -1)

    def divide(self, rows: Tensor) -> Tensor:
        """Returns the matrix of all rows."""
        parts = rows.reshape(self.num_rows, self.num_joined, -1).transpose(0, 1)
        return parts.reshape(self.num_joined * self.num_rows, -1)


def _direct_shared(
    direct: Direct,
    updates: Sequence[Tensor],
    parameters: Sequence[DTensor],
    ranks: "_Ranks",
    sharing: dist.ProcessGroup,
) -> list[Tensor]:
    """Returns this rank's parts of the directions of matrices, of which each rank of `sharing` has an even part."""
    rank, num_ranks = dist.get_rank(sharing), dist.get_world_size(sharing)
    owned = _plan_owners([tuple(parameter.shape) for parameter in parameters], num_ranks)
    sent = [_concatenate([updates[i] for i in of_rank], ranks.device) for of_rank in owned]
    shapes = [tuple(updates[i].shape) for i in owned[rank]]
    received = _exchange(sent, [sum(rows * columns for rows, columns in shapes)] * num_ranks, sharing)
    parts = [_split(flat, shapes) for flat in received]
    spread = []
    for i in owned[rank]:
        rows, columns = parameters[i].shape
        is_by_rows = updates[i].shape[1] == columns  # FSDP2 then cuts the rows of each part
        spread.append(_Rows(rows // num_ranks, columns * num_ranks, num_ranks) if is_by_rows else _Rows(rows, columns))
    directed = _direct_rows(
        direct, [torch.cat(of_ranks, dim=1) for of_ranks in zip(*parts, strict=True)], spread, ranks
    )
    sent = [
        _concatenate([rows.chunk(num_ranks, dim=1)[target] for rows in directed], ranks.device)
        for target in range(num_ranks)
    ]
    received = _exchange(sent, [sum(updates[i].numel() for i in of_rank) for of_rank in owned], sharing)
    results: dict[int, Tensor] = {}
    for flat, of_rank in zip(received, owned, strict=True):
        results.update(zip(of_rank, _split(flat, [tuple(updates[i].shape) for i in of_rank]), strict=True))
    return [results[i] for i in range(len(updates))]


def _direct_rows(direct: Direct, updates: Sequence[Tensor], spread: Sequence[_Rows], ranks: "_Ranks") -> list[Tensor]:
    """Returns this rank's rows of the directions of matrices whose rows are spread over the ranks of a group."""
    group, device = ranks.group, ranks.device
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shapes = [(rows.num_rows, rows.width) for rows in spread]
    owned = _plan_owners(shapes, world_size)

    # All matrices in one exchange of bfloat16: many small collectives would cost more in latency than in bytes.
    sent = [_concatenate([updates[i] for i in owned[owner]], device) for owner in range(world_size)]
    sizes = [
        sum(_num_rows(shapes[i], source, world_size) * shapes[i][1] for i in owned[rank])
        for source in range(world_size)
    ]
    received = _exchange(sent, sizes, group)
    slices = [
        _split(received[source], [(_num_rows(shapes[i], source, world_size), shapes[i][1]) for i in owned[rank]])
        for source in range(world_size)
    ]
    gathered = zip(owned[rank], zip(*slices, strict=True), strict=True)
    matrices = [spread[i].divide(torch.cat(rows)) for i, rows in gathered]
    directions = direct_matrices(direct, matrices, ranks.replicas)
    whole = [spread[i].join(matrix) for i, matrix in zip(owned[rank], directions, strict=True)]

    sent = [
        _concatenate([_rows_of(matrix, target, world_size) for matrix in whole], device) for target in range(world_size)
    ]
    sizes = [sum(updates[i].numel() for i in owned[owner]) for owner in range(world_size)]
    received = _exchange(sent, sizes, group)
    results: dict[int, Tensor] = {}
    flat = torch.cat(received)
    if len({update.device for update in updates}) == 1:  # in one copy, if all are on the host
        flat = flat.to(updates[0].device)
    for owner, rows in enumerate(torch.split(flat, sizes)):
        results.update(zip(owned[owner], _split(rows, [tuple(updates[i].shape) for i in owned[owner]]), strict=True))
    return [results[i] for i in range(len(updates))]


def require_whole_matrices(name: str, stacks: Sequence[DTensor]) -> None:
    """Checks that stacks of matrices are sharded along their first dimension alone, which cuts no matrix.

    Args:
        name: The algorithm's.
        stacks: The stacks.

    Raises:
        UserError: A stack is sharded along another dimension.
    """
    for stack in stacks:
        for axis, placement in enumerate(stack.placements):
            if not placement.is_replicate() and getattr(placement, "dim", None) != 0:
                raise UserError(
                    f"the optimizer is {name}, which needs whole matrices, and {stack.device_mesh.size(axis)} ranks "
                    f"cut the matrices of {stack.shape[1]} by {stack.shape[2]} of the experts: give these parameters "
                    "to another algorithm, such as adamw, or shard their stacks by experts"
                )


class _Ranks(NamedTuple):
    """The ranks over which matrices are spread.

    Args:
        group: Those over which rows are spread.
        replicas: Those that hold the same rows; None without such.
        sharing: Those of which each has an even part of each matrix, whose rows are spread; None if whole ones are.
        device: The kind of device.
    """

    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    sharing: dist.ProcessGroup | None
    device: str


def _find_ranks(parameter: DTensor) -> _Ranks:
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    # FSDP2 comes before the axis of ranks that share a matrix, and cuts the rows of their parts.
    outer, *inner = (placements[axis] for axis in axes)
    if getattr(outer, "dim", None) != 0 or inner not in ([], [Shard(0)], [Shard(1)]):
        raise ValueError(
            "a matrix that is needed whole must be sharded by rows over one mesh axis, or by rows of its parts on "
            f"another, but one has {placements}: shard it with fully_shard's default placement or give it to AdamW"
        )
    copies = [axis for axis in range(mesh.ndim) if axis not in axes and mesh.size(axis) > 1]
    # Over several replicated axes each line of the first shares the work, and the others repeat it.
    replicas = mesh.get_group(copies[0]) if copies else None
    sharing = mesh.get_group(axes[1]) if len(axes) > 1 else None
    return _Ranks(mesh.get_group(axes[0]), replicas, sharing, mesh.device_type)


def _plan_owners(shapes: Sequence[tuple[int, ...]], world_size: int) -> list[list[int]]:
    """Returns the matrices of each rank: the most expensive first, each to the rank with the least to compute. Pure."""
    # Numbers break ties: every rank must compute the same owners, since ranks never exchange them.
    owned: list[list[int]] = [[] for _ in range(world_size)]
    load = [(0, rank) for rank in range(world_size)]  # a heap
    for index in sorted(range(len(shapes)), key=lambda i: (-count_flops(shapes[i]), i)):
        flops, rank = heappop(load)
        owned[rank].append(index)
        heappush(load, (flops + count_flops(shapes[index]), rank))
    return owned


def _num_rows(shape: tuple[int, ...], rank: int, world_size: int) -> int:
    """Returns a rank's rows under `Shard(0)`, which cuts as torch.chunk does."""
    per_rank = -(-shape[0] // world_size)
    return max(0, min(per_rank, shape[0] - rank * per_rank))


def _rows_of(matrix: Tensor, rank: int, world_size: int) -> Tensor:
    per_rank = -(-matrix.shape[0] // world_size)
    return matrix[rank * per_rank : (rank + 1) * per_rank]


def _concatenate(tensors: Sequence[Tensor], device: str) -> BFloat16[Tensor, " n"]:
    if not tensors:
        return torch.empty(0, dtype=_DTYPE, device=device)
    rows = [tensor.to(dtype=_DTYPE).reshape(-1) for tensor in tensors]
    if len({tensor.device for tensor in tensors}) > 1:  # some are offloaded
        rows = [tensor.to(device) for tensor in rows]
    # In one copy, because each copy from offloaded tensors waits for the device.
    return torch.cat(rows).to(device)


def _split(flat: Shaped[Tensor, " n"], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    ends = list(accumulate(rows * columns for rows, columns in shapes))
    return [
        flat[end - rows * columns : end].view(rows, columns) for end, (rows, columns) in zip(ends, shapes, strict=True)
    ]


def _exchange(sent: Sequence[Tensor], received_sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    received = sent[0].new_empty(sum(received_sizes))
    dist.all_to_all_single(
        received, torch.cat(list(sent)), list(received_sizes), [t.numel() for t in sent], group=group
    )
    return list(torch.split(received, list(received_sizes)))
