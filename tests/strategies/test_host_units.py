"""The offload of FSDP2 is counted: each group of parameters is found, whatever the version of torch calls it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from genesis.optim.transfers import Traffic
from genesis.strategies.host_units import count_host_units, find_groups
from genesis_callbacks.testing import run_ranks


def shard_and_count() -> tuple[int, list[bool]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh)
    count_host_units(model, torch.device("cuda"), Traffic())
    groups = [group for module in model.modules() if isinstance(module, FSDPModule) for group in find_groups(module)]
    return len(groups), ["wait_for_unshard" in vars(group) for group in groups]


def test_each_offloaded_group_of_the_installed_torch_is_counted_and_no_other() -> None:
    assert run_ranks(shard_and_count, 1) == [(2, [False, True])]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (SimpleNamespace(_fsdp_param_groups=["a", "b"]), ["a", "b"]),
        (SimpleNamespace(_fsdp_param_group="a"), ["a"]),  # torch 2.11 and 2.12
        (SimpleNamespace(_fsdp_param_group=None), []),
    ],
)
def test_groups_are_found_under_the_name_of_each_version(state: Any, expected: list[str]) -> None:
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: state)
    assert find_groups(module) == expected
