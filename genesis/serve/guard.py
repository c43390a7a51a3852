"""Who may ask: a token, or nobody but this machine's own pages and programs; and the headers of every answer.

Without a token, a page of another site that is open in a browser on this machine is the danger: it could post to
127.0.0.1, or let a name of its own point there. So the request's Host must name this machine, and its Origin, which
browsers send with every post, must be that host.
"""

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from genesis.errors import UserError
from genesis.serve.errors import ApiError

MIN_TOKEN_CHARS = 16
_TOKEN = re.compile(r"[!-~]+")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Guard:
    """The rule of a server.

    Args:
        token: What every request for the models must bring; None for none.
        is_public: Whether anybody may ask, through any name and from any page.

    Raises:
        UserError: The token is too short, or cannot stand in a header.
    """

    token: str | None = None
    is_public: bool = False

    def __post_init__(self) -> None:
        if self.token is None:
            return
        if self.is_public:
            raise UserError("a public server has no token: leave --token or --public away")
        if len(self.token) < MIN_TOKEN_CHARS or not _TOKEN.fullmatch(self.token):
            raise UserError(
                f"the token has {len(self.token)} characters: give at least {MIN_TOKEN_CHARS}, of ASCII, no blanks, as "
                "python -c 'import secrets; print(secrets.token_urlsafe())' prints"
            )

    def check_site(self, headers: Mapping[str, str]) -> None:
        """Refuses what another site's page sends, where that would be let in.

        Raises:
            ApiError: It is refused.
        """
        if self.is_public or self.token is not None:
            return
        host = headers.get("Host", "")
        if not is_loopback(_host_name(host)):
            raise ApiError(
                f"the server was asked for as {host[:100]!r}, and answers to localhost alone: "
                "start it with a token to reach it by other names",
                status=403,
                code="wrong_host",
            )
        origin = headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            raise ApiError(
                f"the page {origin[:100]!r} is of another site, and may not ask this server",
                status=403,
                code="wrong_origin",
            )

    def check_token(self, headers: Mapping[str, str]) -> None:
        """Refuses who does not bring the token.

        Raises:
            ApiError: It is refused.
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
        """Returns the headers that every answer carries. A public page may stand in another site's frame."""
        return {
            "Content-Security-Policy": _POLICY + ("" if self.is_public else "; frame-ancestors 'none'"),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Server": "genesis",
            "X-Content-Type-Options": "nosniff",
        }


def is_loopback(name: str) -> bool:
    """Whether a host's name or address can be nobody's but this machine's.

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
