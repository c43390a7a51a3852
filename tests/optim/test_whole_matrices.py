"""Orthogonalised matrices: torch's own where there is one rank, the same rows where there are several."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Muon
from torch.utils._python_dispatch import TorchDispatchMode

from genesis.model.part import MATRICES
from genesis.optim import GroupedOptimizer, whole_matrices
from genesis.optim import Muon as OurMuon
from genesis.optim.whole_matrices import (
    _plan_owners,
    count_flops,
    direct_matrices,
    direct_sharded,
    plan_batches,
)
from genesis.strategies.tensor_parallel import MatrixCutter, place_by_cut
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.testing import run_ranks

MUON = OurMuon()
DIRECT = MUON.direct
SHAPES = [(16, 16), (7, 24), (24, 7), (16, 16), (3, 5), (1, 6), (24, 7)]


def _matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _torch_direction(matrix: Tensor) -> Tensor:
    """Torch's Muon, seen through one step without momentum, decay or scaling."""
    parameter = torch.zeros_like(matrix, requires_grad=True)
    parameter.grad = matrix.clone()
    Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    rows, columns = matrix.shape
    return -parameter.detach() / max(1.0, rows / columns) ** 0.5


def test_singular_values_come_near_one_and_singular_vectors_stay() -> None:
    for matrix, result in zip(_matrices(), direct_matrices(DIRECT, _matrices()), strict=True):
        assert result.shape == matrix.shape
        values = torch.linalg.svdvals(result.float())
        assert values.min() > 0.3
        assert values.max() < 1.3
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        aligned = left.T @ result.float() @ right.T
        assert (aligned - aligned.diag().diag()).abs().max() < 0.05


def test_a_batch_gives_what_torch_gives_one_by_one() -> None:
    for matrix, result in zip(_matrices(), direct_matrices(DIRECT, _matrices()), strict=True):
        torch.testing.assert_close(result.float(), _torch_direction(matrix), atol=0.02, rtol=0)


def test_a_matrix_of_zeros_stays_one() -> None:
    (result,) = direct_matrices(DIRECT, [torch.zeros(4, 6)])
    assert torch.equal(result, torch.zeros(4, 6))


def _orthogonalize_on_rank(mesh_shape: tuple[int, ...]) -> float:
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    sharded = [distribute_tensor(matrix, mesh, placements) for matrix in _matrices()]
    rows = direct_sharded(DIRECT, [tensor.to_local() for tensor in sharded], sharded)
    worst = 0.0
    for tensor, local, expected in zip(sharded, rows, direct_matrices(DIRECT, _matrices()), strict=True):
        whole = DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride()).full_tensor()
        worst = max(worst, float((whole - expected).abs().max()))
    return worst


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_rows_spread_over_ranks_give_the_rows_of_the_whole(mesh_shape: tuple[int, ...]) -> None:
    world_size = torch.Size(mesh_shape).numel()
    for worst in run_ranks(_orthogonalize_on_rank, world_size, mesh_shape):
        assert worst < 5e-3


