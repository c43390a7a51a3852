"""Lists and downloads files in remote stores, by any URL that fsspec supports, with bounded retries.

A request that fails or gets no response in time is repeated after a growing, random wait; after its last attempt, or
when its time is over, a `StoreError` reports the last failure. The retries of the stores' own packages are turned off,
so that the two do not multiply. Errors that a retry cannot fix (a missing file, no permission) are raised at once.
"""

import asyncio
import base64
import hashlib
import itertools
import math
import os
import random
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, fields
from io import FileIO
from typing import Any, NamedTuple, TypeVar

import aiohttp
import fsspec
from fsspec.asyn import get_loop
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from genesis.errors import UserError

T = TypeVar("T")

_BLOCK_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_CONTENT_KEYS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "Content-MD5", "Digest", "CRC")
"""The stores' names for values that change with an object's content, in listings and for single objects alike."""
_TIME_KEYS = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "modify", "updated", "created")
_AGAIN = "or start again (data prepare: --restart)"


@dataclass(frozen=True)
class StoreOptions:
    """Limits of requests to a store; each field is read from the environment variable GENESIS_STORE_ plus its name.

    Args:
        attempts: Maximum number of attempts per request.
        attempt_seconds: Time limit of an attempt: until the response, and for each 16 MiB of a download.
        seconds: Time limit of a request with all attempts and waits, and of waiting for space in the cache.
    """

    attempts: int = 6
    attempt_seconds: float = 60.0
    seconds: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise UserError(f"GENESIS_STORE_{field.name.upper()} is {value}; give a number above 0")

    @classmethod
    def from_environment(cls) -> "StoreOptions":
        """Returns the options that the environment sets, with defaults for the others.

        Raises:
            UserError: A value is not a number above 0.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = f"GENESIS_STORE_{field.name.upper()}"
            if text := os.environ.get(name):
                try:
                    values[field.name] = int(text) if field.name == "attempts" else float(text)
                except ValueError:
                    raise UserError(f"{name} is {text!r}; give a number above 0") from None
        return cls(**values)


class StoreError(UserError):
    """All attempts of a request failed."""


class WriteError(Exception):
    """A download cannot be written to disk; `reason` is the disk's error."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


class RemoteFile(NamedTuple):
    """A file in a store; `identity` ("ETag: ...") changes with its content, and is empty if the store has none."""

    url: str
    num_bytes: int
    identity: str


def is_url(path: str) -> bool:
    """Returns whether `path` is in a store: a URL, but not of a local file."""
    return re.match(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]*(://|::)", path) is not None


def strip_local(path: str) -> str:
    """Returns the path in a `file://` URL; any other path is returned unchanged."""
    return str(LocalFileSystem._strip_protocol(path)) if re.match("(file|local)://", path) else path


def file_name(path: str) -> str:
    """Returns the part of a path or URL that shows the file's format, without the path of an archive or a query."""
    if not is_url(path):
        return path
    link = next((link for link in path.split("::") if "://" in link), path)
    return re.split("[?#]", link)[0] if re.match("https?://", link) else link


def list_files(url: str, endings: tuple[str, ...]) -> list[RemoteFile]:
    """Returns the files of `url`: a single file, the matches of a glob, or the files of a directory.

    Of a directory (all its levels) those are taken whose name ends in one of `endings`.

    Raises:
        StoreError: The store does not respond.
        UserError: The store is unknown or refuses access.
    """
    store = _Store(url, StoreOptions.from_environment())
    infos = [] if "*" in store.path else store.find(endings)
    return sorted(store.describe(info) for info in infos or store.glob())


def download(file: RemoteFile, destination: FileIO) -> None:
    """Writes the complete file to `destination`, after checking that it has not changed since it was listed.

    Raises:
        StoreError: All attempts to read the file failed.
        UserError: The file is missing or has changed since it was listed, or its hash differs from the store's.
        WriteError: `destination` cannot be written.
    """
    store = _Store(file.url, StoreOptions.from_environment())
    try:
        store.check_unchanged(file)
        while destination.tell() < file.num_bytes:
            store.read_on(file, destination)
        _check_hash(file, store.check_unchanged(file), store, destination)
    except FileNotFoundError:
        raise UserError(f"{file.url} was removed since it was listed; restore the file, {_AGAIN}") from None


def plan_wait_seconds(num_failures: int, draw: float) -> float:
    """Returns the wait after a number of failures: exponential, bounded, randomised by `draw`, from 0 to 1."""
    longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** min(num_failures - 1, 16))
    return longest * (1 + draw) / 2


