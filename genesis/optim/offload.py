"""Optimizer states in the host's memory or on a disk: each step they pass through the device, piece by piece.

The update runs on the device, by the kernel that updates all other parameters, so that its results are the same bits.
While a piece is updated, the next one comes to the device and the one before it goes back. This is another way than
FSDP2's `CPUOffloadPolicy` (`Sharded(cpu_offload=True)`), under which parameters and gradients lie in the host's memory,
too, and the host updates them.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from genesis.base.errors import UserError
from genesis.optim.piece_memory import (
    MOMENTS,
    DiskPieces,
    DiskRates,
    Extent,
    HostPieces,
    Passage,
    PieceMemory,
)
from genesis.optim.transfers import CopyLane, Mark, Traffic, mark_now

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
        algorithm: The algorithm that updates its parameters.
        start: Its first byte in the memory of each moment.
        num_bytes: Its bytes in each moment.
        slices: The parts of parameters whose moments it has.
    """

    algorithm: str
    start: int
    num_bytes: int
    slices: tuple[Slice, ...]


class Slices(NamedTuple):
    """What an update gets: flat parts of parameters of one group.

    Args:
        weights: Parts of the parameters.
        gradients: Parts of their gradients, which may be written to.
        moments: Parts of each moment, in the order of `MOMENTS`, on the device.
        steps: The count of steps of each part's parameter; empty without such counts.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    moments: tuple[list[Tensor], ...]
    steps: list[Tensor]


Buffer = tuple[Tensor, ...]
"""Bytes on the device for a piece of each moment."""
Update = Callable[[dict[str, Any], Slices], None]
"""Updates parts of parameters, or their moments, by the options of their group."""


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
    """Keeps the moments of AdamW and Muon in the host's memory, or in files, for a share of an optimizer's parameters.

    The moments are made at once, so that memory is known to suffice before the first step, and a restore fills them.
    Between steps they are whole: `step` returns when the last piece is back. It leaves what Muon orthogonalises in the
    place of the gradient, so that each step needs gradients of its own. Deterministic; it does not communicate.

    Args:
        optimizer: The optimizer.
        share: Share of the moments' bytes, from 0 to 1; at least so much is moved, in whole parameters.
        device: The device of training.
        available_bytes: The host's available memory for this rank; None if it is not known.
        piece_bytes: Bytes of a piece, a multiple of the size of a page.
        traffic: Where copies and waits are counted.
        directory: Where the moments lie in files, in the place of the host's memory; None for memory.

    Attributes:
        num_bytes: Bytes of the moments.
        disk_rates: How fast the disk of the moments was at the start; None without one, or behind a page cache.

    Raises:
        UserError: The host lacks memory, or the directory lacks room.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        share: float,
        device: torch.device,
        traffic: Traffic,
        *,
        available_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        directory: Path | None = None,
    ) -> None:
        self._optimizer, self._device, self.traffic = optimizer, device, traffic
        candidates: list[Tensor] = []
        moments: dict[Tensor, tuple[str, ...]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = _local(parameter)
                # Others stay: a rank may hold no row of a parameter, and only contiguous ones have a flat form.
                if local.device.type == device.type and local.is_contiguous() and local.numel():
                    candidates.append(parameter)
                    moments[parameter] = MOMENTS[group["algorithm"]]
        sizes = [len(moments[one]) * _local(one).nbytes for one in candidates]
        chosen = [candidates[index] for index in choose(sizes, share)]
        starts: dict[Tensor, int] = {}
        used = dict.fromkeys(MOMENTS.values(), 0)
        for parameter in chosen:
            starts[parameter] = used[moments[parameter]]
            used[moments[parameter]] += -(-_local(parameter).nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = sum(len(names) * num_bytes for names, num_bytes in used.items())
        sizes_by_moment = {moment: num_bytes for names, num_bytes in used.items() for moment in names if num_bytes}
        self._memory: PieceMemory
        self.disk_rates: DiskRates | None = None
        if directory is None:
            check_room(self.num_bytes, available_bytes, share)
            self._memory = HostPieces(sizes_by_moment, device, piece_bytes)
        else:
            self._memory = disk = DiskPieces(directory, sizes_by_moment, device, piece_bytes, traffic)
            if chosen:
                self.disk_rates = disk.measure()  # writes zeros: before states of earlier steps come into the files
        self._held: dict[Tensor, dict[str, Tensor]] = {}
        for parameter, start in starts.items():
            self._held[parameter] = {moment: self._view(parameter, moment, start) for moment in moments[parameter]}
        self._adopt(is_first=True)
        self._pieces = [
            piece
            for algorithm, names in MOMENTS.items()
            for piece in _cut(
                algorithm,
                [(one, start) for one, start in starts.items() if moments[one] == names],
                used[names],
                piece_bytes,
            )
        ]
        self._extents = [Extent(MOMENTS[piece.algorithm], piece.start, piece.num_bytes) for piece in self._pieces]
        self._lanes: tuple[CopyLane, CopyLane] | None = None

    def holds(self, parameter: Tensor) -> bool:
        """Returns whether the moments of a parameter are offloaded."""
        return parameter in self._held

    def _view(self, parameter: Tensor, moment: str, start: int) -> Tensor:
        local = _local(parameter)
        flat = self._memory.bytes_of(moment)[start : start + local.nbytes]
        held = flat.view(local.dtype).view(local.shape)
        # Like the parameter, so that checkpoints read the shard's position from it. `from_local` would move it to the
        # device of the mesh.
        if not isinstance(parameter, DTensor):
            return held
        return DTensor(held, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]

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
            if groups[parameter]["algorithm"] == "adamw" and "step" not in state:
                is_fused = groups[parameter]["fused"]
                state["step"] = torch.zeros((), device=parameter.device if is_fused else "cpu")
            for moment, tensor in held.items():
                found = state.get(moment)
                if found is None and not is_first:  # new memory has zeros
                    _local(tensor).zero_()
                elif found is not None and found is not tensor:
                    _local(tensor).copy_(_local(found))
                state[moment] = tensor

    @torch.no_grad()
    def step(self, updates: Mapping[str, Update]) -> None:
        """Runs the updates of all offloaded moments, and waits until they are back.

        Args:
            updates: The update of each algorithm, for the parameters that have a gradient.

        Raises:
            OffloadError: The disk failed. Some parameters are updated and others are not.
        """
        has_gradient = [any(one.parameter.grad is not None for one in piece.slices) for piece in self._pieces]
        if not any(has_gradient):
            return
        self._adopt()
        groups = self._find_groups()
        if self._lanes is None:
            self._lanes = (CopyLane(self._device, self.traffic), CopyLane(self._device, self.traffic))
        with self._memory.passing(self._extents, has_gradient) as passage:
            passing = [n for n in range(len(self._pieces)) if passage.is_whole or has_gradient[n]]
            self._pass(passage, passing, has_gradient, groups, updates)

    def _pass(
        self,
        passage: Passage,
        passing: Sequence[int],
        has_gradient: Sequence[bool],
        groups: dict[Tensor, dict[str, Any]],
        updates: Mapping[str, Update],
    ) -> None:
        begin = mark_now(self._device)
        # They come from the current stream's memory, whose earlier work may still use it.
        free = deque((self._build_buffer(), begin) for _ in range(min(NUM_BUFFERS, len(passing))))
        coming: deque[tuple[Buffer, list[Tensor], Mark]] = deque()
        for number, following in itertools.zip_longest(passing, passing[1:]):
            if not has_gradient[number]:
                passage.arrive(number)
                passage.leave(number, None)  # from one file to the other
                continue
            if not coming:
                coming.append(self._fetch(passage, number, *free.popleft()))
            # It comes while this one is updated. None further: pieces arrive in their order only.
            if following is not None and has_gradient[following]:
                coming.append(self._fetch(passage, following, *free.popleft()))
            buffer, on_host, arrived = coming.popleft()
            self.traffic.wait_for(arrived, self._device)
            piece = self._pieces[number]
            self._update(piece, buffer, groups, updates[piece.algorithm])
            mark = self._store(piece, buffer, on_host, mark_now(self._device))
            passage.leave(number, mark)
            free.append((buffer, mark))
        if free:
            # The step ends when the last piece is back: the device has nothing else to do until then.
            self.traffic.wait_for(free[-1][1], self._device)

    def _build_buffer(self) -> Buffer:
        most = max(piece.num_bytes for piece in self._pieces)
        count = max(len(MOMENTS[piece.algorithm]) for piece in self._pieces)
        return tuple(torch.empty(most, dtype=torch.uint8, device=self._device) for _ in range(count))

    def _fetch(self, passage: Passage, number: int, buffer: Buffer, after: Mark) -> tuple[Buffer, list[Tensor], Mark]:
        assert self._lanes is not None
        mark: Mark = None
        on_host = passage.arrive(number)
        for target, source in zip(buffer, on_host, strict=False):
            mark = self._lanes[0].fetch(target[: len(source)], source, after)
        return buffer, on_host, mark

    def _store(self, piece: Piece, buffer: Buffer, on_host: list[Tensor], after: Mark) -> Mark:
        assert self._lanes is not None
        mark: Mark = None
        for source, target in zip(buffer, on_host, strict=False):
            mark = self._lanes[1].store(target, source[: piece.num_bytes], after)
        return mark

    def _update(self, piece: Piece, buffer: Buffer, groups: dict[Tensor, dict[str, Any]], update: Update) -> None:
        by_group: dict[int, list[Slice]] = {}
        for one in piece.slices:
            if one.parameter.grad is not None:
                by_group.setdefault(id(groups[one.parameter]), []).append(one)
        for slices in by_group.values():
            names = MOMENTS[piece.algorithm]
            parts = Slices([], [], tuple([] for _ in names), [])
            for one in slices:
                local = _local(one.parameter)
                parts.weights.append(local.view(-1)[one.start : one.end])
                parts.gradients.append(_flat_gradient(one.parameter)[one.start : one.end])
                step = self._optimizer.state[one.parameter].get("step")
                if step is not None:
                    # The kernel counts a step for each slice: only the last one may count for the parameter.
                    parts.steps.append(step if one.is_last else step.clone())
                num_bytes = (one.end - one.start) * local.element_size()
                for moment, bytes_here in zip(parts.moments, buffer, strict=False):
                    moment.append(bytes_here[one.at : one.at + num_bytes].view(local.dtype))
            update(groups[slices[0].parameter], parts)


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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat_gradient(parameter: Tensor) -> Tensor:
    """Returns a flat view of a parameter's gradient on this rank."""
    assert parameter.grad is not None
    if not _local(parameter.grad).is_contiguous():
        parameter.grad = parameter.grad.contiguous()  # a copy could not be written to
    return _local(parameter.grad).view(-1)
