"""Requests to remote stores, by any URL that fsspec supports, with time limits and bounded retries.

A request that fails or gets no response in time is repeated after a growing, random wait; after its last attempt, or
when its time is over, a `StoreError` reports the last failure. Retries of the stores' own packages are turned off if
possible, so that the two do not multiply. Errors that a retry cannot fix (a missing file, no permission) are raised at
once.
"""

import asyncio
import itertools
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import aiohttp
import fsspec
from fsspec.asyn import get_loop
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from genesis.base.errors import UserError, numbered

_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]+@")
T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0


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


def without_password(url: str) -> str:
    """Returns a URL without user and password.

    Example:
        >>> without_password("ftp://me@host/dir"), without_password("/disk/a@b")
        ('ftp://host/dir', '/disk/a@b')
    """
    return _PASSWORD.sub("", url)


def is_url(path: str) -> bool:
    """Returns whether `path` is in a store: a URL, but not of a local file."""
    return re.match(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]*(://|::)", path) is not None


def plan_wait_seconds(num_failures: int, draw: float) -> float:
    """Returns the wait after a number of failures: exponential, bounded, randomised by `draw`, from 0 to 1."""
    longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** min(num_failures - 1, 16))
    return longest * (1 + draw) / 2


class Store:
    """A file system of fsspec and a URL's path in it; its requests are retried. Safe to use in several threads.

    Args:
        url: The URL.
        options: Limits of the requests.

    Attributes:
        url: The URL as messages have it, without user and password.
        plain: The file system.
        files: The same file system, whose methods are coroutines that run on fsspec's own event loop.
        path: The URL's path in the file system.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url, self._address = without_password(url), url
        self.options = options
        self.plain, self.path = self.persist(lambda _: self._open())
        self.plain.invalidate_cache()  # a cached listing would hide a change
        self.files: Any = self.plain if self.plain.async_impl else AsyncFileSystemWrapper(self.plain)

    def _open(self) -> tuple[Any, str]:
        try:
            files, path = fsspec.url_to_fs(self._address, **_own_options(self.url, self.options))
        except ImportError as error:
            remedy = "pip install 'genesis-lm[s3]'" if is_s3(self.url) else "install it with pip"
            remedy = "pip install huggingface_hub" if is_hub(self.url) else remedy
            raise UserError(
                f"{self.url} needs a package that is not installed ({_one_line(error)}): {remedy}"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.url} cannot be read ({_one_line(error)}); correct the URL") from None
        if is_s3(self.url):
            files.retries = 1
        return files, path

    def ask(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of a request, which is repeated as `persist` does."""
        return self.persist(lambda seconds: run_limited(request(), seconds))

    def persist(self, attempt: Callable[[float], T]) -> T:
        """Calls `attempt` with its time limit until it succeeds, and returns its result.

        Raises:
            FileNotFoundError: The store has no such file.
            StoreError: All attempts failed.
            UserError: The store refuses the request.
            WriteError: A file on this machine cannot be written.
        """
        end = time.monotonic() + self.options.seconds
        for number in itertools.count(1):
            try:
                return attempt(max(0.001, min(self.options.attempt_seconds, end - time.monotonic())))
            except Exception as error:  # each store has its own exceptions
                _raise_if_final(self.url, error)
                wait_seconds = plan_wait_seconds(number, random.random())
                if number >= self.options.attempts or time.monotonic() + wait_seconds > end:
                    raise StoreError(
                        f"{self.url}: {numbered(number, 'attempts')} failed, the last with {describe_error(error)}; "
                        "check the store, the endpoint and the credentials, and start again"
                    ) from None
            time.sleep(wait_seconds)
        raise AssertionError


def run_limited(request: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Runs `request` on fsspec's own event loop and returns its result; it is cancelled at its time limit."""
    future = asyncio.run_coroutine_threadsafe(request, get_loop())
    try:
        return future.result(seconds)
    finally:
        future.cancel()


def is_hub(url: str) -> bool:
    """Returns whether a URL names a file or a directory of a repository on the Hugging Face Hub."""
    return url.startswith("hf://")


def is_s3(url: str) -> bool:
    """Returns whether a URL names an object or a prefix in S3, or in a store with S3's interface."""
    return url.startswith(("s3://", "s3a://"))


def _own_options(url: str, options: StoreOptions) -> dict[str, Any]:
    """Returns the options that override the user's settings of a store: one attempt, with our time limit."""
    if not is_s3(url):
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
        remedy = "give credentials by the store's environment variables or fsspec's configuration"
        if is_hub(url):
            remedy = "correct the name, or give access by `hf auth login` or HF_TOKEN"
        raise UserError(f"access to {url} is denied ({describe_error(error)}); {remedy}") from None
    if type(error).__name__ == "OfflineModeIsEnabled":  # huggingface_hub's, which need not be installed
        raise UserError(f"{url} cannot be read, because HF_HUB_OFFLINE is set; unset it") from None
    is_answer = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)  # it was cut off, perhaps
    if is_hub(url) and isinstance(error, NotImplementedError | ValueError) and status is None and not is_answer:
        raise UserError(f"{url} cannot be read ({_one_line(error)}); correct the URL") from None
    if status is not None and 400 <= status < 500 and status not in (404, 408, 410, 425, 429):
        raise UserError(f"the store refuses {url} ({describe_error(error)}); correct the URL") from None


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
    if isinstance(code := getattr(response, "status_code", None), int):  # of huggingface_hub
        return code
    # fsspec's HTTP file system raises FileNotFoundError for any failure; the real error is its cause.
    return None if error.__cause__ is None else _status(error.__cause__)


def describe_error(error: BaseException) -> str:
    """Returns what a failed request reports, in one line."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return describe_error(error.__cause__)
    if isinstance(error, TimeoutError) and not str(error):
        return "no response in time (GENESIS_STORE_ATTEMPT_SECONDS)"
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
