"""One optimizer whose groups name their algorithm: automatic optimization takes only one optimizer."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from genesis.base.device import is_host
from genesis.base.errors import UserError, numbered
from genesis.optim.algorithm import Algorithm, Form, Parts
from genesis.optim.offload import PIECE_BYTES, StateOffload
from genesis.optim.transfers import Traffic
from genesis.optim.whole_matrices import (
    count_ranks,
    direct_batch,
    direct_sharded,
    plan_batches,
    require_whole_matrices,
    stack_as,
)

_MATRIX_DIMS: Final = 2
_FORM_KEYS: Final = ("algorithm", "block")
"""The options of a group by which its states have their shapes."""


class GroupedOptimizer(Optimizer):
    """Several algorithms in one: each group has a key `algorithm` with the name of one, and that one's options.

    Deterministic. It communicates only for algorithms that need whole matrices: on sharded ones (`direct_sharded`), and
    after `share_matrices`. It leaves unscaling and skipping to the gradient scaler. A step may write to the gradients.

    Args:
        params: The groups of parameters.
        algorithms: The algorithms by name.

    Raises:
        UserError: An algorithm that needs whole matrices gets a stack of matrices that ranks cut, or one whose moments
            have blocks gets a parameter of which ranks cut a block.
    """

    def __init__(self, params: Iterable[dict[str, Any]], algorithms: Mapping[str, Algorithm]) -> None:
        super().__init__(params, {})
        self.algorithms = dict(algorithms)
        for group in self.param_groups:
            if self._algorithm_of(group).whole_matrices:
                sharded = {i: one for i, one in enumerate(group["params"]) if isinstance(one, DTensor)}
                require_whole_matrices(group["algorithm"], list(_find_stacks(sharded).values()))
            if self._algorithm_of(group).forms:
                # At once, since a restore cannot know how ranks share what has not the shape of its parameter.
                for parameter in group["params"]:
                    if isinstance(parameter, DTensor):
                        self.state[parameter] = _build_state(self._algorithm_of(group), parameter)
        self._built = [{key: group.get(key) for key in _FORM_KEYS} for group in self.param_groups]
        self._replicas: dist.ProcessGroup | None = None
        self._offload: StateOffload | None = None
        self._host_updates: Traffic | None = None
        self._divisor: Tensor | None = None

    def _algorithm_of(self, group: Mapping[str, Any]) -> Algorithm:
        return self.algorithms[group["algorithm"]]

    def offload_states(
        self,
        share: float,
        device: torch.device,
        traffic: Traffic,
        *,
        available_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Moves a share of the states into the host's memory, for all later steps; see `StateOffload`."""
        self._offload = StateOffload(
            self,
            self.algorithms,
            share,
            device,
            traffic,
            available_bytes=available_bytes,
            piece_bytes=piece_bytes,
        )

    def count_host_updates(self, traffic: Traffic) -> None:
        """Counts the time of updates as a wait of the device, whose parameters are in the host's memory."""
        self._host_updates = traffic

    def share_matrices(self, replicas: dist.ProcessGroup) -> None:
        """Makes each whole matrix be computed on only one rank, which sends the result to the others.

        Args:
            replicas: Ranks that hold the same parameters and gradients and step together.
        """
        self._replicas = replicas

    def scale_gradients(self, factor: float) -> None:
        """Multiplies every gradient by `factor`: at once, or in the step that follows. Neither communicates nor waits.

        On accelerators a kernel that divides (`Algorithm.divides`) scales each gradient where it reads it, and writes
        it back: the gradients are read once less. It divides by the inverse, which may change a gradient's last bit.
        Other algorithms' gradients are multiplied at once, and so are all on the host, to keep the bits of its losses.
        """
        now = []
        for group in self.param_groups:
            if self._divides_in_kernel(group):
                device = group["params"][0].device
                # Filled on the device: a number that the host copies there would make the host wait.
                self._divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
            else:
                now += [_local_gradient(parameter) for parameter in group["params"] if parameter.grad is not None]
        if now:
            torch._foreach_mul_(now, factor)

    def _divides_in_kernel(self, group: dict[str, Any]) -> bool:
        """Returns whether the kernel of a group's update divides the gradients by a number on their device."""
        if not self._algorithm_of(group).divides(group):
            return False
        kinds = {parameter.device.type for parameter in group["params"]}
        return bool(kinds) and not any(map(is_host, kinds))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; moments keep their own types, which torch would cast to those of the parameters."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for moment in self._algorithm_of(group).forms:
                    if moment in self.state[parameter]:
                        given = state_dict["state"][number][moment]
                        self.state[parameter][moment] = given.to(parameter.device, copy=True)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Runs the closure, if there is one, then updates every parameter that has a gradient.

        Raises:
            UserError: A restore has brought states of another algorithm.
        """
        self._check_states()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # After the closure, in which Lightning runs forward, backward and the clip: a vetoed window has no gradient
        # by now, so neither the moments nor the weight decay of any parameter change.
        if self._offload is not None:
            self._offload.step(self._update)
        begin = time.perf_counter()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            # Moments on the host have passed through the device by now.
            here = [
                parameter for parameter in parameters if self._offload is None or not self._offload.holds(parameter)
            ]
            if here:
                self._update(group, self._find_parts(self._algorithm_of(group), here))
            if parameters and self._algorithm_of(group).whole_matrices:
                self._move_matrices(group, parameters)
        self._divisor = None
        if self._host_updates is not None:
            self._host_updates.idle_seconds += time.perf_counter() - begin
        return loss

    def _check_states(self) -> None:
        """Refuses groups whose restored states are of another algorithm, or in other blocks."""
        for group, built in zip(self.param_groups, self._built, strict=True):
            for key, value in built.items():
                if group.get(key) != value:
                    raise UserError(
                        f"model.optimizer: the states of {group.get('name', 'a group')} were saved with the {key} "
                        f"{group.get(key)}, and this run has the {key} {value}: give the optimizer of the run that "
                        "saved, or leave its states with --checkpoint.restore no_optimizer"
                    )

    def _update(self, group: dict[str, Any], parts: Parts) -> None:
        is_here = self._divisor is not None and self._divides_in_kernel(group)
        self._algorithm_of(group).update(group, parts._replace(divisor=self._divisor) if is_here else parts)

    def _find_parts(self, algorithm: Algorithm, parameters: Sequence[Tensor]) -> Parts:
        """Returns whole parameters of this rank, with zeros for the moments of those that have none yet."""
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state.update(_build_state(algorithm, parameter))
        # The update works element by element, so each rank only needs its shard.
        return Parts(
            [_local(parameter) for parameter in parameters],
            [_local_gradient(parameter) for parameter in parameters],
            tuple([_local(state[moment]) for state in states] for moment in algorithm.moments),
            [state["step"] for state in states] if algorithm.counts_steps else [],
        )

    def _move_matrices(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Moves matrices in the directions of what their update has left in the gradients' place."""
        algorithm = self._algorithm_of(group)
        direct = algorithm.direct
        updates = [_local_gradient(parameter) for parameter in parameters]

        def read(members: Sequence[_Matrix], numbers: Sequence[int]) -> list[Tensor]:
            return [_select(updates[members[number].parameter], members[number]) for number in numbers]

        def apply(indices: Sequence[_Matrix], directions: Sequence[Tensor]) -> None:
            weights = [_select(_local(parameters[index.parameter]), index) for index in indices]
            # Ranks may hold parts of one shape of matrices of different shapes, whose steps differ.
            wholes = [parameters[index.parameter].shape[-2:] for index in indices]
            for alike in _list_alike(weights, directions, wholes):
                _add_all(
                    [weights[number] for number in alike],
                    [directions[number] for number in alike],
                    algorithm.step_size(group, wholes[alike[0]]),
                )

        def apply_batches(matrices: Sequence[_Matrix], replicas: dist.ProcessGroup | None) -> None:
            # Each batch is applied and freed before the next: the directions of a model would not fit into memory.
            shapes = [parameters[index.parameter].shape[-2:] for index in matrices]
            for batch in plan_batches(shapes, count_ranks(replicas)):
                members = [matrices[number] for number in batch.members]
                apply(members, direct_batch(direct, partial(read, members), batch.owners, replicas))

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
            apply(rows, direct_sharded(direct, [updates[i] for i, _ in rows], [sharded[i] for i, _ in rows]))


