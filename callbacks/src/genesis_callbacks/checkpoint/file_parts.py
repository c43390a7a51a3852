"""The parts of a save whose bytes lie in files already: held there, read one at a time, and never copied to memory."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..base.local_shards import LocalShard, TensorShard
from .digest import digest_chunk
from .file_memory import HeldCopy, find_file_memory, read_whole
from .job import WriteJob
from .stage import Placed, Staged


def leave_out_files(parts: Sequence[TensorShard], local: Iterable[LocalShard]) -> list[TensorShard]:
    """Returns those of some parts whose bytes are in memory; `local` has their data."""
    in_files = {one.part for one in local if find_file_memory(one.data) is not None}
    return [part for part in parts if part not in in_files]


class PartsInFiles:
    """The parts of a save whose bytes lie in files, held there until `release`.

    Args:
        parts: All parts that this rank holds.

    Attributes:
        copies: The held copies; a part's place has the number of its copy.

    Raises:
        SaveFailedError: The bytes belong to no step, because writing them failed.
    """

    def __init__(self, parts: Iterable[LocalShard]) -> None:
        self.copies: list[HeldCopy] = []
        self._places: dict[TensorShard, Placed] = {}
        numbers: dict[int, int] = {}
        try:
            for local in parts:
                found = find_file_memory(local.data)
                if found is None:
                    continue
                memory, byte_offset = found
                if id(memory) not in numbers:
                    numbers[id(memory)] = len(self.copies)
                    self.copies.append(memory.hold())
                self._places[local.part] = Placed(local.part, byte_offset, numbers[id(memory)])
        except BaseException:
            self.release()
            raise

    def __contains__(self, part: object) -> bool:
        return part in self._places

    def place(self, parts: Iterable[TensorShard]) -> tuple[Placed, ...]:
        """Returns the places of those parts that lie in files."""
        return tuple(self._places[part] for part in parts if part in self._places)

    def add_digests(self, job: WriteJob) -> WriteJob:
        """Returns the job with the digests of all these parts, read one at a time.

        Training need not wait for them: nothing changes what a save holds.

        Raises:
            OSError: The disk fails.
        """
        digests = dict(job.digests)
        for part, place in self._places.items():
            data = _read_part(self.copies[place.file or 0], place)
            digests[part] = digest_chunk(data, part.shape, part.offsets)
        return replace(job, digests=digests)

    def release(self) -> None:
        """Lets the owners write to the copies again; a second call does nothing."""
        while self.copies:
            self.copies.pop().release()


class OpenFile(Protocol):
    """A file of a job."""

    descriptor: int
    name: str


class WithFiles:
    """Staged data, and the parts of a save that lie in files.

    Args:
        staged: The other parts.
        files: By the numbers of the parts' places.
    """

    def __init__(self, staged: Staged, files: Sequence[OpenFile]) -> None:
        self._staged, self._files = staged, files

    def view(self, placed: Placed) -> Tensor:
        """Returns a part; one in a file is read into memory of its own."""
        return self._staged.view(placed) if placed.file is None else _read_part(self._files[placed.file], placed)


def _read_part(file: OpenFile, placed: Placed) -> Tensor:
    data = torch.empty(placed.part.sizes, dtype=placed.part.dtype)
    read_whole(file.descriptor, data.view(-1).view(torch.uint8).numpy().data, placed.byte_offset, file.name)
    # The page cache would keep what is not read again soon, in the place of what training needs.
    os.posix_fadvise(file.descriptor, placed.byte_offset, data.nbytes, os.POSIX_FADV_DONTNEED)
    return data
