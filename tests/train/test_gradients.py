"""The norm of gradients that live on any mixture of meshes."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from genesis.train.gradients import global_gradient_norm
from genesis_callbacks.testing import run_ranks

CPU = torch.device("cpu")


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def norm_of_mixture(num_stages: int) -> tuple[float, float]:
    """Returns the norm that is found and that of the whole tensors, on one stage or with other tensors on each."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    stage = rank // 2 if num_stages == 2 else 0
    # On two stages the outer axis is that of the stages.
    meshes: list[tuple[DeviceMesh, Sequence[Shard | Replicate]]] = [(world["inner"], [Shard(0)])]
    meshes.append((world["inner"], [Replicate()]))
    if num_stages == 1:
        meshes += [
            (world["outer"], [Shard(1)]),
            (world, [Shard(0), Shard(1)]),
            (world, [Replicate(), Shard(0)]),
            (world, [Shard(0), Replicate()]),
            (world, [Replicate(), Replicate()]),
        ]
    wholes = [values(100 * stage + number, 5, 3) for number in range(len(meshes) + 1)]
    gradients: list[Tensor] = [wholes[-1]]
    for tensor, (mesh, placements) in zip(wholes, meshes, strict=False):
        gradients.append(distribute_tensor(tensor, mesh, placements, src_data_rank=None))
    found = global_gradient_norm(map(with_gradient, gradients), CPU, num_stage_ranks=4 // num_stages, world_size=4)
    every = [values(100 * s + number, 5, 3) for s in range(num_stages) for number in range(len(wholes))]
    return found, math.sqrt(sum(float(tensor.double().square().sum()) for tensor in every))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_element_counts_once_whatever_mesh_it_lives_on(num_stages: int) -> None:
    answers = run_ranks(norm_of_mixture, 4, num_stages)
    assert len({found for found, _ in answers}) == 1
    for found, expected in answers:
        assert found == pytest.approx(expected, rel=1e-6)


def norm_under_tensor_parallelism_and_shards() -> tuple[float, float, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    layer = nn.Linear(6, 8, bias=False)
    alone = nn.Linear(6, 8, bias=False)
    with torch.no_grad():
        for one in (layer, alone):
            one.weight.copy_(values(1, 8, 6))
    parallelize_module(layer, mesh["tp"], ColwiseParallel(use_local_output=False))
    fully_shard(layer, mesh=mesh["fsdp"])
    rows = values(2, 4, 6)
    layer(rows).full_tensor().square().mean().backward()
    alone(rows).square().mean().backward()
    assert alone.weight.grad is not None
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    kinds = [type(placement).__name__ for placement in gradient.placements]
    expected = float(alone.weight.grad.norm())
    return global_gradient_norm(layer.parameters(), CPU, num_stage_ranks=4, world_size=4), expected, kinds


def test_strided_shards_are_shards() -> None:
    for found, expected, kinds in run_ranks(norm_under_tensor_parallelism_and_shards, 4):
        assert kinds[0] == "_StridedShard"
        assert found == pytest.approx(expected, rel=1e-6)


def norm_of_partial() -> None:
    mesh = init_device_mesh("cpu", (2,))
    gradient = DTensor.from_local(values(0, 3), mesh, [Partial()])
    with pytest.raises(AssertionError, match="no partial gradient"):
        global_gradient_norm([with_gradient(gradient)], CPU, num_stage_ranks=2, world_size=2)


def test_a_gradient_that_is_not_summed_yet_has_no_norm() -> None:
    run_ranks(norm_of_partial, 2)


def test_alone_nothing_communicates_and_no_gradient_is_zero() -> None:
    assert not dist.is_initialized()
    gradients = [values(0, 4, 3), values(1, 7)]
    found = global_gradient_norm(map(with_gradient, gradients), CPU, num_stage_ranks=1, world_size=1)
    assert found == float(torch.nn.utils.get_total_norm(gradients))
    assert global_gradient_norm([nn.Parameter(torch.zeros(2))], CPU, num_stage_ranks=1, world_size=1) == 0.0
