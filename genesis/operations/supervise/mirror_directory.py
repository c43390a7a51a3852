"""A mirror's place in a directory of a disk or a mount."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from genesis.base.errors import UserError
from genesis.operations.supervise.mirror_manifest import MAX_MANIFEST_BYTES, DamagedCheckpointError
from genesis.operations.supervise.mirror_place import BLOCK_BYTES, Blocks, Folder
from genesis_callbacks.base.files import create_file, replace_file, sync_directory
from genesis_callbacks.base.run_directory import COMMITTED_NAME
from genesis_callbacks.base.untrusted import RefusedFileError, open_file, read_file

_UNCOMMITTED: Final = ".staging-mirror"


class DirectoryPlace:
    """A directory on a disk or a mount.

    Args:
        root: The directory, which is created by the first write.
    """

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is not a directory; give a directory for the mirror")
        self.url = str(root)
        self._root = root

    def list_folders(self, parent: str) -> list[Folder]:
        """As in `Place`."""
        try:
            names = sorted(path.name for path in (self._root / parent).iterdir() if path.is_dir())
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed by hand in between
                sizes = {file.name: file.stat().st_size for file in (self._root / parent / name).iterdir()}
                is_committed = COMMITTED_NAME in sizes and not name.endswith(_UNCOMMITTED)
                found.append(Folder(name.removesuffix(_UNCOMMITTED), is_committed, sizes))
        return found

    def read(self, path: str) -> bytes | None:
        """As in `Place`."""
        try:
            return read_file(self._root / path, MAX_MANIFEST_BYTES)
        except (FileNotFoundError, RefusedFileError):
            return None

    def replace(self, path: str, data: bytes) -> None:
        """As in `Place`."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data)

    def file_path(self, folder: str, name: str, *, is_committed: bool) -> str:
        """As in `Place`."""
        return f"{folder}{'' if is_committed else _UNCOMMITTED}/{name}"

    def write(self, path: str, blocks: Blocks, num_bytes: int) -> None:
        """As in `Place`; after an error such as a full disk, nothing of the file is left."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with create_file(target) as file:
                for block in blocks(BLOCK_BYTES):
                    file.write(block)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def read_blocks(self, path: str, num_bytes: int) -> Iterator[bytes]:
        """As in `Place`; reads what the disk holds, as far as the kernel allows, and not what it has cached."""
        target = self._root / path
        if not target.exists():
            return
        try:
            file = open_file(target, buffering=0)
        except RefusedFileError as error:
            raise DamagedCheckpointError(f"{target} {error.strerror}") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > num_bytes:
                raise DamagedCheckpointError(f"{target} has {size:,} bytes, but {num_bytes:,} were saved")
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while num_bytes > 0 and (block := file.read(min(BLOCK_BYTES, num_bytes))):
                num_bytes -= len(block)
                yield block

    def commit(self, folder: str, marker: bytes) -> None:
        """As in `Place`."""
        target = self._root / folder
        staging = target.with_name(target.name + _UNCOMMITTED)
        sync_directory(staging)
        with create_file(staging / COMMITTED_NAME) as file:
            file.write(marker)
        sync_directory(staging)
        staging.rename(target)
        sync_directory(target.parent)

    def remove(self, folder: str, *, is_committed: bool) -> None:
        """As in `Place`."""
        target = self._root / folder
        staging = target.with_name(target.name + _UNCOMMITTED)
        if staging.exists():
            shutil.rmtree(staging)
        if is_committed and target.exists():
            target.rename(staging)  # a kill within the removal leaves nothing that counts as a checkpoint
            sync_directory(target.parent)
            shutil.rmtree(staging)

    def clean(self) -> None:
        """As in `Place`: listings show everything."""