class _Store:
    """A file system of fsspec and a URL's path in it; its requests are retried."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = url
        self.options = options
        self._plain, self.path = self._persist(lambda _: self._open())
        self._plain.invalidate_cache()  # a cached listing would hide a change
        self._is_http = isinstance(self._plain, HTTPFileSystem)
        self.files: Any = self._plain if self._plain.async_impl else AsyncFileSystemWrapper(self._plain)

    def _open(self) -> tuple[Any, str]:
        try:
            files, path = fsspec.url_to_fs(self.url, **_own_options(self.url, self.options))
        except ImportError as error:
            remedy = "pip install 'genesis-lm[s3]'" if _is_s3(self.url) else "install it with pip"
            raise UserError(
                f"{self.url} needs a package that is not installed ({_one_line(error)}): {remedy}"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.url} cannot be read ({_one_line(error)}); correct the URL") from None
        if _is_s3(self.url):
            files.retries = 1
        return files, path

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

    def find(self, endings: tuple[str, ...]) -> list[Mapping[str, Any]]:
        """Returns the file at the path, or the files below it."""
        try:
            info = None if self.path.endswith("/") else self._info(self.path)
        except FileNotFoundError:
            return []
        if info is not None and info["type"] != "directory":
            return [info]
        return [info for info in self._walk(self.path, None) if file_name(info["name"]).endswith(endings)]

    def glob(self) -> list[Mapping[str, Any]]:
        """Returns the files that match the path."""
        # In a web address "?" begins the query.
        wildcard = re.search(r"[*\[]" if self._is_http else r"[*?\[]", self.path)
        if wildcard is None:
            return []
        root = self.path[: self.path.rfind("/", 0, wildcard.start()) + 1]
        pattern = self.path[len(root) :]
        depth = None if "**" in pattern else pattern.count("/") + 1
        matches = re.compile(glob_translate(self.path)).match
        return [info for info in self._walk(root, depth) if matches(info["name"])]

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
        self._persist(lambda seconds: read(file, destination, seconds))

    def is_encrypted_by_key(self) -> bool:
        """Returns whether an S3 object is encrypted with its own key, so that its ETag is not a hash of its content."""
        bucket, key, _ = self._plain.split_path(self.path)
        head = self._ask(lambda: self.files._call_s3("head_object", Bucket=bucket, Key=key))
        return head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head

    def _info(self, path: str) -> Mapping[str, Any]:
        self._plain.invalidate_cache()
        info: Mapping[str, Any] = self._ask(lambda: self.files._info(path))
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
            return list(self._ask(lambda: self.files._ls(directory, detail=True)))
        except FileNotFoundError:
            return []

    def _ask(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._persist(lambda seconds: _run(request(), seconds))

    def _persist(self, attempt: Callable[[float], T]) -> T:
        """Calls `attempt` with its time limit until it succeeds, and returns its result."""
        end = time.monotonic() + self.options.seconds
        for number in itertools.count(1):
            try:
                return attempt(max(0.001, min(self.options.attempt_seconds, end - time.monotonic())))
            except Exception as error:  # each store has its own exceptions
                _raise_if_final(self.url, error)
                wait_seconds = plan_wait_seconds(number, random.random())
                if number >= self.options.attempts or time.monotonic() + wait_seconds > end:
                    raise StoreError(
                        f"{self.url}: {number} attempts failed, the last with {_describe_error(error)}; check "
                        "the store, the endpoint and the credentials, and start again"
                    ) from None
            time.sleep(wait_seconds)
        raise AssertionError

    def _read_block(self, file: RemoteFile, destination: FileIO, seconds: float) -> None:
        start = destination.tell()
        end = min(start + _BLOCK_BYTES, file.num_bytes)
        data = _run(self.files._cat_file(self.path, start=start, end=end), seconds)
        if len(data) != end - start:
            raise OSError(f"received {len(data)} of {end - start} bytes")
        _write(destination, data)

    def _read_http(self, file: RemoteFile, destination: FileIO, seconds: float) -> None:
        wanted = min(destination.tell() + _BLOCK_BYTES, file.num_bytes)
        try:
            _run(self._stream_http(file, destination, seconds), None)
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


def _run(request: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Runs `request` on fsspec's own event loop and returns its result; it is cancelled at its time limit."""
    future = asyncio.run_coroutine_threadsafe(request, get_loop())
    try:
        return future.result(seconds)
    finally:
        future.cancel()


