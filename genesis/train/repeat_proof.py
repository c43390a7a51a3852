"""A proof at the start of a fit that this accelerator gives the same gradients for the same micro-batch twice.

A kernel that adds in any order, as by atomics, shows only where many parts are added. So the proof takes what the run
itself does: its first micro-batch, with the run's model, documents and kernels. It costs two forwards and
backwards and changes nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from genesis.base.device import is_host, name_device
from genesis.base.errors import UserError
from genesis_callbacks.checkpoint.digest import digest_tensor

LOSS = "the loss"


@dataclass(frozen=True)
class Repetition:
    """The comparison of two passes of a micro-batch.

    Args:
        names: The loss, and the parameters with a gradient, in the order of the model.
        differing: Those of them whose bits differ between the passes.
        seconds: The time of the second pass with its digests, which needs no compilation.
    """

    names: tuple[str, ...]
    differing: tuple[str, ...]
    seconds: float


def is_proof_needed(device: torch.device) -> bool:
    """Returns whether a run on this device has promised kernels that repeat. Those of the CPU always do."""
    return torch.are_deterministic_algorithms_enabled() and not is_host(device.type)


def repeat_pass(run: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]) -> Repetition:
    """Runs a forward and a backward twice, and compares loss and gradients bit for bit. Waits for the device.

    It compares 64-bit digests, so that no second copy of the gradients needs memory.

    Args:
        run: Removes all gradients, runs a forward and a backward from the same seed, and returns the loss.
        parameters: Names of the parameters whose gradients are compared; of a sharded one, this rank's shard.
    """
    first = _digest_pass(run, parameters)
    begin = time.perf_counter()
    second = _digest_pass(run, parameters)
    differing = tuple(name for name in first if first[name] != second.get(name))
    return Repetition(tuple(first), differing, time.perf_counter() - begin)


def _digest_pass(run: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    digests = {LOSS: digest_tensor(run().detach())}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            digests[name] = digest_tensor(gradient)
    return digests


def check_repeats(found: Repetition, device: torch.device) -> None:
    """Refuses a device on which the passes differ.

    Raises:
        UserError: Something differs; the message names the tensor that the backward reaches first.
    """
    if not found.differing:
        return
    # The backward goes from the last parameter to the first: the fault is at or behind the last that differs.
    where = LOSS if LOSS in found.differing else found.differing[-1]
    raise UserError(
        f"{device} ({name_device(device.type, device.index or 0)}) gave other bits when the first micro-batch was "
        f"computed again: {len(found.differing)} of {len(found.names)} differ, first {where}; a resumed run would not "
        "equal one that was never killed. Give --trainer.deterministic false to train all the same"
    )