class Parts(nn.Module):
    """Matrices of which ranks have parts: even numbers are cut by rows, odd ones by columns, if they can be."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(16, 16), (24, 8), (10, 24), (6, 4), (7, 6)]
        self.whole = [torch.randn(shape, generator=generator) for shape in shapes]
        for number, matrix in enumerate(self.whole):
            self.register_parameter(str(number), nn.Parameter(matrix.clone()))


def _direct_parts(tensor_ranks: int) -> float:
    mesh = init_device_mesh("cpu", (4 // tensor_ranks, tensor_ranks), mesh_dim_names=("fsdp", "tp"))
    uncut = init_device_mesh("cpu", (4,), mesh_dim_names=("uncut",))
    module, cutter = Parts(), MatrixCutter(mesh["tp"])
    for number, matrix in enumerate(module.whole):
        if matrix.shape[number % 2] % tensor_ranks == 0:
            cutter.cut(module, str(number), number % 2)
    fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=place_by_cut(uncut))
    parameters: list[Any] = list(module.parameters())
    found = direct_sharded(DIRECT, [one.to_local() for one in parameters], parameters)
    worst = 0.0
    for parameter, part, whole in zip(parameters, found, module.whole, strict=True):
        (expected,) = direct_matrices(DIRECT, [whole])
        (shard,) = local_shards("", parameter, "parameter") or [None]
        if shard is not None:
            own = tuple(
                slice(start, start + size) for start, size in zip(shard.part.offsets, shard.part.sizes, strict=True)
            )
            worst = max(worst, float((part - expected[own]).abs().max()))
    return worst


@pytest.mark.parametrize("tensor_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_matrices_by_rows_or_columns_get_their_parts_of_the_whole(tensor_ranks: int) -> None:
    for worst in run_ranks(_direct_parts, 4, tensor_ranks):
        assert worst < 5e-3


def _move(parameters: list[Any], gradients: list[Tensor]) -> None:
    group = {"params": parameters, "algorithm": "muon", **MUON.group_options(MATRICES, has_adapters=False)}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    GroupedOptimizer([group], {"muon": MUON}).step()


def _cut_in_two(wholes: list[Tensor]) -> list[Any]:
    """Returns parameters that two ranks share: a tall matrix by rows, and a wide one by columns."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    module, cutter = nn.Module(), MatrixCutter(mesh["tp"])
    for number, whole in enumerate(wholes):
        module.register_parameter(str(number), nn.Parameter(whole.clone()))
        cutter.cut(module, str(number), number)
    uncut = init_device_mesh("cpu", (2,), mesh_dim_names=("uncut",))
    fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=place_by_cut(uncut))
    return list(module.parameters())


def _move_parts_of_one_shape() -> float:
    """Returns how far parts, whose shapes are equal here, move from where the whole matrices move."""
    generator = torch.Generator().manual_seed(7)
    wholes, gradients = (
        [torch.randn(shape, generator=generator) for shape in ((128, 64), (64, 128))] for _ in range(2)
    )
    expected = [nn.Parameter(whole.clone()) for whole in wholes]
    _move(expected, [gradient.clone() for gradient in gradients])
    parameters = _cut_in_two(wholes)
    assert parameters[0].to_local().shape == parameters[1].to_local().shape
    _move(parameters, [gradient.detach() for gradient in _cut_in_two(gradients)])
    return max(
        float((one.full_tensor() - other).abs().max() / (other - whole).abs().max())
        for one, other, whole in zip(parameters, expected, wholes, strict=True)
    )


def test_parts_of_one_shape_of_unlike_matrices_move_as_far_as_the_whole_ones() -> None:
    assert max(run_ranks(_move_parts_of_one_shape, 2)) < 2e-2


def _refuse_on_rank() -> str:
    mesh = init_device_mesh("cpu", (2,))
    by_columns = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="sharded by rows") as caught:
        direct_sharded(DIRECT, [by_columns.to_local()], [by_columns])
    assert dist.get_world_size() == 2
    return str(caught.value)


def test_a_matrix_sharded_by_columns_is_refused() -> None:
    assert "Shard(dim=1)" in run_ranks(_refuse_on_rank, 2)[0]


def test_a_batch_is_of_one_shape_and_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_matrices, "BATCH_BYTES", 2 * 2 * 7 * 24)
    shapes = [(7, 24), (24, 7), (16, 16), (7, 24), (7, 24)]
    assert [batch.members for batch in plan_batches(shapes)] == [[2], [0, 1], [3, 4]]
    assert [batch.members for batch in plan_batches(shapes, num_ranks=2)] == [[2], [0, 1, 3, 4]]
    assert [batch.members for batch in plan_batches([(200, 200)] * 2)] == [[0], [1]]