def _is_s3(url: str) -> bool:
    return url.startswith(("s3://", "s3a://"))


def _own_options(url: str, options: StoreOptions) -> dict[str, Any]:
    """Returns the options that override the user's settings of a store: one attempt, with our time limit."""
    if not _is_s3(url):
        return {}
    given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    limits = {"connect_timeout": options.attempt_seconds, "read_timeout": options.attempt_seconds}
    return {"config_kwargs": {**given, **limits, "retries": {"total_max_attempts": 1}}}


def _raise_if_final(url: str, error: Exception) -> None:
    """Raises a UserError, or the error itself, if a retry cannot fix it."""
    if isinstance(error, UserError | WriteError):
        raise error
    status = _status(error)
    if isinstance(error, FileNotFoundError) and status in (None, 404, 410):
        raise FileNotFoundError(url) from None
    if isinstance(error, PermissionError) or status in (401, 403):
        raise UserError(
            f"access to {url} is denied ({_describe_error(error)}); give credentials by the store's environment "
            "variables or fsspec's configuration"
        ) from None
    if status is not None and 400 <= status < 500 and status not in (404, 408, 410, 425, 429):
        raise UserError(f"the store refuses {url} ({_describe_error(error)}); correct the URL") from None


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status behind an error of aiohttp or botocore; 0 if there was no response."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status
    if isinstance(error, aiohttp.ClientError | TimeoutError):
        return 0
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status
    # fsspec's HTTP file system raises FileNotFoundError for any failure; the real error is its cause.
    return None if error.__cause__ is None else _status(error.__cause__)


def _describe_error(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _describe_error(error.__cause__)
    if isinstance(error, TimeoutError) and not str(error):
        return "no response in time (GENESIS_STORE_ATTEMPT_SECONDS)"
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _changed(file: RemoteFile, how: str) -> str:
    return f"{file.url} has changed since it was listed: {how}; restore the file, {_AGAIN}"


def _write(destination: FileIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[destination.write(view) :]
    except OSError as error:
        raise WriteError(error) from None


def _check_hash(file: RemoteFile, info: Mapping[str, Any], store: _Store, destination: FileIO) -> None:
    wanted = _md5_of(file, info)
    if wanted is None:
        return
    destination.seek(0)
    found = hashlib.file_digest(destination, "md5").hexdigest()
    if found != wanted and not (_is_s3(file.url) and store.is_encrypted_by_key()):
        raise UserError(
            f"the download of {file.url} has MD5 {found}, the store lists {wanted}; start again, or replace the file"
        )


def _md5_of(file: RemoteFile, info: Mapping[str, Any]) -> str | None:
    """Returns the hexadecimal MD5 that a store reports; an S3 ETag is an MD5 unless the upload had several parts."""
    text = str(info.get("md5Hash") or info.get("Content-MD5"))
    if re.fullmatch("[A-Za-z0-9+/]{22}==", text):
        return base64.b64decode(text).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if _is_s3(file.url) and re.fullmatch("[0-9a-f]{32}", etag) else None
