"""Optimizer states in the host's memory: each step they pass through the device, piece by piece.

The update runs on the device, by the kernel that updates all other parameters, so that its results are the same bits.
While a piece is updated, the next one comes to the device and the one before it goes back. This is another way than
FSDP2's `CPUOffloadPolicy` (`Sharded(cpu_offload=True)`), under which parameters and gradients lie in the host's memory,
too, and the host updates them.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from genesis.base.errors import UserError
from genesis.optim.algorithm import Algorithm, Parts
from genesis.optim.transfers import CopyLane, HostMemory, Mark, Traffic, mark_now

PIECE_BYTES: Final = 32 * 2**20
"""Bytes of a piece of one moment: enough for the full rate of a bus, and little beside what training holds."""
NUM_BUFFERS: Final = 3
"""Pieces on the device: one that comes, one that is updated, one that goes."""
_ALIGNMENT: Final = 64
"""Tensors and cuts lie at multiples of a cache line, as the cuts of the CPU's kernels do: results are the same bits."""


class Slice(NamedTuple):
    """A part of a parameter, in elements of its flat form, and its position in a piece, in bytes."""

    parameter: Tensor
    start: int
    end: int
    at: int
    is_last: bool


@dataclass(frozen=True)
class Piece:
    """What passes through the device together.

    Args:
        algorithm: The name of the algorithm that updates its parameters.
        start: Its first byte in the memory of each moment.
        num_bytes: Its bytes in each moment.
        slices: The parts of parameters whose moments it has.
    """

    algorithm: str
    start: int
    num_bytes: int
    slices: tuple[Slice, ...]


Buffer = tuple[Tensor, ...]
"""Bytes on the device for a piece of each moment."""
Update = Callable[[dict[str, Any], Parts], None]
"""Updates flat parts of parameters and their moments by the algorithm and the options of their group."""


