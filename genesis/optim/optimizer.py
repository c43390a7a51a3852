"""One optimizer whose groups name their algorithm: automatic optimization takes only one optimizer."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from genesis.base.device import is_host
from genesis.optim.newton_schulz import (
    COEFFICIENTS,
    EPS,
    NUM_STEPS,
    count_ranks,
    orthogonalize_batch,
    orthogonalize_sharded,
    plan_batches,
    require_whole_matrices,
    stack_as,
)
from genesis.optim.offload import PIECE_BYTES, Slices, StateOffload
from genesis.optim.piece_memory import DiskRates
from genesis.optim.transfers import Traffic

_MATRIX_DIMS: Final = 2

# The keys of torch's own groups, so that a state can be moved between this optimizer and torch's.
_GROUP_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
    },
    "muon": {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": COEFFICIENTS,
        "eps": EPS,
        "ns_steps": NUM_STEPS,
        "adjust_lr_fn": None,
    },
}

# Options of torch's optimizers that this optimizer does not support.
_FIXED = {
    "amsgrad",
    "maximize",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "ns_coefficients",
    "ns_steps",
}


class GroupedOptimizer(Optimizer):
    """AdamW and Muon in one: each group has a key `algorithm`, `adamw` or `muon`, and that algorithm's options.

    States and options have the names and the meaning of torch.optim.AdamW and torch.optim.Muon. Deterministic. It
    communicates only for Muon: on sharded matrices (`orthogonalize_sharded`), and after `share_matrices`. It leaves
    unscaling and skipping to the gradient scaler.

    Args:
        params: The groups of parameters.

    Raises:
        ValueError: A group's algorithm is unknown, or it sets an option that only torch's own optimizers have.
        UserError: Muon gets a stack of matrices that ranks cut.
    """

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        groups = []
        for group in params:
            known = _GROUP_DEFAULTS.get(group["algorithm"])
            if known is None:
                raise ValueError(
                    f"algorithm {group['algorithm']!r} is unknown: a group takes one of {sorted(_GROUP_DEFAULTS)}"
                )
            for key in _FIXED & known.keys() & group.keys():
                if group[key] != known[key]:
                    raise ValueError(
                        f"{key} is {group[key]!r}: the group's {group['algorithm']} has {known[key]!r} only"
                    )
            groups.append(known | group)
        super().__init__(groups, {})
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                sharded = {i: one for i, one in enumerate(group["params"]) if isinstance(one, DTensor)}
                require_whole_matrices(list(_find_stacks(sharded).values()))
        self._replicas: dist.ProcessGroup | None = None
        self._offload: StateOffload | None = None
        self._host_updates: Traffic | None = None
        self._divisor: Tensor | None = None

    def offload_states(
        self,
        share: float,
        device: torch.device,
        traffic: Traffic,
        *,
        available_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        directory: Path | None = None,
    ) -> None:
        """Moves a share of the states into the host's memory or files, for all later steps; see `StateOffload`."""
        self._offload = StateOffload(
            self,
            share,
            device,
            traffic,
            available_bytes=available_bytes,
            piece_bytes=piece_bytes,
            directory=directory,
        )

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the states that are offloaded."""
        return 0 if self._offload is None else self._offload.num_bytes

    @property
    def disk_rates(self) -> DiskRates | None:
        """How fast the disk of the states was when they were moved there; None without states on one."""
        return None if self._offload is None else self._offload.disk_rates

    def count_host_updates(self, traffic: Traffic) -> None:
        """Counts the time of updates as a wait of the device, whose parameters are in the host's memory."""
        self._host_updates = traffic

    def share_matrices(self, replicas: dist.ProcessGroup) -> None:
        """Makes Muon compute each whole matrix on only one rank, which sends the result to the others.

        Args:
            replicas: Ranks that hold the same parameters and gradients and step together.
        """
        self._replicas = replicas

    def scale_gradients(self, factor: float) -> None:
        """Multiplies every gradient by `factor`: at once, or in the step that follows. Neither communicates nor waits.

        On accelerators AdamW's fused kernel scales each gradient where it reads it, and writes it back: the gradients
        are read once less. It divides by the inverse, which may change a gradient's last bit. Muon multiplies at once,
        because its momentum and its update both read the gradient, and so does the host, to keep the bits of its
        losses.
        """
        now = []
        for group in self.param_groups:
            if _divides_in_kernel(group):
                device = group["params"][0].device
                # Filled on the device: a number that the host copies there would make the host wait.
                self._divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
            else:
                now += [_local_gradient(parameter) for parameter in group["params"] if parameter.grad is not None]
        if now:
            torch._foreach_mul_(now, factor)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Runs the closure, if there is one, then updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # After the closure, in which Lightning runs forward, backward and the clip: a vetoed window has no gradient
        # by now, so neither the moments nor the weight decay of any parameter change.
        if self._offload is not None:
            self._offload.step({"adamw": self._step_slices, "muon": _apply_momentum})
        begin = time.perf_counter()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "adamw":
                parameters = [parameter for parameter in parameters if not self._is_offloaded(parameter)]
            if parameters:
                (self._step_adamw if group["algorithm"] == "adamw" else self._step_muon)(group, parameters)
        self._divisor = None
        if self._host_updates is not None:
            self._host_updates.idle_seconds += time.perf_counter() - begin
        return loss

    def _is_offloaded(self, parameter: Tensor) -> bool:
        return self._offload is not None and self._offload.holds(parameter)

    def _step_slices(self, group: dict[str, Any], parts: Slices) -> None:
        averages, squares = parts.moments
        self._update_adamw(group, parts.weights, parts.gradients, averages, squares, parts.steps)

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            # Like the parameter, so a DTensor if the parameter is one: checkpoints read the shard's position from it.
            if not state:
                state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        # AdamW works element by element, so each rank only needs its shard.
        self._update_adamw(
            group,
            [_local(parameter) for parameter in parameters],
            [_local_gradient(parameter) for parameter in parameters],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
        )

    def _update_adamw(
        self,
        group: dict[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        averages: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: list[Tensor],
    ) -> None:
        adamw(
            list(weights),
            list(gradients),
            list(averages),
            list(squares),
            [],
            steps,
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=self._divisor if _divides_in_kernel(group) else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _add_momentum(
        self, group: dict[str, Any], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Adds gradients to the momentum on the device, and returns that by the number of its parameter.

        Moments on the host have passed through the device by now, and left the update in the gradient's place.
        """
        here = {i: one for i, one in enumerate(parameters) if not self._is_offloaded(one)}
        for parameter in here.values():
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = {i: _local(self.state[parameter]["momentum_buffer"]) for i, parameter in here.items()}
        if buffers:
            torch._foreach_lerp_(list(buffers.values()), [gradients[i] for i in buffers], 1 - group["momentum"])
        return buffers

    def _step_muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients = [_local_gradient(parameter) for parameter in parameters]
        buffers = self._add_momentum(group, parameters, gradients)
        # Decoupled decay scales only the parameter and never enters the momentum.
        torch._foreach_mul_([_local(parameter) for parameter in parameters], 1 - group["lr"] * group["weight_decay"])

        def updates_of(indices: Sequence[_Matrix]) -> list[Tensor]:
            updates = [_select(gradients[index.parameter], index) for index in indices]
            here = [number for number, index in enumerate(indices) if index.parameter in buffers]
            found = [_select(buffers[indices[number].parameter], indices[number]) for number in here]
            if found and group["nesterov"]:
                found = list(torch._foreach_lerp([updates[number] for number in here], found, group["momentum"]))
            for number, update in zip(here, found, strict=True):
                updates[number] = update
            return updates

        def apply(indices: Sequence[_Matrix], directions: Sequence[Tensor]) -> None:
            weights = [_select(_local(parameters[index.parameter]), index) for index in indices]
            for alike in _list_alike(weights, directions):
                of_whole = parameters[indices[alike[0]].parameter].shape[-2:]
                _add_all(
                    [weights[number] for number in alike],
                    [directions[number] for number in alike],
                    -group["lr"] * lr_ratio(of_whole, group["adjust_lr_fn"]),
                )

        def apply_batches(matrices: Sequence[_Matrix], replicas: dist.ProcessGroup | None) -> None:
            # Each batch is applied and freed before the next: the updates of a whole model would not fit into memory.
            shapes = [parameters[index.parameter].shape[-2:] for index in matrices]
            for batch in plan_batches(shapes, count_ranks(replicas)):
                members = [matrices[number] for number in batch.members]
                apply(members, orthogonalize_batch(partial(_read, updates_of, members), batch.owners, replicas))

        sharded = {i: parameter for i, parameter in enumerate(parameters) if isinstance(parameter, DTensor)}
        apply_batches(
            [index for i in range(len(parameters)) if i not in sharded for index in _list_matrices(i, parameters[i])],
            self._replicas,
        )
        # A rank holds whole matrices of a stack that is sharded along its first dimension.
        stacks = _find_stacks(sharded)
        for matrices in _list_by_device(stacks):
            apply_batches(matrices, None)
        rows = [_Matrix(i) for i in sharded if i not in stacks]
        if rows:
            apply(rows, orthogonalize_sharded(updates_of(rows), [sharded[i] for i, _ in rows]))


def _divides_in_kernel(group: dict[str, Any]) -> bool:
    """Returns whether the kernel of a group's update divides the gradients by a number on their device."""
    if group["algorithm"] != "adamw" or not group["fused"]:
        return False
    kinds = {parameter.device.type for parameter in group["params"]}
    return bool(kinds) and not any(map(is_host, kinds))


def _apply_momentum(group: dict[str, Any], parts: Slices) -> None:
    """Adds gradients to their momentum, and leaves what Muon orthogonalises in the gradients' place.

    The momentum can go back to the host at once, and the step needs no further memory on the device. These operations
    give each element the same bits wherever a tensor is cut.
    """
    (buffers,) = parts.moments
    torch._foreach_lerp_(buffers, parts.gradients, 1 - group["momentum"])
    if group["nesterov"]:
        torch._foreach_lerp_(parts.gradients, buffers, group["momentum"])
    else:
        torch._foreach_copy_(parts.gradients, buffers)


class _Matrix(NamedTuple):
    """One matrix of a group.

    Args:
        parameter: The number of its parameter.
        number: Its number in this rank's part of a stack; None if the parameter is one matrix.
    """

    parameter: int
    number: int | None = None


def _list_matrices(parameter: int, tensor: Tensor) -> list[_Matrix]:
    if tensor.ndim == _MATRIX_DIMS:
        return [_Matrix(parameter)]
    return [_Matrix(parameter, number) for number in range(len(tensor))]


def _find_stacks(parameters: Mapping[int, DTensor]) -> dict[int, DTensor]:
    return {number: parameter for number, parameter in parameters.items() if parameter.ndim > _MATRIX_DIMS}


def _list_by_device(stacks: Mapping[int, DTensor]) -> list[list[_Matrix]]:
    """Returns this rank's matrices of some parameters; those of offloaded experts are multiplied on the host."""
    found: dict[torch.device, list[_Matrix]] = {}
    for parameter, stack in stacks.items():
        found.setdefault(stack.device, []).extend(_list_matrices(parameter, _local(stack)))
    return list(found.values())


def _select(tensor: Tensor, index: _Matrix) -> Tensor:
    return tensor if index.number is None else tensor[index.number]


def _read(
    updates_of: Callable[[Sequence[_Matrix]], list[Tensor]], members: Sequence[_Matrix], numbers: Sequence[int]
) -> list[Tensor]:
    return updates_of([members[number] for number in numbers])


def _list_alike(weights: Sequence[Tensor], directions: Sequence[Tensor]) -> list[list[int]]:
    """Returns the numbers of the matrices that are updated together: of one shape, direction and device."""
    found: dict[Any, list[int]] = {}
    for number, (weight, direction) in enumerate(zip(weights, directions, strict=True)):
        found.setdefault((weight.shape, direction.shape, weight.device), []).append(number)
    return list(found.values())


def _add_all(weights: Sequence[Tensor], directions: Sequence[Tensor], factor: float) -> None:
    """Adds the directions times a factor to weights of one shape, transposed where they lie the other way round."""
    like, is_turned = weights[0], weights[0].shape != directions[0].shape
    if is_turned or directions[0].dtype != like.dtype:
        directions = stack_as(directions, like.dtype, is_turned=is_turned).unbind()
    torch._foreach_add_(list(weights), list(directions), alpha=factor)


def lr_ratio(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    """Returns the factor of Muon's learning rate for a matrix of a shape.

    `original` (and None) is Jordan's sqrt(max(1, rows / columns)). `match_rms_adamw` gives updates the size of AdamW's,
    so that its learning rate and weight decay fit (Liu et al., Muon is Scalable for LLM Training, 2025, section 2.2).
    """
    rows, columns = shape
    return (
        0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return _local(parameter.grad)
