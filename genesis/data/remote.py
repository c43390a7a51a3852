"""Lists and downloads files in remote stores; `genesis.data.store` limits and repeats the requests."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from typing import Any, NamedTuple

import aiohttp
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from genesis.base.errors import UserError
from genesis.data.store import Store, StoreOptions, WriteError, is_hub, is_s3, is_url, run_limited

_BLOCK_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_CONTENT_KEYS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "Content-MD5", "Digest", "CRC")
"""The stores' names for values that change with an object's content, in listings and for single objects alike."""
_TIME_KEYS = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "modify", "updated", "created")
_AGAIN = "or start again (data prepare: --restart)"


LeaveOut = Callable[[str, tuple[str, ...], tuple[str, ...]], bool]
"""Gets the path of a file, its names below the directory that was searched, and endings, of which it must have one."""


class RemoteFile(NamedTuple):
    """A file in a store; `identity` ("ETag: ...") changes with its content, and is empty if the store has none."""

    url: str
    num_bytes: int
    identity: str


def strip_local(path: str) -> str:
    """Returns the path in a `file://` URL; any other path is returned unchanged."""
    return str(LocalFileSystem._strip_protocol(path)) if re.match("(file|local)://", path) else path


def file_name(path: str) -> str:
    """Returns the part of a path or URL that shows the file's format, without the path of an archive or a query."""
    if not is_url(path):
        return path
    link = next((link for link in path.split("::") if "://" in link), path)
    return re.split("[?#]", link)[0] if re.match("https?://", link) else link


def _ends_otherwise(path: str, names: tuple[str, ...], endings: tuple[str, ...]) -> bool:
    return not file_name(path).endswith(endings)


def list_files(url: str, endings: tuple[str, ...], leave_out: LeaveOut = _ends_otherwise) -> list[RemoteFile]:
    """Returns the files of `url`: a single file, the matches of a glob, or the files of a directory.

    Args:
        url: The URL.
        endings: The endings of names of the files that are taken from a directory, at all its levels.
        leave_out: Decides whether a file of a directory or of a glob is left out.

    Raises:
        StoreError: The store does not respond.
        UserError: The store is unknown or refuses access.
    """
    store = _RemoteFiles(url, StoreOptions.from_environment())
    infos = [] if "*" in store.path else store.find(endings, leave_out)
    return sorted(store.describe(info) for info in infos or store.glob(leave_out))


def download(file: RemoteFile, destination: FileIO) -> None:
    """Writes the complete file to `destination`, after checking that it has not changed since it was listed.

    Raises:
        StoreError: All attempts to read the file failed.
        UserError: The file is missing or has changed since it was listed, or its hash differs from the store's.
        WriteError: `destination` cannot be written.
    """
    store = _RemoteFiles(file.url, StoreOptions.from_environment())
    try:
        store.check_unchanged(file)
        while destination.tell() < file.num_bytes:
            store.read_on(file, destination)
        _check_hash(file, store.check_unchanged(file), store, destination)
    except FileNotFoundError:
        raise UserError(f"{file.url} was removed since it was listed; restore the file, {_AGAIN}") from None