def choose(sizes: Sequence[int], share: float) -> list[int]:
    """Returns the numbers of the largest tensors that have at least a share of all bytes, in their order. Pure.

    Example:
        >>> choose([1, 6, 3], 0.5)
        [1]
        >>> choose([1, 6, 3], 0.7)
        [1, 2]
    """
    chosen: list[int] = []
    missing = share * sum(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if missing <= 0:
            break
        chosen.append(index)
        missing -= sizes[index]
    return sorted(chosen)


def check_room(num_bytes: int, available_bytes: int | None, share: float) -> None:
    """Checks that the host has memory for the states. Pure.

    Raises:
        UserError: It has not.
    """
    if available_bytes is not None and num_bytes > available_bytes:
        raise UserError(
            f"optimizer_offload {share:g} needs {num_bytes / 2**30:,.1f} GiB of host memory on this rank, and "
            f"{available_bytes / 2**30:,.1f} GiB are available: lower it, or shard over more ranks"
        )


class StateOffload:
    """Keeps the moments of algorithms in the host's memory, for a share of an optimizer's parameters.

    The moments are made at once, so that memory is known to suffice before the first step, and a restore fills them.
    Between steps they are whole: `step` returns when the last piece is back. It leaves what an algorithm prepares of
    whole matrices in the place of the gradient, so that each step needs gradients of its own. Deterministic; it does
    not communicate.

    Args:
        optimizer: The optimizer, whose groups name their algorithm.
        algorithms: The algorithms by name.
        share: Share of the moments' bytes, from 0 to 1; at least so much is moved, in whole parameters.
        device: The device of training.
        available_bytes: The host's available memory for this rank; None if it is not known.
        piece_bytes: Bytes of a piece, a multiple of the size of a page.
        traffic: Where copies and waits are counted.

    Attributes:
        num_bytes: Bytes of the moments.

    Raises:
        UserError: The host lacks memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        algorithms: Mapping[str, Algorithm],
        share: float,
        device: torch.device,
        traffic: Traffic,
        *,
        available_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._optimizer, self._algorithms, self._device, self.traffic = optimizer, algorithms, device, traffic
        candidates: dict[Tensor, str] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = _local(parameter)
                # Others stay: a rank may hold no row of a parameter, and only contiguous ones have a flat form.
                if local.device.type == device.type and local.is_contiguous() and local.numel():
                    candidates[parameter] = group["algorithm"]
        sizes = [len(algorithms[name].moments) * _local(one).nbytes for one, name in candidates.items()]
        parameters = list(candidates)
        starts: dict[str, dict[Tensor, int]] = {name: {} for name in algorithms}
        used = dict.fromkeys(algorithms, 0)
        for parameter in (parameters[index] for index in choose(sizes, share)):
            name = candidates[parameter]
            starts[name][parameter] = used[name]
            used[name] += -(-_local(parameter).nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = sum(len(algorithms[name].moments) * num_bytes for name, num_bytes in used.items())
        check_room(self.num_bytes, available_bytes, share)
        self._memory = {
            name: [HostMemory(num_bytes, device, piece_bytes) for _ in algorithms[name].moments]
            for name, num_bytes in used.items()
            if num_bytes
        }
        self._held: dict[Tensor, dict[str, Tensor]] = {}
        for name, memories in self._memory.items():
            for parameter, start in starts[name].items():
                views = [_view(memory.bytes, parameter, start) for memory in memories]
                self._held[parameter] = dict(zip(algorithms[name].moments, views, strict=True))
        self._adopt(is_first=True)
        self._pieces = [
            piece for name in self._memory for piece in _cut(name, list(starts[name].items()), used[name], piece_bytes)
        ]
        self._lanes: tuple[CopyLane, CopyLane] | None = None

    def holds(self, parameter: Tensor) -> bool:
        """Returns whether the moments of a parameter are offloaded."""
        return parameter in self._held

    def _find_groups(self) -> dict[Tensor, dict[str, Any]]:
        """Returns the group of each parameter now: `Optimizer.load_state_dict` makes new groups."""
        return {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}

    def _adopt(self, *, is_first: bool = False) -> None:
        """Puts the offloaded moments into the optimizer's state, with the values of others in their place.

        Others are there after `Optimizer.load_state_dict`, which makes new tensors on the parameter's device.
        """
        groups = self._find_groups()
        for parameter, held in self._held.items():
            state = self._optimizer.state[parameter]
            if self._algorithms[groups[parameter]["algorithm"]].counts_steps and "step" not in state:
                state["step"] = torch.zeros((), device=parameter.device)
            for moment, tensor in held.items():
                found = state.get(moment)
                if found is None and not is_first:  # new memory has zeros
                    _local(tensor).zero_()
                elif found is not None and found is not tensor:
                    _local(tensor).copy_(_local(found))
                state[moment] = tensor

    @torch.no_grad()
    def step(self, update: Update) -> None:
        """Runs the updates of all offloaded moments whose parameters have a gradient, and waits until they are back.

        Args:
            update: The update.
        """
        passing = [piece for piece in self._pieces if any(one.parameter.grad is not None for one in piece.slices)]
        if not passing:
            return
        self._adopt()
        groups = self._find_groups()
        if self._lanes is None:
            self._lanes = (CopyLane(self._device, self.traffic), CopyLane(self._device, self.traffic))
        begin = mark_now(self._device)
        # They come from the current stream's memory, whose earlier work may still use it.
        free = deque((self._build_buffer(), begin) for _ in range(min(NUM_BUFFERS, len(passing))))
        coming: deque[tuple[Buffer, Mark]] = deque([self._fetch(passing[0], *free.popleft())])
        mark: Mark = None
        for piece, following in itertools.zip_longest(passing, passing[1:]):
            if following is not None:  # it comes while this one is updated
                coming.append(self._fetch(following, *free.popleft()))
            buffer, arrived = coming.popleft()
            self.traffic.wait_for(arrived, self._device)
            self._update(piece, buffer, groups, update)
            mark = self._store(piece, buffer, mark_now(self._device))
            free.append((buffer, mark))
        # The step ends when the last piece is back: the device has nothing else to do until then.
        self.traffic.wait_for(mark, self._device)
        if mark is not None:
            mark.synchronize()  # a save, and everybody else who reads the state, finds whole moments

    def _build_buffer(self) -> Buffer:
        most = max(piece.num_bytes for piece in self._pieces)
        count = max(map(len, self._memory.values()))
        return tuple(torch.empty(most, dtype=torch.uint8, device=self._device) for _ in range(count))

    def _find_on_host(self, piece: Piece) -> list[Tensor]:
        end = piece.start + piece.num_bytes
        return [memory.bytes[piece.start : end] for memory in self._memory[piece.algorithm]]

    def _fetch(self, piece: Piece, buffer: Buffer, after: Mark) -> tuple[Buffer, Mark]:
        assert self._lanes is not None
        mark: Mark = None
        for target, source in zip(buffer, self._find_on_host(piece), strict=False):
            mark = self._lanes[0].fetch(target[: piece.num_bytes], source, after)
        return buffer, mark

    def _store(self, piece: Piece, buffer: Buffer, after: Mark) -> Mark:
        assert self._lanes is not None
        mark: Mark = None
        for source, target in zip(buffer, self._find_on_host(piece), strict=False):
            mark = self._lanes[1].store(target, source[: piece.num_bytes], after)
        return mark

    def _update(self, piece: Piece, buffer: Buffer, groups: dict[Tensor, dict[str, Any]], update: Update) -> None:
        by_group: dict[int, list[Slice]] = {}
        for one in piece.slices:
            if one.parameter.grad is not None:
                by_group.setdefault(id(groups[one.parameter]), []).append(one)
        algorithm = self._algorithms[piece.algorithm]
        for slices in by_group.values():
            weights: list[Tensor] = []
            gradients: list[Tensor] = []
            steps: list[Tensor] = []
            moments: tuple[list[Tensor], ...] = tuple([] for _ in algorithm.moments)
            for one in slices:
                local = _local(one.parameter)
                weights.append(local.view(-1)[one.start : one.end])
                gradients.append(_flat_gradient(one.parameter)[one.start : one.end])
                if algorithm.counts_steps:
                    # The update counts a step for each slice: only the last one may count for the parameter.
                    step = self._optimizer.state[one.parameter]["step"]
                    steps.append(step if one.is_last else step.clone())
                num_bytes = (one.end - one.start) * local.element_size()
                for moment, bytes_here in zip(moments, buffer, strict=False):
                    moment.append(bytes_here[one.at : one.at + num_bytes].view(local.dtype))
            update(groups[slices[0].parameter], Parts(weights, gradients, moments, steps))


def _cut(algorithm: str, starts: Sequence[tuple[Tensor, int]], num_bytes: int, piece_bytes: int) -> list[Piece]:
    """Returns the pieces of the moments of parameters that begin at some bytes. Pure."""
    found: dict[int, list[Slice]] = {}
    for parameter, start in starts:
        local = _local(parameter)
        end = start + local.nbytes
        for number in range(start // piece_bytes, -(-end // piece_bytes)):
            low, high = max(start, number * piece_bytes), min(end, (number + 1) * piece_bytes)
            size = local.element_size()
            found.setdefault(number, []).append(
                Slice(parameter, (low - start) // size, (high - start) // size, low - number * piece_bytes, high == end)
            )
    return [
        Piece(algorithm, number * piece_bytes, min(piece_bytes, num_bytes - number * piece_bytes), tuple(slices))
        for number, slices in sorted(found.items())
    ]


def _view(memory: Tensor, parameter: Tensor, start: int) -> Tensor:
    """Returns a moment of a parameter, which begins at a byte of some memory."""
    local = _local(parameter)
    held = memory[start : start + local.nbytes].view(local.dtype).view(local.shape)
    # Like the parameter, so that checkpoints read the shard's position from it. `from_local` would move it to the
    # device of the mesh.
    if not isinstance(parameter, DTensor):
        return held
    return DTensor(held, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat_gradient(parameter: Tensor) -> Tensor:
    """Returns a flat view of a parameter's gradient on this rank."""
    assert parameter.grad is not None
    if not _local(parameter.grad).is_contiguous():
        parameter.grad = parameter.grad.contiguous()  # a copy could not be written to
    return _local(parameter.grad).view(-1)
