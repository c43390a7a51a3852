"""Counts what FSDP2's `cpu_offload` moves, and the waits for it. The only file that uses FSDP2's private groups.

FSDP2 has no hook at these places, so that two methods of each offloaded group are wrapped: `wait_for_unshard`, before
which the group's parameters are on their way to the device, and `post_backward`, in which gradients leave it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from genesis.base.device import is_host, record_timer
from genesis.optim.transfers import Traffic


def count_host_units(model: nn.Module, device: torch.device, traffic: Traffic) -> None:
    """Counts the transfers of offloaded units from now on; on the CPU there are none.

    A wait is for a unit's copy and for the gather behind it, which has to wait for the copies of all ranks.

    Args:
        model: A sharded model.
        device: The device of training.
        traffic: Where they are counted.
    """
    if is_host(device.type):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in find_groups(module):
                is_counted = "wait_for_unshard" in vars(group)  # by an earlier fit
                if not is_counted and any(parameter.offload_to_cpu for parameter in group.fsdp_params):
                    _count_group(group, device, traffic)


def find_groups(module: FSDPModule) -> list[Any]:
    """Returns the groups of parameters that FSDP2 gathers together for a module, under any version of torch."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # before torch 2.13, which allows several
    return [] if group is None else [group]


def _count_group(group: Any, device: torch.device, traffic: Traffic) -> None:
    wait: Callable[[], None] = group.wait_for_unshard
    finish: Callable[..., None] = group.post_backward

    def wait_for_unshard() -> None:
        result = group._all_gather_result
        if result is None:  # gathered already
            wait()
            return
        traffic.to_device_bytes += sum(parameter._sharded_param_data.nbytes for parameter in group.fsdp_params)
        if group._all_gather_process_group.size() > 1:
            traffic.wait_for(result.all_gather_event, device)
            wait()
        else:  # one rank gathers nothing: FSDP2 copies here
            begin = record_timer(device)
            wait()
            traffic.note_wait(begin, record_timer(device))

    def post_backward(*arguments: Any) -> None:
        counted = [one for one in group.fsdp_params if group.reduce_grads and _has_gradient(one)]
        finish(*arguments)
        traffic.to_host_bytes += sum(parameter.sharded_param.to_local().nbytes for parameter in counted)

    group.wait_for_unshard, group.post_backward = wait_for_unshard, post_backward


def _has_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    return hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.grad is not None
