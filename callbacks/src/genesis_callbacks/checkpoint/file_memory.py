"""Tensors whose bytes lie in a file, for states that do not fit into memory; a save reads them from there.

A `FileMemory` is an address range with a file behind it, so that each of its tensors can be read and written like any
other. Its owner writes large parts by `begin_pass`, past the page cache. A save does not copy such tensors to memory:
it holds the copy of the bytes that is current when it begins. The owner's next pass then writes to the second copy,
and the file behind the addresses changes when the pass ends. Training does not wait for the save, and the save reads
bytes that nothing changes.

The files have no names: a kill at any instant leaves nothing behind.
"""

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..base.checkpoint_errors import SaveFailedError

FILE_ALIGNMENT: Final = 4096
"""Memory, offsets and lengths of reads and writes past the page cache are multiples of this."""
NUM_COPIES: Final = 2
"""A pass writes to one, while a save may hold the other."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_MAP_FIXED = 0x10


class FileRoomError(OSError):
    """A directory has no room for the copies of a `FileMemory`, or takes no files."""


class _File:
    """One copy of the bytes: a file without a name, allocated whole."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self.descriptor = _open_without_name(directory)
        self.direct = -1
        self.num_holds = 0
        try:
            # Every block now: a write into the file cannot find the disk full later, except where a file system
            # allocates at each write, and there the write reports it.
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            self.direct = _open_direct(self.descriptor)
        except OSError:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        return self.direct >= 0

    def close(self) -> None:
        for descriptor in (self.descriptor, self.direct):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self.direct = -1