GENESIS_1B = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632)] * 20


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_ranks_share_the_operations_evenly(num_ranks: int) -> None:
    """No rank computes more than an even share and one matrix more, whether ranks hold whole matrices or rows."""
    bound = sum(map(count_flops, GENESIS_1B)) / num_ranks + max(map(count_flops, GENESIS_1B))
    shared = [0] * num_ranks
    for batch in plan_batches(GENESIS_1B, num_ranks):
        for index, owner in zip(batch.members, batch.owners, strict=True):
            shared[owner] += count_flops(GENESIS_1B[index])
    by_rows = [sum(count_flops(GENESIS_1B[i]) for i in owned) for owned in _plan_owners(GENESIS_1B, num_ranks)]
    assert sum(shared) == sum(by_rows) == sum(map(count_flops, GENESIS_1B))
    assert max(shared) <= bound
    assert max(by_rows) <= bound


class Made(TorchDispatchMode):
    """Notes the dtype of each stack of matrices that is made, and the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        if isinstance(made, Tensor) and made.ndim == 3 and made.numel():
            self.dtypes.add(made.dtype)
        return made


def test_no_stack_of_matrices_is_in_float32_on_an_accelerator() -> None:
    matrices = [matrix.to("meta") for matrix in _matrices()]
    with Made() as made:
        direct_matrices(DIRECT, matrices)
    assert made.dtypes == {torch.bfloat16}


def count_operators(num_layers: int) -> int:
    """Returns how many operators a step of Muon calls for layers of two shapes, one of them in both directions.

    Its tensors lie on no CPU, which rounds each product by operators of its own.
    """
    shapes = [(8, 8), (24, 8), (8, 24)] * num_layers
    parameters = [torch.nn.Parameter(torch.randn(shape, device="meta")) for shape in shapes]
    optimizer = GroupedOptimizer(
        [{"params": parameters, "algorithm": "muon", **MUON.group_options(MATRICES, has_adapters=False)}],
        {"muon": MUON},
    )
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()  # makes the momenta
    with Made() as made:
        optimizer.step()
    no_kernel = {"select", "unbind", "transpose", "expand", "view", "_unsafe_view", "new_empty"}
    names = [name.removeprefix("aten::") for name in made.names if name.startswith("aten::")]
    return sum(name not in no_kernel for name in names)


def test_a_step_of_muon_calls_as_many_operators_for_eight_layers_as_for_two() -> None:
    """On a GPU each is a kernel, whose launches a small model waits for."""
    assert count_operators(8) == count_operators(2) <= 51


def _orthogonalize_on_unlike_ranks() -> tuple[list[Tensor], int]:
    """Returns what a rank gets of each batch, and how many matrices it iterated; ranks round differently."""
    rank, num_iterated = dist.get_rank(), 0

    def iterate_unlike(batch: Tensor) -> Tensor:
        nonlocal num_iterated
        num_iterated += len(batch)
        return DIRECT(batch) * (1 + rank / 8)

    return direct_matrices(iterate_unlike, _matrices(), dist.group.WORLD), num_iterated


def test_replicas_that_round_differently_get_equal_bits_for_a_share_of_the_work() -> None:
    (first, num_first), (second, num_second) = run_ranks(_orthogonalize_on_unlike_ranks, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert num_first + num_second == len(SHAPES)
    assert min(num_first, num_second) >= 2


def _orthogonalize_on_unlike_replicas() -> tuple[list[Tensor], int]:
    """The same where two groups of two ranks hold the same rows."""
    rank, num_iterated = dist.get_rank(), 0

    def iterate_unlike(batch: Tensor) -> Tensor:
        nonlocal num_iterated
        num_iterated += len(batch)
        return DIRECT(batch) * (1 + rank / 8)

    mesh = init_device_mesh("cpu", (2, 2))
    sharded = [distribute_tensor(matrix, mesh, [Replicate(), Shard(0)]) for matrix in _matrices()]
    return direct_sharded(iterate_unlike, [tensor.to_local() for tensor in sharded], sharded), num_iterated


def test_replicas_of_shards_that_round_differently_get_equal_bits_for_a_share_of_the_work() -> None:
    ranks = run_ranks(_orthogonalize_on_unlike_replicas, 4)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(ranks[one][0], ranks[other][0], strict=True))
    assert sum(num_iterated for _, num_iterated in ranks) == len(SHAPES)