class _RemoteFiles:
    """The files at a URL."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = url
        self._store = Store(url, options)
        self._plain, self.path, self.files = self._store.plain, self._store.path, self._store.files
        self._is_http = isinstance(self._plain, HTTPFileSystem)

    def describe(self, info: Mapping[str, Any]) -> RemoteFile:
        """Returns the file of one entry of a listing."""
        _, chain, rest = self.url.partition("::")
        url = str(self._plain.unstrip_protocol(info["name"])) + chain + rest
        if info.get("size") is None or not any(info.get(key) for key in _CONTENT_KEYS):
            info = self._info(info["name"])  # a listing formats times differently
        if info.get("size") is None:
            raise UserError(f"{url}: the store does not report its size; download it and give the local file")
        key = next((key for key in (*_CONTENT_KEYS, *_TIME_KEYS) if info.get(key)), None)
        return RemoteFile(url, int(info["size"]), f"{key}: {info[key]}" if key else "")

    def find(self, endings: tuple[str, ...], leave_out: LeaveOut) -> list[Mapping[str, Any]]:
        """Returns the file at the path, or the files below it."""
        try:
            info = None if self.path.endswith("/") else self._info(self.path)
        except FileNotFoundError:
            return []
        if info is not None and info["type"] != "directory":
            return [info]
        root = self.path.rstrip("/") + "/"
        found = self._walk(self.path, None)
        return [info for info in found if not leave_out(info["name"], _names(info, root), endings)]

    def glob(self, leave_out: LeaveOut) -> list[Mapping[str, Any]]:
        """Returns the files that match the path."""
        # In a web address "?" begins the query.
        wildcard = re.search(r"[*\[]" if self._is_http else r"[*?\[]", self.path)
        if wildcard is None:
            return []
        root = self.path[: self.path.rfind("/", 0, wildcard.start()) + 1]
        pattern = self.path[len(root) :]
        depth = None if "**" in pattern else pattern.count("/") + 1
        matches = re.compile(glob_translate(self.path)).match
        names_hidden = "/." in f"/{pattern}"
        return [
            info
            for info in self._walk(root, depth)
            if matches(info["name"]) and not leave_out(info["name"], () if names_hidden else _names(info, root), ("",))
        ]

    def check_unchanged(self, file: RemoteFile) -> Mapping[str, Any]:
        """Returns the store's current entry of the file, after checking that the file has not changed."""
        info = self._info(self.path)
        key, _, value = file.identity.partition(": ")
        if info.get("size") != file.num_bytes:
            raise UserError(_changed(file, f"it had {file.num_bytes} bytes and has {info.get('size')}"))
        if key and info.get(key) and str(info[key]) != value:
            raise UserError(_changed(file, f"its {key} was {value} and is {info[key]}"))
        return info

    def read_on(self, file: RemoteFile, destination: FileIO) -> None:
        """Writes at least the next block of the file."""
        read = self._read_http if self._is_http else self._read_block
        self._store.persist(lambda seconds: read(file, destination, seconds))

    def is_encrypted_by_key(self) -> bool:
        """Returns whether an S3 object is encrypted with its own key, so that its ETag is not a hash of its content."""
        bucket, key, _ = self._plain.split_path(self.path)
        head = self._store.ask(lambda: self.files._call_s3("head_object", Bucket=bucket, Key=key))
        return head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head

    def _info(self, path: str) -> Mapping[str, Any]:
        self._plain.invalidate_cache()
        info: Mapping[str, Any] = self._store.ask(lambda: self.files._info(path))
        return info

    def _walk(self, root: str, depth: int | None) -> Iterator[Mapping[str, Any]]:
        # fsspec's own walk silently skips directories that it fails to list.
        waiting, seen = [(root, 1)], set()
        while waiting:
            directory, level = waiting.pop()
            seen.add(directory.rstrip("/"))
            for info in self._list(directory):
                if info["type"] != "directory":
                    yield info
                elif (depth is None or level < depth) and info["name"].rstrip("/") not in seen:
                    waiting.append((info["name"], level + 1))

    def _list(self, directory: str) -> list[Mapping[str, Any]]:
        try:
            return list(self._store.ask(lambda: self.files._ls(directory, detail=True)))
        except FileNotFoundError:
            return []

    def _read_block(self, file: RemoteFile, destination: FileIO, seconds: float) -> None:
        start = destination.tell()
        end = min(start + _BLOCK_BYTES, file.num_bytes)
        data = run_limited(self.files._cat_file(self.path, start=start, end=end), seconds)
        if len(data) != end - start:
            raise OSError(f"received {len(data)} of {end - start} bytes")
        _write(destination, data)

    def _read_http(self, file: RemoteFile, destination: FileIO, seconds: float) -> None:
        wanted = min(destination.tell() + _BLOCK_BYTES, file.num_bytes)
        try:
            run_limited(self._stream_http(file, destination, seconds), None)
        except (aiohttp.ClientError, OSError):
            if destination.tell() < wanted:
                raise
        # Enough was received: the next call requests the rest by range.
        if destination.tell() < wanted:
            raise OSError(f"the response ended after {destination.tell()} of {file.num_bytes} bytes")

    async def _stream_http(self, file: RemoteFile, destination: FileIO, seconds: float) -> None:
        # Many web servers ignore ranges and send the whole file, which must not be held in memory.
        headers = {
            **self.files.kwargs.get("headers", {}),
            "Accept-Encoding": "identity",
            "Range": f"bytes={destination.tell()}-",
        }
        no_limit = aiohttp.ClientTimeout(total=None)
        options = {**self.files.kwargs, "headers": headers, "timeout": no_limit}
        async with asyncio.timeout(seconds) as limit:
            session = await self.files.set_session()
            async with session.get(self.files.encode_url(self.path), **options) as answer:
                self.files._raise_not_found_for_status(answer, self.path)
                if answer.status != 206:
                    destination.seek(0)
                mark = destination.tell() + _BLOCK_BYTES
                async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                    if destination.tell() + len(chunk) > file.num_bytes:
                        raise UserError(_changed(file, f"it had {file.num_bytes} bytes and now has more"))
                    _write(destination, chunk)
                    if destination.tell() >= mark:
                        mark += _BLOCK_BYTES
                        limit.reschedule(asyncio.get_running_loop().time() + seconds)