def _open_without_name(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # A file system without such files. A kill between these two calls leaves an empty file.
    path = directory / f".genesis-states-{os.getpid()}-{threading.get_ident()}"
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    return descriptor


def _open_direct(descriptor: int) -> int:
    """Returns a second descriptor of a file, for reads and writes past the page cache; -1 where there are none."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1
    try:
        # Some file systems accept the flag and refuse the transfer, as tmpfs did for long.
        os.preadv(direct, [mmap.mmap(-1, FILE_ALIGNMENT)], 0)
    except OSError as error:
        os.close(direct)
        if error.errno != errno.EINVAL:
            raise
        return -1
    return direct


class HeldCopy:
    """Bytes of a `FileMemory` that its owner does not change until `release`.

    Attributes:
        descriptor: Of the file; it is valid until `release`.
        name: What messages call it.
    """

    def __init__(self, memory: "FileMemory", file: _File) -> None:
        self._memory, self._file = memory, file
        self.descriptor, self.name = file.descriptor, memory.name

    def release(self) -> None:
        """Lets the owner write to these bytes again. Once for each hold."""
        self._memory._release(self._file)


@dataclass(frozen=True)
class Pass:
    """One pass of a `FileMemory`'s owner over its bytes. Several threads may read and write at a time.

    Args:
        source: The file that is read.
        target: The file that is written: the same one, or the second copy while a save holds the first.
        name: What messages call it.
    """

    source: _File
    target: _File
    name: str

    @property
    def is_whole(self) -> bool:
        """Whether the pass must write all bytes, because it writes to the other copy."""
        return self.source is not self.target

    def read(self, data: memoryview, offset: int) -> None:
        """Fills `data` with the bytes at an offset; both lie at multiples of `FILE_ALIGNMENT`.

        Raises:
            OSError: The disk fails.
        """
        descriptor = self.source.direct if self.source.is_direct else self.source.descriptor
        read_whole(descriptor, data, offset, self.name)

    def write(self, data: memoryview, offset: int) -> None:
        """Writes `data` at an offset; both lie at multiples of `FILE_ALIGNMENT`.

        Raises:
            OSError: The disk fails, or is full.
        """
        descriptor = self.target.direct if self.target.is_direct else self.target.descriptor
        while data:
            num_written = os.pwrite(descriptor, data, offset)
            data, offset = data[num_written:], offset + num_written
            if data and num_written % FILE_ALIGNMENT:
                descriptor = self.target.descriptor  # the rest of a short write is not aligned


def read_whole(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    """Fills `data` with the bytes of a file at an offset.

    Raises:
        OSError: The disk fails, or the file ends before.
    """
    while data:
        num_read = os.preadv(descriptor, [data], offset)
        if num_read == 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset}", name)
        data, offset = data[num_read:], offset + num_read


class FileMemory:
    """Zeroed memory whose bytes lie in a file; see the module's docstring. One thread at a time runs passes.

    Args:
        directory: A directory on the disk that shall hold the bytes, twice.
        num_bytes: The size; rounded up to a multiple of `FILE_ALIGNMENT`.

    Attributes:
        bytes: The memory, as a tensor of uint8. Reading it on a disk that fails ends the process by SIGBUS, as with
            every mapped file; passes and saves raise an error.
        name: What messages call it.

    Raises:
        FileRoomError: The directory does not exist, takes no files, or has no room for the copies.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self.name = f"optimizer states in {directory}"
        self.num_bytes = max(1, -(-num_bytes // FILE_ALIGNMENT)) * FILE_ALIGNMENT
        self._files: list[_File] = []
        self._condition = threading.Condition()
        self._reason: str | None = None
        weakref.finalize(self, _close_files, self._files).atexit = False  # at the end of a process the kernel does that
        try:
            for _ in range(NUM_COPIES):
                self._files.append(_File(directory, self.num_bytes))
        except OSError as error:
            _close_files(self._files)
            raise FileRoomError(error.errno, error.strerror, str(directory)) from error
        # The mapping is Python's: it goes when no tensor views it. What lies behind its addresses may change.
        self._map = mmap.mmap(-1, self.num_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._show(self._files[0])
        _register(self, self._address, self.num_bytes)

    def _show(self, file: _File) -> None:
        """Puts a file behind the addresses."""
        shown = _LIBC.mmap(
            self._address,
            self.num_bytes,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _MAP_FIXED,
            file.descriptor,
            0,
        )
        if shown != self._address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), self.name)
        self._current = file

    @property
    def is_direct(self) -> bool:
        """Whether passes go past the page cache."""
        return self._current.is_direct

    @contextlib.contextmanager
    def begin_pass(self) -> Iterator[Pass]:
        """Gives the owner a pass. At its end the addresses show what it wrote; if it raises, nothing can be read again.

        If a save holds the current copy, the pass writes to the other one, and waits while an earlier save holds that.

        Raises:
            OSError: The disk did not take what was written, by this pass or through the addresses.
        """
        self._check()
        with self._condition:
            source = self._current
            target = source if source.num_holds == 0 else next(file for file in self._files if file is not source)
            self._condition.wait_for(lambda: target is source or target.num_holds == 0)
        try:
            os.fdatasync(
                source.descriptor
            )  # what a restore wrote through the addresses: a failed write is reported now
            yield Pass(source, target, self.name)
            if not target.is_direct:
                os.fdatasync(target.descriptor)
            if target is not source:
                self._show(target)
        except BaseException as error:
            # Some parts are those of the step before, others of this one. Nobody may take them for either.
            self._reason = f"{self.name}: the last step ended within its update ({str(error) or type(error).__name__})"
            raise

    def hold(self) -> HeldCopy:
        """Keeps the bytes as they are now, until they are released.

        Raises:
            SaveFailedError: A pass has failed, so that the bytes belong to no step.
        """
        self._check()
        with self._condition:
            self._current.num_holds += 1
            return HeldCopy(self, self._current)

    def _release(self, file: _File) -> None:
        with self._condition:
            file.num_holds -= 1
            self._condition.notify_all()

    def _check(self) -> None:
        if self._reason is not None:
            raise SaveFailedError(self._reason)


def _close_files(files: list[_File]) -> None:
    while files:
        files.pop().close()


# All live memories by their first address. Passes and saves are few, so that a list is enough.
_STARTS: list[int] = []
_MEMORIES: dict[int, "weakref.ref[FileMemory]"] = {}


def _register(memory: FileMemory, start: int, num_bytes: int) -> None:
    def forget(_: object) -> None:
        _MEMORIES.pop(start)
        _STARTS.remove(start)

    bisect.insort(_STARTS, start)
    _MEMORIES[start] = weakref.ref(memory, forget)


def find_file_memory(tensor: Tensor) -> tuple[FileMemory, int] | None:
    """Returns the memory in whose file a plain tensor's bytes lie, and their offset there; None for other tensors."""
    if not _STARTS or tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.nbytes:
        return None
    address = tensor.data_ptr()
    place = bisect.bisect_right(_STARTS, address) - 1
    memory = _MEMORIES[_STARTS[place]]() if place >= 0 else None
    if memory is None or address >= _STARTS[place] + memory.num_bytes:
        return None
    return memory, address - _STARTS[place]
