"""The second place of a mirror: a directory, or a prefix in a store. A folder appears in it whole or not at all.

A folder is uncommitted until its marker is there. In a directory, an uncommitted folder has another name and is
renamed. A store cannot rename: there, the marker is the last object to be written and the first to be removed.

A directory is written with our own durable files, and not by fsspec, whose local files are not synced. Stores are
those that fsspec knows; `genesis.data.store` limits and repeats the requests. In S3, a large file is uploaded in parts,
each a request of its own with attempts of its own: a connection that fails now and then does not start a file of many
gigabytes again. fsspec's writer starts again, and other stores get a large file through it.
"""

import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from genesis.base.errors import UserError
from genesis.data.remote import strip_local
from genesis.data.store import Store, StoreError, StoreOptions, is_s3, is_url, run_limited, without_password
from genesis_callbacks.base.files import create_file, replace_file, sync_directory
from genesis_callbacks.base.run_directory import COMMITTED_NAME
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, RefusedFileError, open_file, read_file
from genesis_callbacks.checkpoint import CorruptCheckpointError

BLOCK_BYTES: Final = 8 << 20
_UNCOMMITTED: Final = ".staging-mirror"
_MAX_PARTS: Final = 9000
"""S3 takes up to 10,000 parts of a file."""

Blocks = Callable[[int], Iterator[bytes]]
"""Returns the content of a file in blocks of a given size, from its beginning at each call."""


@dataclass(frozen=True)
class Folder:
    """A folder of a place: its name, whether it is committed, and the sizes of its files by name."""

    name: str
    is_committed: bool
    files: dict[str, int]


class Place(Protocol):
    """Where a mirror keeps its copies. Paths are relative, with slashes. One process writes to a place.

    Every method raises `StoreError` or `OSError` if the place does not work now, and `UserError` if it refuses.

    Attributes:
        url: The place as messages name it, without a password.
        address: The place as it was given.
    """

    url: str
    address: str

    def list_folders(self, parent: str) -> list[Folder]:
        """Returns the folders in `parent`; none if it does not exist."""

    def read(self, path: str) -> bytes | None:
        """Returns the content of a small file; None if there is no such file."""

    def replace(self, path: str, data: bytes) -> None:
        """Writes a small file that belongs to no folder, atomically."""

    def file_path(self, folder: str, name: str, *, is_committed: bool) -> str:
        """Returns the path of a file of a folder."""

    def write(self, path: str, blocks: Blocks, num_bytes: int) -> None:
        """Writes a file of an uncommitted folder; the file is stored when the call returns."""

    def read_blocks(self, path: str, num_bytes: int) -> Iterator[bytes]:
        """Yields the content of a file of known size in blocks; a file that is missing has none."""

    def commit(self, folder: str, marker: bytes) -> None:
        """Makes a folder whose files are all written visible."""

    def remove(self, folder: str, *, is_committed: bool) -> None:
        """Removes a folder; its marker goes first."""

    def clean(self) -> None:
        """Removes what interrupted writes have left and no listing shows."""


class DirectoryPlace:
    """A directory on a disk or a mount.

    Args:
        root: The directory, which is created by the first write.
    """

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is not a directory; give a directory for the mirror")
        self.url = self.address = str(root)
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
            return read_file(self._root / path, MAX_DOCUMENT_BYTES)
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
            raise CorruptCheckpointError(f"{target} {error.strerror}") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > num_bytes:
                raise CorruptCheckpointError(f"{target} has {size:,} bytes, but {num_bytes:,} were saved")
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