class _Matrix(NamedTuple):
    """One matrix of a group.

    Args:
        parameter: The number of its parameter.
        number: Its number in this rank's part of a stack; None if the parameter is one matrix.
    """

    parameter: int
    number: int | None = None


def _build_state(algorithm: Algorithm, parameter: Tensor) -> dict[str, Tensor]:
    """Returns the states of a parameter before its first update, all zeros.

    Raises:
        UserError: Ranks cut a block of a row.
    """
    state = {"step": torch.zeros((), device=parameter.device)} if algorithm.counts_steps else {}
    # Like the parameter, so DTensors if the parameter is one: checkpoints read the shard's position from them.
    for moment in algorithm.moments:
        form = algorithm.forms.get(moment, Form())
        if form.block == 1:
            state[moment] = torch.zeros_like(parameter, dtype=form.dtype)
        elif isinstance(parameter, DTensor):
            state[moment] = _build_sharded(form, parameter)
        else:
            state[moment] = parameter.new_zeros(form.shape(parameter.shape), dtype=form.dtype)
    return state


def _build_sharded(form: Form, parameter: DTensor) -> DTensor:
    """Returns zeros for the blocks of a parameter's rows, spread over ranks as the parameter is."""
    local, spec = parameter.to_local(), parameter._spec
    if local.shape[-1] != parameter.shape[-1] and local.shape[-1] % form.block:
        raise UserError(
            f"the optimizer's states have blocks of {numbered(form.block, 'values')}, and ranks have "
            f"{local.shape[-1]} of the {parameter.shape[-1]} values of a row: give model.optimizer.init_args.block a "
            "divisor of that, or let fewer ranks share the columns"
        )
    values = local.new_zeros(form.shape(local.shape), dtype=form.dtype)
    whole = torch.empty(form.shape(parameter.shape), dtype=form.dtype or parameter.dtype, device="meta")
    assert spec.tensor_meta is not None
    meta = spec.tensor_meta._replace(shape=whole.shape, stride=whole.stride(), dtype=whole.dtype)
    # `from_local` would move it to the device of the mesh.
    return DTensor(values, replace(spec, tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]


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


def _list_alike(
    weights: Sequence[Tensor], directions: Sequence[Tensor], wholes: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Returns the numbers of the matrices that are updated together: of one shape here and as a whole, and device."""
    found: dict[Any, list[int]] = {}
    for number, (weight, direction, whole) in enumerate(zip(weights, directions, wholes, strict=True)):
        found.setdefault((weight.shape, direction.shape, whole, weight.device), []).append(number)
    return list(found.values())


def _add_all(weights: Sequence[Tensor], directions: Sequence[Tensor], factor: float) -> None:
    """Adds the directions times a factor to weights of one shape, transposed where they lie the other way round."""
    like, is_turned = weights[0], weights[0].shape != directions[0].shape
    if is_turned or directions[0].dtype != like.dtype:
        directions = stack_as(directions, like.dtype, is_turned=is_turned).unbind()
    torch._foreach_add_(list(weights), list(directions), alpha=factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return _local(parameter.grad)
