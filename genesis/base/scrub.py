"""Removes what identifies a machine or its user from a report, so that it can be attached to a public issue."""

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

_MIN_NAME_LENGTH: Final = 3
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\:'\"()<>,;]+[/\\])*([^\s/\\:'\"()<>,;]*)")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"]+")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")


def list_names() -> list[str]:
    """Returns the names of this machine and its user, the longest first."""
    names = {socket.gethostname(), os.uname().nodename, *os.uname().nodename.split(".")[:1]}
    names |= {os.environ.get(name, "") for name in ("HOSTNAME", "USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError, OSError):  # a user id without a name, as containers have
        names.add(getpass.getuser())
    return sorted((name for name in names if len(name) >= _MIN_NAME_LENGTH), key=len, reverse=True)


def scrub(text: str) -> str:
    """Returns a text with file names in place of paths, and without names and addresses of the machine and its user.

    Example:
        >>> scrub("no such file: /home/someone/runs/a.json")
        'no such file: .../a.json'
    """
    text = _URL.sub("URL", text)
    text = _PATH.sub(lambda match: f".../{match[1]}" if match[1] else "...", text)
    text = _UUID.sub("UUID", _ADDRESS.sub("ADDRESS", text))
    for name in list_names():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "NAME", text)
    return text


def scrub_all(value: Any) -> Any:
    """Returns plain data whose texts are scrubbed; keys are the report's own and stay."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {key: scrub_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_all(item) for item in value]
    return value
