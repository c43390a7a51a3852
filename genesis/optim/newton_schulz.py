"""The nearest semi-orthogonal matrix, for Muon: batched on a rank, shared out over ranks where matrices are sharded."""

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

# The coefficients of torch's own Muon: a quintic whose slope at zero is as steep as convergence allows.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
NUM_STEPS = 5

# The dtype of torch's Muon. Also on CPUs: those with avx512_bf16 or AMX take a quarter of float32's time.
_DTYPE = torch.bfloat16

BATCH_BYTES = 256 * 2**20
"""Bytes of the matrices that a rank multiplies at once; the products take several times as much memory."""


def orthogonalize(matrices: Sequence[Tensor], replicas: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Returns for each matrix one with the same singular vectors and singular values near 1.

    Args:
        matrices: Two-dimensional matrices.
        replicas: Ranks that hold the same matrices, of which each computes a share; it communicates.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, https://kellerjordan.github.io/posts/muon/
    """
    results: dict[int, Tensor] = {}
    for batch in plan_batches([matrix.shape for matrix in matrices], count_ranks(replicas)):
        members = [matrices[i] for i in batch.members]
        directions = orthogonalize_batch(
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
    """Returns the number of floating-point operations for one matrix. Pure."""
    small, large = min(shape), max(shape)
    # A step has two products with the matrix itself and one of its Gram matrix with itself.
    return NUM_STEPS * (4 * small * small * large + 2 * small**3)


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


def orthogonalize_batch(
    read: Callable[[Sequence[int]], list[Tensor]], owners: Sequence[int], replicas: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Returns the orthogonalised matrices of one batch of `plan_batches`, transposed to be wide, in bfloat16.

    With a group, each rank computes its share of them and receives the other results: the same bits on every rank,
    even with different GPUs, and no rank repeats another's work. Every rank of the group calls it; it communicates.

    Args:
        read: Returns matrices of the batch by their numbers; in a shared batch only this rank's are read, or one.
        owners: The rank of each matrix within the group.
        replicas: Ranks that hold the same matrices.
    """
    rank = 0 if replicas is None else dist.get_rank(replicas)
    own = [number for number, owner in enumerate(owners) if owner == rank]
    results = _orthogonalize_alike(read(own)) if own else []
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


def _orthogonalize_alike(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Returns the orthogonalised matrices, of one shape up to transposition, as wide matrices in bfloat16."""
    by_turn: dict[bool, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_turn.setdefault(matrix.shape[0] > matrix.shape[1], []).append(number)
    parts = [
        stack_as([matrices[number] for number in numbers], _DTYPE, is_turned=is_tall)
        for is_tall, numbers in by_turn.items()
    ]
    del matrices  # a whole batch of updates in float32
    if len(parts) > 1:
        parts = [torch.cat(parts)]
    directions = _iterate(parts.pop())
    found = dict(zip((number for numbers in by_turn.values() for number in numbers), directions, strict=True))
    return [found[number] for number in range(len(found))]


def _to_wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _iterate(batch: BFloat16[Tensor, "N rows columns"]) -> BFloat16[Tensor, "N rows columns"]:
    a, b, c = COEFFICIENTS
    # The Frobenius norm bounds the spectral norm, which has to be at most 1.
    batch = batch / batch.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_STEPS):
        gram = batch @ batch.mT
        batch = torch.baddbmm(batch, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), batch, beta=a)
    return batch


def orthogonalize_sharded(updates: Sequence[Tensor], parameters: Sequence[DTensor]) -> list[Tensor]:
    """Returns this rank's rows of the orthogonalised matrices whose rows are spread over ranks.

    Each matrix has one owner, which gathers it, iterates and sends the rows back: two all-to-alls for all matrices
    together, and no rank repeats another's work. If the shards are replicated (hybrid), the replicas of an owner
    share its matrices and exchange the results. Every rank of the mesh calls it with the same parameters in the same
    order.

    Args:
        updates: This rank's rows of each matrix.
        parameters: The parameters of the updates; their placements define how rows are sharded.

    Raises:
        ValueError: A matrix is sharded along a dimension other than its rows.
    """
    group, replicas, device = _find_groups(parameters)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shapes = [tuple(parameter.shape) for parameter in parameters]
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
    whole = orthogonalize([torch.cat(rows) for rows in zip(*slices, strict=True)], replicas)

    sent = [
        _concatenate([_rows_of(matrix, target, world_size) for matrix in whole], device) for target in range(world_size)
    ]
    sizes = [sum(updates[i].numel() for i in owned[owner]) for owner in range(world_size)]
    received = _exchange(sent, sizes, group)
    results: dict[int, Tensor] = {}
    gathered = torch.cat(received)
    if len({update.device for update in updates}) == 1:  # in one copy, if all are on the host
        gathered = gathered.to(updates[0].device)
    for owner, rows in enumerate(torch.split(gathered, sizes)):
        results.update(zip(owned[owner], _split(rows, [tuple(updates[i].shape) for i in owned[owner]]), strict=True))
    return [results[i].to(updates[i].device, updates[i].dtype) for i in range(len(updates))]


def require_whole_matrices(stacks: Sequence[DTensor]) -> None:
    """Checks that stacks of matrices are sharded along their first dimension alone, which cuts no matrix.

    Raises:
        UserError: A stack is sharded along another dimension.
    """
    for stack in stacks:
        for axis, placement in enumerate(stack.placements):
            if not placement.is_replicate() and getattr(placement, "dim", None) != 0:
                raise UserError(
                    f"optimizer.name is 'muon', which needs whole matrices, and {stack.device_mesh.size(axis)} ranks "
                    f"cut the matrices of {stack.shape[1]} by {stack.shape[2]} of the experts: give these parameters "
                    "to adamw, or shard their stacks by experts"
                )


def _find_groups(parameters: Sequence[DTensor]) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None, str]:
    """Returns the ranks over which rows are spread, those that hold the same rows, and the kind of device."""
    found = set()
    for parameter in parameters:
        mesh = parameter.device_mesh
        axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        if len(axes) != 1 or parameter.placements[axes[0]] != Shard(0):
            raise ValueError(
                f"Muon needs matrices that are sharded by rows over one mesh axis, but one has {parameter.placements}: "
                "shard it with fully_shard's default placement or give it to AdamW"
            )
        copies = [axis for axis in range(mesh.ndim) if axis != axes[0] and mesh.size(axis) > 1]
        # Over several replicated axes each line of the first shares the work, and the others repeat it.
        replicas = mesh.get_group(copies[0]) if copies else None
        found.add((mesh.get_group(axes[0]), replicas, mesh.device_type))
    (groups,) = found
    return groups


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
