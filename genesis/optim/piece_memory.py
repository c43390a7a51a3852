"""Where moments lie between steps, and how a step gets them piece by piece: in the host's memory, or in files."""

import contextlib
import errno
import mmap
import os
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from genesis.base.errors import RunEndedError, UserError
from genesis.optim.transfers import HostMemory, Mark, Traffic
from genesis_callbacks.checkpoint import FILE_ALIGNMENT, NUM_COPIES, FileMemory, FileRoomError, Pass

NUM_SLOTS: Final = 4
"""Pieces on the way between a disk and the device: one is read, one goes up, one comes back, one is written."""
MOMENTS: Final[Mapping[str, tuple[str, ...]]] = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
"""The moments of each algorithm."""
MOST_MOMENTS: Final = max(map(len, MOMENTS.values()))
_MEASURED_BYTES: Final = 64 * 2**20


class OffloadError(RunEndedError):
    """A disk that failed within a step. What it held belongs to no step, so that no save follows."""


class Extent(NamedTuple):
    """The bytes of a piece: the same range in the memory of each of its moments."""

    moments: tuple[str, ...]
    start: int
    num_bytes: int


class Passage(Protocol):
    """The pieces of one step, on their way from their memory and back, in their order."""

    is_whole: bool
    """Whether all pieces pass, and not only those that are updated."""

    def arrive(self, number: int) -> list[Tensor]:
        """Returns the host's bytes of each moment of a piece, from which a device may copy, and to which it writes."""

    def leave(self, number: int, mark: Mark) -> None:
        """Takes a piece back once a mark has passed, behind which nothing writes to its bytes."""


class PieceMemory(Protocol):
    """Memory of all moments."""

    def bytes_of(self, moment: str) -> Tensor:
        """Returns the bytes of a moment, zeros at first, as the tensors of the optimizer's state view them."""

    def passing(self, extents: Sequence[Extent], chosen: Sequence[bool]) -> contextlib.AbstractContextManager[Passage]:
        """Lets the chosen pieces of all pass; at the end all bytes are back.

        Raises:
            OffloadError: The disk failed.
        """


# ---- in the host's memory


class _HostPassage:
    is_whole = False

    def __init__(self, memory: "HostPieces", extents: Sequence[Extent]) -> None:
        self._memory, self._extents = memory, extents
        self.last: Mark = None

    def arrive(self, number: int) -> list[Tensor]:
        moments, start, num_bytes = self._extents[number]
        return [self._memory.bytes_of(moment)[start : start + num_bytes] for moment in moments]

    def leave(self, number: int, mark: Mark) -> None:
        self.last = mark


class HostPieces:
    """Moments in page-locked memory of the host.

    Args:
        sizes: Bytes of each moment.
        device: The device of training.
        piece_bytes: Bytes of a piece.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device, piece_bytes: int) -> None:
        self._memory = {moment: HostMemory(num_bytes, device, piece_bytes) for moment, num_bytes in sizes.items()}

    def bytes_of(self, moment: str) -> Tensor:
        """Returns the bytes of a moment."""
        return self._memory[moment].bytes

    @contextlib.contextmanager
    def passing(self, extents: Sequence[Extent], chosen: Sequence[bool]) -> Iterator[Passage]:
        """Lets the chosen pieces pass."""
        passage = _HostPassage(self, extents)
        yield passage
        if passage.last is not None:
            passage.last.synchronize()  # a save, and everybody else who reads the state, finds whole moments


# ---- in files


class Slot(NamedTuple):
    """Memory for a piece on its way, of each moment: for copies, and for reads and writes."""

    tensors: list[Tensor]
    raw: list[memoryview]


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second of a disk, as measured in a moment."""

    read: float
    write: float

    def least_seconds(self, num_bytes: int) -> float:
        """Returns the least time in which so many bytes are read and written, both at once."""
        return num_bytes / min(self.read, self.write)


def explain_directory(directory: Path, number: int | None, num_bytes: int | None = None) -> str:
    """Returns why a directory takes no optimizer states, and the remedy. Pure.

    Args:
        directory: The value of `optimizer_offload_directory`.
        number: The error's number, as `errno` names them.
        num_bytes: Bytes of this rank's states, where known.
    """
    option = f"optimizer_offload_directory {directory}"
    if number == errno.ENOENT:
        return f"{option} does not exist: create it, or give another directory"
    if number == errno.ENOTDIR:
        return f"{option} is not a directory: give one, on a local disk"
    size = "" if num_bytes is None else f" of {NUM_COPIES} x {num_bytes:,} bytes"
    reason = "unknown error" if number is None else os.strerror(number)
    remedy = "give a directory in which you may create files"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "give a directory on a disk with room, or lower optimizer_offload"
    return f"{option} takes no files{size} for the optimizer states of a rank ({reason}): {remedy}"


