"""The nearest semi-orthogonal matrix, for Muon: batched on a rank, shared out over ranks where matrices are sharded."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from jaxtyping import BFloat16, Shaped
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

# Torch's own Muon has these; a quintic whose slope at zero is as steep as convergence allows.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
NUM_STEPS = 5

# As torch's Muon has it. Also on CPUs: those with avx512_bf16 or AMX take a quarter of float32's time.
_DTYPE = torch.bfloat16

BATCH_BYTES = 256 * 2**20
"""Of the matrices that a rank multiplies at once; the products take several times as much."""


def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Returns for each matrix one with the same singular vectors and singular values near 1.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, https://kellerjordan.github.io/posts/muon/
    """
    results: dict[int, Tensor] = {}
    for batch in plan_batches([matrix.shape for matrix in matrices]):
        directions = orthogonalize_batch([matrices[index] for index in batch].__getitem__, len(batch))
        for index, direction in zip(batch, directions, strict=True):
            results[index] = turn_back(direction, matrices[index].shape).to(matrices[index].dtype)
    return [results[index] for index in range(len(matrices))]


def plan_batches(shapes: Sequence[Sequence[int]], num_ranks: int = 1) -> list[list[int]]:
    """Returns the matrices of each batch: of one shape (turned to be wide), and of limited size on each rank. Pure.

    Args:
        shapes: Rows and columns of each matrix.
        num_ranks: Ranks that share a batch.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, (rows, columns) in enumerate(shapes):
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    batches = []
    for (rows, columns), indices in by_shape.items():
        size = num_ranks * max(1, BATCH_BYTES // max(1, rows * columns * _DTYPE.itemsize))
        batches += [indices[start : start + size] for start in range(0, len(indices), size)]
    return batches


def orthogonalize_batch(
    read: Callable[[int], Tensor], num_matrices: int, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Returns the orthogonalised matrices of one batch of `plan_batches`, turned to be wide, in bfloat16.

    With a group, each rank computes a share of them and receives the other results: the same bits on every rank,
    whatever the GPUs, and no rank repeats the work of another. Every rank of the group calls it, and it communicates.

    Args:
        read: Returns a matrix of the batch by its number; of a shared batch only this rank's own are read, or one.
        num_matrices: Of the batch.
        group: Ranks that hold the same matrices.
    """
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own = [_to_wide(read(number)).to(_DTYPE) for number in range(rank, num_matrices, num_ranks)]
    results = list(_iterate(torch.stack(own))) if own else []
    if group is not None:
        # all_gather needs equal sizes, so ranks with fewer matrices append zeros, which nobody reads.
        like = own[0] if own else torch.zeros_like(_to_wide(read(0)), dtype=_DTYPE)
        per_rank = -(-num_matrices // num_ranks)
        given = torch.stack([*results, *(torch.zeros_like(like) for _ in range(per_rank - len(results)))])
        gathered = given.new_empty((num_ranks * per_rank, *like.shape))
        dist.all_gather_into_tensor(gathered, given, group=group)
        results = [gathered[number % num_ranks * per_rank + number // num_ranks] for number in range(num_matrices)]
    return results


def turn_back(direction: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a matrix of a batch, turned as the one of `shape` that it was made of."""
    return direction if direction.shape == shape else direction.mT


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
    together, and no rank repeats another's work. Every rank of the shard group calls it with the same parameters in the
    same order.

    Args:
        updates: This rank's rows of each matrix.
        parameters: Where they belong; they say how rows are spread.

    Raises:
        ValueError: A matrix is sharded by other than its rows.
    """
    group, device = _shard_group(parameters)
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
    whole = orthogonalize([torch.cat(rows) for rows in zip(*slices, strict=True)])

    sent = [
        _concatenate([_rows_of(matrix, target, world_size) for matrix in whole], device) for target in range(world_size)
    ]
    sizes = [sum(updates[i].numel() for i in owned[owner]) for owner in range(world_size)]
    received = _exchange(sent, sizes, group)
    results: dict[int, Tensor] = {}
    for owner, rows in enumerate(torch.split(torch.cat(received).to(updates[0].device), sizes)):
        results.update(zip(owned[owner], _split(rows, [tuple(updates[i].shape) for i in owned[owner]]), strict=True))
    return [results[i].to(updates[i].dtype) for i in range(len(updates))]


def _shard_group(parameters: Sequence[DTensor]) -> tuple[dist.ProcessGroup, str]:
    groups = set()
    for parameter in parameters:
        axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        if len(axes) != 1 or parameter.placements[axes[0]] != Shard(0):
            raise ValueError(
                f"Muon needs matrices that are sharded by rows over one mesh axis, and one has {parameter.placements}: "
                "shard it with fully_shard's default placement or give it to AdamW"
            )
        groups.add((parameter.device_mesh.get_group(axes[0]), parameter.device_mesh.device_type))
    (pair,) = groups
    return pair


def _plan_owners(shapes: Sequence[tuple[int, ...]], world_size: int) -> list[list[int]]:
    """Returns the matrices of each rank: the largest first, dealt in turn."""
    # The index breaks ties: every rank must come to the same owners, since sizes are never exchanged.
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i][0] * shapes[i][1], i))
    return [order[rank::world_size] for rank in range(world_size)]


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
    # At once, because each copy from offloaded tensors waits for the device.
    return torch.cat([tensor.to(dtype=_DTYPE).reshape(-1) for tensor in tensors]).to(device)


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
