"""Access control: requests need a token, or come from this machine; also the headers of every response.

A server without a token must be protected from web pages of other sites that are open in a browser on this machine:
such a page could post to 127.0.0.1, or make a host name of its own resolve to 127.0.0.1. Therefore the request's Host
header must name this machine, and its Origin header, which browsers send with every post, must be the same host.
"""

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from genesis.base.errors import UserError, numbered
from genesis.serve.errors import ApiError

MIN_TOKEN_CHARS = 16
_TOKEN = re.compile(r"[!-~]+")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Guard:
    """The access rule of a server.

    Args:
        token: The bearer token that every request for models must carry; None for no token.
        is_public: Whether anybody may send requests, under any host name and from any page.

    Raises:
        UserError: The token is too short, or has characters that a header cannot carry.
    """

    token: str | None = None
    is_public: bool = False

    def __post_init__(self) -> None:
        if self.token is None:
            return
        if self.is_public:
            raise UserError("a public server has no token: remove either --token or --public")
        if len(self.token) < MIN_TOKEN_CHARS or not _TOKEN.fullmatch(self.token):
            raise UserError(
                f"the token has {numbered(len(self.token), 'characters')}: give at least {MIN_TOKEN_CHARS} ASCII "
                "characters without spaces, for example from python -c 'import secrets; print(secrets.token_urlsafe())'"
            )

    def check_site(self, headers: Mapping[str, str]) -> None:
        """Refuses requests that pages of other sites send, unless the server is public or has a token.

        Raises:
            ApiError: The request is refused.
        """
        if self.is_public or self.token is not None:
            return
        host = headers.get("Host", "")
        if not is_loopback(_host_name(host)):
            raise ApiError(
                f"the request's host is {host[:100]!r}, but the server only accepts localhost: "
                "start the server with a token to reach it under other names",
                status=403,
                code="wrong_host",
            )
        origin = headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise ApiError(
                f"the request comes from the page {origin[:100]!r} of another site, which may not use this server",
                status=403,
                code="wrong_origin",
            )

    def check_token(self, headers: Mapping[str, str]) -> None:
        """Refuses requests without the right token.

        Raises:
            ApiError: The request is refused.
        """
        if self.token is None:
            return
        kind, _, given = headers.get("Authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self.token.encode())
        if kind.lower() != "bearer" or not is_right:
            raise ApiError(
                "the token is missing or wrong: send 'Authorization: Bearer TOKEN' (the api_key of OpenAI's client)",
                status=401,
                code="invalid_api_key",
            )

    def answer_headers(self) -> dict[str, str]:
        """Returns the headers of every response. Only a public page may be framed by other sites."""
        return {
            "Content-Security-Policy": _POLICY + ("" if self.is_public else "; frame-ancestors 'none'"),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Server": "genesis",
            "X-Content-Type-Options": "nosniff",
        }


def is_loopback(name: str) -> bool:
    """Returns whether a host name or address always means this machine.

    >>> [is_loopback(name) for name in ("localhost", "127.0.0.1", "::1", "localhost.example.org", "")]
    [True, True, True, False, False]
    """
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """Returns the name in a Host header, without port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
