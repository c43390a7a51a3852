"""What every client of a server of language models does: the server is the user's own, and its answers a stranger's.

A key comes from an environment variable, which no recipe can name. A response is read up to a limit that follows from
the tokens that were asked for, and a log-probability must be one.
"""

import os
from typing import Any, Final

import aiohttp

from genesis.base.errors import RunEndedError, UserError, printable

_PLAIN_BYTES: Final = 1 << 16
_TOKEN_BYTES: Final = 1 << 11
"""Bytes of a response, and more of them for each token."""
_CHUNK_BYTES: Final = 1 << 16
_MAX_SHOWN: Final = 200
_REFUSED: Final = (401, 403)
_LEAST_LOG_PROB: Final = -1e4
"""vLLM's stand-in for minus infinity is -9999."""
_MAX_LOG_PROB: Final = 1e-3
"""Above 0 by the rounding of a server."""


def find_root(url: str) -> str:
    """Returns an address without the `/v1` that people write behind it.

    >>> find_root("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'
    """
    return url.rstrip("/").removesuffix("/v1")


def read_key(variable: str) -> dict[str, str]:
    """Returns the headers with the key in an environment variable; none without a key.

    Raises:
        UserError: The key has a character that no header has.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{variable} has a character that no key has, such as a line break: correct it")
    return {"Authorization": f"Bearer {key}"} if key else {}


def explain_refusal(status: int, headers: dict[str, str], variable: str) -> str:
    """Returns where the key is, for the message about a status that refuses it; empty for others."""
    if status not in _REFUSED:
        return ""
    return f" (its key is in {variable})" if headers else f" ({variable} is not set)"


async def receive(response: aiohttp.ClientResponse, num_tokens: int, name: str, remedy: str) -> bytes:
    """Returns the body of a response.

    Args:
        response: The response.
        num_tokens: The tokens that were asked for.
        name: The server's name for the message.
        remedy: What its end is.

    Raises:
        RunEndedError: The body is too long for so many tokens.
    """
    content, most = bytearray(), _PLAIN_BYTES + num_tokens * _TOKEN_BYTES
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        content += chunk
        if len(content) > most:
            raise RunEndedError(f"{name} answers with more than {most:,} bytes; {remedy}")
    return bytes(content)


def is_log_prob(value: Any) -> bool:
    """Returns whether a value of JSON is a log-probability that float32 holds."""
    return type(value) in (int, float) and _LEAST_LOG_PROB <= value <= _MAX_LOG_PROB


def show(value: object) -> str:
    """Returns the beginning of what a server has sent, in one line without control characters."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return printable(" ".join(text.split())[:_MAX_SHOWN])