class DiskPieces:
    """Moments in files, which are read and written in every step by threads of their own.

    Args:
        directory: On the disk. It gets two copies of the moments, because a save holds one while training continues.
        sizes: Bytes of each moment.
        device: The device of training.
        piece_bytes: Bytes of a piece, a multiple of the size of a page.
        traffic: Where the disk's bytes and the waits for it are counted.

    Raises:
        UserError: The directory does not exist, takes no files, or has no room.
    """

    def __init__(
        self, directory: Path, sizes: Mapping[str, int], device: torch.device, piece_bytes: int, traffic: Traffic
    ) -> None:
        self._directory, self._traffic = directory, traffic
        self._starts: dict[str, int] = {}
        num_bytes = 0
        for moment, size in sizes.items():
            self._starts[moment] = num_bytes
            num_bytes += _align(size)
        self._sizes = dict(sizes)
        try:
            self._memory = FileMemory(directory, num_bytes)
        except FileRoomError as error:
            raise UserError(explain_directory(directory, error.errno, num_bytes)) from error
        most = max((1, *sizes.values()))
        self._slot_bytes = min(piece_bytes, _align(most))
        self._slot_memory = HostMemory(NUM_SLOTS * MOST_MOMENTS * self._slot_bytes, device, self._slot_bytes)
        ends = [number * self._slot_bytes for number in range(NUM_SLOTS * MOST_MOMENTS + 1)]
        parts = [slice(start, end) for start, end in pairwise(ends)]
        self._slots = [
            Slot(
                [self._slot_memory.bytes[part] for part in parts[first : first + MOST_MOMENTS]],
                [self._slot_memory.raw[part] for part in parts[first : first + MOST_MOMENTS]],
            )
            for first in range(0, len(parts), MOST_MOMENTS)
        ]

    @property
    def file_bytes(self) -> int:
        """Bytes on the disk, of all copies."""
        return NUM_COPIES * self._memory.num_bytes

    def bytes_of(self, moment: str) -> Tensor:
        """Returns the bytes of a moment, in a file."""
        start = self._starts[moment]
        return self._memory.bytes[start : start + self._sizes[moment]]

    def measure(self) -> DiskRates | None:
        """Returns how fast the disk is now; None where reads come from the page cache. Before the first step.

        Raises:
            OffloadError: The disk failed.
        """
        if not self._memory.is_direct:
            return None
        num_bytes = min(_MEASURED_BYTES, self._memory.num_bytes)
        data = memoryview(mmap.mmap(-1, num_bytes))
        seconds = []
        with self._reporting(), self._memory.begin_pass() as one:
            for move in (one.write, one.read):  # zeros, as they are there
                begin = time.perf_counter()
                move(data, 0)
                seconds.append(time.perf_counter() - begin)
        return DiskRates(read=num_bytes / seconds[1], write=num_bytes / seconds[0])

    @contextlib.contextmanager
    def passing(self, extents: Sequence[Extent], chosen: Sequence[bool]) -> Iterator[Passage]:
        """Lets the chosen pieces pass, or all of them while a save holds the files."""
        with self._reporting(), contextlib.ExitStack() as stack:
            with self._traffic.waiting_for_disk():  # for a save that holds both copies, and for what a restore wrote
                one = stack.enter_context(self._memory.begin_pass())
            numbers = [number for number in range(len(extents)) if one.is_whole or chosen[number]]
            passage = _DiskPassage(one, self._slots, self._starts, extents, numbers, self._traffic)
            with passage.running():
                yield passage
            with self._traffic.waiting_for_disk():  # until the disk has what went through the page cache
                stack.close()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OffloadError(
                f"optimizer_offload_directory {self._directory}: {error.strerror or error}: this step is not complete "
                "and is not saved; the run continues from its last checkpoint when the disk works, or with another "
                "directory"
            ) from error


class _DiskPassage:
    """One thread reads ahead as far as there are slots, and one writes."""

    def __init__(
        self,
        one: Pass,
        slots: Sequence[Slot],
        starts: Mapping[str, int],
        extents: Sequence[Extent],
        numbers: Sequence[int],
        traffic: Traffic,
    ) -> None:
        self.is_whole = one.is_whole
        self._pass, self._starts, self._extents, self._numbers = one, starts, extents, numbers
        self._traffic = traffic
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._reads: dict[int, Future[Slot]] = {}
        self._writes: list[Future[None]] = []
        self._writer: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the two threads; at the end everything is written."""
        reader, writer = ThreadPoolExecutor(1, "states-read"), ThreadPoolExecutor(1, "states-write")
        try:
            self._writer = writer
            self._reads = {number: reader.submit(self._read, number) for number in self._numbers}
            yield
            with self._traffic.waiting_for_disk():
                for write in self._writes:
                    write.result()
        finally:
            self._free.put(None)  # a read that waits for a slot is not needed any more
            reader.shutdown(cancel_futures=True)
            writer.shutdown(cancel_futures=True)

    def arrive(self, number: int) -> list[Tensor]:
        with self._traffic.waiting_for_disk():
            slot = self._reads[number].result()
        moments, _, num_bytes = self._extents[number]
        return [memory[:num_bytes] for _, memory in zip(moments, slot.tensors, strict=False)]

    def leave(self, number: int, mark: Mark) -> None:
        for write in self._writes:
            if write.done():
                write.result()  # the sooner a failure is known, the fewer pieces are updated for nothing
        assert self._writer is not None
        self._writes = [write for write in self._writes if not write.done()]
        self._writes.append(self._writer.submit(self._write, number, self._reads[number].result(), mark))

    def _read(self, number: int) -> Slot:
        slot = self._free.get()
        if slot is None:
            raise CancelledError
        moments, start, num_bytes = self._extents[number]
        for moment, memory in zip(moments, slot.raw, strict=False):
            self._pass.read(memory[: _align(num_bytes)], self._starts[moment] + start)
            self._traffic.disk_read_bytes += _align(num_bytes)
        return slot

    def _write(self, number: int, slot: Slot, mark: Mark) -> None:
        try:
            if mark is not None:
                mark.synchronize()
            moments, start, num_bytes = self._extents[number]
            for moment, memory in zip(moments, slot.raw, strict=False):
                self._pass.write(memory[: _align(num_bytes)], self._starts[moment] + start)
                self._traffic.disk_written_bytes += _align(num_bytes)
        finally:
            self._free.put(slot)  # after a failure, too, so that nobody waits for it


def _align(num_bytes: int) -> int:
    return -(-num_bytes // FILE_ALIGNMENT) * FILE_ALIGNMENT