class StorePlace:
    """A prefix in a store.

    Args:
        url: The URL of the prefix.
        options: Limits of the requests.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.address = url.rstrip("/")
        self.url = without_password(self.address)
        if self.url.endswith(":"):
            raise UserError(f"{self.url} names no bucket or directory; give a URL such as s3://bucket/runs/NAME")
        self._options = options
        self._store = Store(self.address, options)
        self._is_s3 = is_s3(url)

    def list_folders(self, parent: str) -> list[Folder]:
        """As in `Place`."""
        found = []
        for info in self._list(parent):
            if info["type"] == "directory":
                name = str(info["name"]).rstrip("/").rpartition("/")[2]
                files = {
                    str(file["name"]).rpartition("/")[2]: int(file["size"] or 0)
                    for file in self._list(f"{parent}/{name}")
                    if file["type"] != "directory"
                }
                found.append(Folder(name, COMMITTED_NAME in files, files))
        return sorted(found, key=lambda folder: folder.name)

    def read(self, path: str) -> bytes | None:
        """As in `Place`."""
        try:
            data: bytes = self._store.ask(lambda: self._store.files._cat_file(self._locate(path)))
        except FileNotFoundError:
            return None
        return data

    def replace(self, path: str, data: bytes) -> None:
        """As in `Place`: an object appears whole."""
        self._pipe(path, data)

    def file_path(self, folder: str, name: str, *, is_committed: bool) -> str:
        """As in `Place`."""
        return f"{folder}/{name}"

    def write(self, path: str, blocks: Blocks, num_bytes: int) -> None:
        """As in `Place`."""
        if num_bytes <= BLOCK_BYTES:
            self._pipe(path, b"".join(blocks(BLOCK_BYTES)))
        elif self._is_s3:
            self._upload_parts(path, blocks, num_bytes)
        else:
            self._stream(path, blocks)

    def read_blocks(self, path: str, num_bytes: int) -> Iterator[bytes]:
        """As in `Place`."""
        target = self._locate(path)
        for start in range(0, num_bytes, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, num_bytes)
            try:
                block = self._read_range(target, start, end)
            except FileNotFoundError:
                return
            yield block

    def commit(self, folder: str, marker: bytes) -> None:
        """As in `Place`."""
        self._pipe(f"{folder}/{COMMITTED_NAME}", marker)

    def remove(self, folder: str, *, is_committed: bool) -> None:
        """As in `Place`."""
        names = [str(info["name"]).rpartition("/")[2] for info in self._list(folder) if info["type"] != "directory"]
        for name in sorted(names, key=lambda name: name != COMMITTED_NAME):
            self._remove_file(self._locate(f"{folder}/{name}"))
        if not self._is_s3:
            # Some stores have directories, and others raise an error of their own; an empty one is no checkpoint.
            with contextlib.suppress(FileNotFoundError, UserError, OSError):
                run_limited(self._store.files._rmdir(self._locate(folder)), self._options.attempt_seconds)

    def clean(self) -> None:
        """As in `Place`: uploads in parts that a killed mirror has left cost money and show in no listing."""
        if not self._is_s3:
            return
        bucket, prefix = self._split("")
        try:
            request = self._store.files._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            answer = run_limited(request, self._options.attempt_seconds)
        except Exception:  # some stores lack this request, and some users may not make it: nothing depends on it
            return
        for upload in answer.get("Uploads", []):
            with contextlib.suppress(FileNotFoundError):
                self._call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _locate(self, path: str) -> str:
        return f"{self._store.path.rstrip('/')}/{path}"

    def _split(self, path: str) -> tuple[str, str]:
        bucket, key, _ = self._store.plain.split_path(self._locate(path))
        return str(bucket), str(key).rstrip("/")

    def _remove_file(self, target: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # an attempt before had removed it, and its answer was lost
            self._store.ask(lambda: self._store.files._rm_file(target))

    def _read_range(self, target: str, start: int, end: int) -> bytes:
        data: bytes = self._store.ask(lambda: self._store.files._cat_file(target, start=start, end=end))
        return data

    def _list(self, path: str) -> list[dict[str, Any]]:
        target = self._locate(path)
        self._store.plain.invalidate_cache()
        try:
            infos = self._store.ask(lambda: self._store.files._ls(target, detail=True))
        except FileNotFoundError:
            return []
        return [info for info in infos if str(info["name"]).strip("/") != target.strip("/")]

    def _call(self, request: str, **options: Any) -> Any:
        return self._store.ask(lambda: self._store.files._call_s3(request, **options))

    def _pipe(self, path: str, data: bytes) -> None:
        if self._is_s3:
            bucket, key = self._split(path)
            try:
                self._call("put_object", Bucket=bucket, Key=key, Body=data)
            except FileNotFoundError:
                raise UserError(f"{self.url} cannot be written: there is no bucket {bucket}; create it") from None
            return
        self._make_parent(path)
        self._store.ask(lambda: self._store.files._pipe_file(self._locate(path), data))

    def _make_parent(self, path: str) -> None:
        parent = self._locate(path).rpartition("/")[0]
        self._store.ask(lambda: self._store.files._makedirs(parent, exist_ok=True))

    def _upload_parts(self, path: str, blocks: Blocks, num_bytes: int) -> None:
        bucket, key = self._split(path)
        place = {"Bucket": bucket, "Key": key}
        upload = {**place, "UploadId": self._call("create_multipart_upload", **place)["UploadId"]}
        try:
            parts = []
            part_bytes = max(BLOCK_BYTES, math.ceil(num_bytes / _MAX_PARTS))
            for number, part in enumerate(blocks(part_bytes), start=1):
                answer = self._call("upload_part", **upload, PartNumber=number, Body=part)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            self._call("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
        except BaseException:
            # One attempt: if the store is away, the next start of the mirror aborts it.
            with contextlib.suppress(Exception):
                run_limited(self._store.files._call_s3("abort_multipart_upload", **upload), 5.0)
            raise

    def _stream(self, path: str, blocks: Blocks) -> None:
        """Writes a large file through fsspec's writer, in a thread, because a writer has no limit of time."""
        self._make_parent(path)
        seconds = self._options.attempt_seconds
        try:
            file = run_limited(asyncio.to_thread(self._store.plain.open, self._locate(path), "wb"), seconds)
            for block in blocks(BLOCK_BYTES):
                run_limited(asyncio.to_thread(file.write, block), seconds)
            run_limited(asyncio.to_thread(file.close), seconds)
        except TimeoutError:
            raise StoreError(f"{self.url}: no response in {seconds:g} s while {path} was written") from None


def open_place(url: str) -> Place:
    """Returns the place at a path or URL.

    Raises:
        StoreError: The store does not respond.
        UserError: The value is empty, or the store is unknown or refuses access.
    """
    if not url.strip():
        raise UserError(f"the mirror is {url!r}: give a directory, or a URL such as s3://bucket/runs/NAME")
    return StorePlace(url, StoreOptions.from_environment()) if is_url(url) else DirectoryPlace(Path(strip_local(url)))
