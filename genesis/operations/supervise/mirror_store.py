"""A mirror's place in a store that fsspec knows; `genesis.data.store` limits and repeats the requests.

In S3, a large file is uploaded in parts, each a request of its own with attempts of its own: a connection that fails
now and then does not start a file of many gigabytes again. Other stores get a large file through fsspec's own writer.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.data.store import Store, StoreError, StoreOptions, is_s3, run_limited
from genesis.operations.supervise.mirror_place import BLOCK_BYTES, Blocks, Folder
from genesis_callbacks.base.run_directory import COMMITTED_NAME

_MAX_PARTS: Final = 9000
"""S3 takes up to 10,000 parts of a file."""


class StorePlace:
    """A prefix in a store.

    Args:
        url: The URL of the prefix.
        options: Limits of the requests.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = url.rstrip("/")
        if self.url.endswith(":"):
            raise UserError(f"{url} names no bucket or directory; give a URL such as s3://bucket/runs/NAME")
        self._options = options
        self._store = Store(self.url, options)
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