def _names(info: Mapping[str, Any], root: str) -> tuple[str, ...]:
    return tuple(str(info["name"]).removeprefix(root).split("/"))


def _changed(file: RemoteFile, how: str) -> str:
    return f"{file.url} has changed since it was listed: {how}; restore the file, {_AGAIN}"


def _write(destination: FileIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[destination.write(view) :]
    except OSError as error:
        raise WriteError(error) from None


def _check_hash(file: RemoteFile, info: Mapping[str, Any], store: _RemoteFiles, destination: FileIO) -> None:
    if is_hub(file.url):
        kind, wanted, digest = _hub_hash_of(file, info)
    else:
        kind, wanted, digest = "MD5", _md5_of(file, info), hashlib.md5()
    if wanted is None:
        return
    destination.seek(0)
    while block := destination.read(_CHUNK_BYTES):
        digest.update(block)
    found = digest.hexdigest()
    if found != wanted and not (is_s3(file.url) and store.is_encrypted_by_key()):
        raise UserError(
            f"the download of {file.url} has {kind} {found}, the store lists {wanted}; start again, or replace the file"
        )


def _hub_hash_of(file: RemoteFile, info: Mapping[str, Any]) -> tuple[str, str | None, Any]:
    """Returns the kind of the hash that the Hub lists, its value, and the beginning of the same hash to compute.

    The id of a blob in git is the hash of its length and content; of a large file it is that of a pointer to the file.
    """
    large = info.get("lfs")
    if large is not None:
        return "SHA-256", str(large["sha256"]), hashlib.sha256()
    blob = info.get("blob_id")
    return "the blob id", None if blob is None else str(blob), hashlib.sha1(b"blob %d\0" % file.num_bytes)


def _md5_of(file: RemoteFile, info: Mapping[str, Any]) -> str | None:
    """Returns the hexadecimal MD5 that a store reports; an S3 ETag is an MD5 unless the upload had several parts."""
    text = str(info.get("md5Hash") or info.get("Content-MD5"))
    if re.fullmatch("[A-Za-z0-9+/]{22}==", text):
        return base64.b64decode(text).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if is_s3(file.url) and re.fullmatch("[0-9a-f]{32}", etag) else None
