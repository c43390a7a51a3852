"""Moves bytes between a run and a place, at a limited rate, and compares hashes on both sides.

The files of a checkpoint stay open until the copy is made, so that what the run removes meanwhile is copied
nevertheless. Otherwise a run that keeps few checkpoints and a slow store would never have a whole copy. The space of a
removed checkpoint is then free only when its copy ends; if the disk needs the space before, the copy is abandoned.
"""

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

from genesis.data.store import StoreError
from genesis.operations.mirror.listing import CheckpointListing, read_local_marker
from genesis.operations.mirror.places import Blocks, Place
from genesis_callbacks.base.hashing import Hasher
from genesis_callbacks.base.manifest import FileRecord
from genesis_callbacks.base.untrusted import RefusedFileError, open_descriptor
from genesis_callbacks.checkpoint import CorruptCheckpointError

_ATTEMPTS: Final = 3


class AbandonedError(Exception):
    """The checkpoint was removed during its copy, which is no error: the run has newer ones."""


class Pace:
    """Limits bytes per second over all that a mirror reads and writes.

    Args:
        bytes_per_second: The limit; None for none.
        clock: Returns seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second, self._clock, self._sleep = bytes_per_second, clock, sleep
        self._free_at = clock()

    def spend(self, num_bytes: int) -> None:
        """Waits until `num_bytes` more may be transferred; unused time before is not saved up."""
        if self._bytes_per_second is None:
            return
        now = self._clock()
        start = max(now, self._free_at)
        self._free_at = start + num_bytes / self._bytes_per_second
        if start > now:
            self._sleep(start - now)


def read_hash(
    place: Place, path: str, num_bytes: int, hasher: Hasher, pace: Pace, out: BinaryIO | None = None
) -> str | None:
    """Reads a file of a place, into `out` if it is given, and returns its hash; None if it has another size."""
    left = num_bytes
    for block in place.read_blocks(path, num_bytes):
        pace.spend(len(block))
        hasher.update(block)
        left -= len(block)
        if out is not None:
            out.write(block)
    return None if left else hasher.hexdigest()


def write_verified(
    place: Place,
    folder: str,
    name: str,
    blocks: Blocks,
    num_bytes: int,
    digest: str,
    build_hasher: Callable[[], Hasher],
    pace: Pace,
) -> None:
    """Writes a file of an uncommitted folder and reads it back: a place that answers may have stored something else.

    Raises:
        StoreError: The place has other bytes than were written, several times.
    """

    def read_paced(block_bytes: int) -> Iterator[bytes]:
        for block in blocks(block_bytes):
            pace.spend(len(block))
            yield block

    path = place.file_path(folder, name, is_committed=False)
    for _ in range(_ATTEMPTS):
        place.write(path, read_paced, num_bytes)
        if read_hash(place, path, num_bytes, build_hasher(), pace) == digest:
            return
    raise StoreError(
        f"{place.url}/{folder}/{name} has other bytes than were written, {_ATTEMPTS} times: the "
        "place, or the way to it, changes data"
    )


class HeldCheckpoint:
    """The open files of a checkpoint of the run, for a `with` block.

    Args:
        path: The checkpoint.
        listing: What its manifest lists.

    Raises:
        AbandonedError: The run has removed it.
        CorruptCheckpointError: A file is missing, or has another size.
    """

    def __init__(self, path: Path, listing: CheckpointListing) -> None:
        self._path, self._listing = path, listing
        self._descriptors: dict[str, int] = {}
        _raise_file_limit(len(listing.files))
        try:
            for file in listing.files:
                self._descriptors[file.name] = self._open(file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "HeldCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_blocks(self, file: FileRecord, block_bytes: int) -> Iterator[bytes]:
        """Yields the content of a file, and compares its hash at the end.

        Raises:
            AbandonedError: The run has removed the checkpoint, and the disk needs its space.
            CorruptCheckpointError: The content is not what was saved.
            OSError: The disk cannot be read.
        """
        descriptor = self._descriptors[file.name]
        hasher = self._listing.build_hasher()
        for offset in range(0, file.num_bytes, block_bytes):
            self._check_space(descriptor)
            wanted = min(block_bytes, file.num_bytes - offset)
            block = b"".join(_pread(descriptor, wanted, offset))
            hasher.update(block)
            yield block
        if hasher.hexdigest() != file.hash:
            raise CorruptCheckpointError(
                f"{self._path}/{file.name} does not have the hash that was saved: its bytes have changed"
            )

    def _open(self, file: FileRecord) -> int:
        path = self._path / file.name
        try:
            descriptor = open_descriptor(path)
        except RefusedFileError as error:
            raise CorruptCheckpointError(f"{path} {error.strerror}") from None
        except FileNotFoundError:
            if read_local_marker(self._path) != self._listing.marker:
                raise AbandonedError from None
            raise CorruptCheckpointError(f"{path} is missing") from None
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes != file.num_bytes:
            os.close(descriptor)
            raise CorruptCheckpointError(f"{path} has {num_bytes} bytes, but {file.num_bytes} were saved")
        return descriptor

    def _check_space(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_nlink == 0:
            directory = self._path.parent
            if not directory.is_dir() or shutil.disk_usage(directory).free < 2 * self._listing.num_bytes:
                raise AbandonedError


def _pread(descriptor: int, num_bytes: int, offset: int) -> Iterator[bytes]:
    while num_bytes and (block := os.pread(descriptor, num_bytes, offset)):
        num_bytes, offset = num_bytes - len(block), offset + len(block)
        yield block


def _raise_file_limit(num_files: int) -> None:
    """Allows this process more open files; a save of many ranks has thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_files + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(ValueError, OSError):  # then opening the files reports the limit
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
