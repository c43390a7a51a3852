"""What must not leave this machine in a text: its paths, its name, who works on it, and what opens doors."""

import getpass
import io
import os
import re
import socket
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from huggingface_hub.constants import HF_TOKEN_PATH

from genesis.errors import UserError
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.open import list_file_names

WHEEL_SUFFIX: Final = ".whl"
_ROOTS: Final = (
    *("home", "root", "Users", "Volumes", "mnt", "media", "opt", "srv", "tmp", "private"),
    *("data", "scratch", "work", "fsx", "gpfs", "lustre", "nfs"),
)
"""Directories that paths of some machine begin with, beside those that this one has."""
_SYSTEM_ROOTS: Final = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "sbin", "sys", "usr")
"""Directories that every machine has and nobody works in."""
_END_OF_PATH = r"[^\s\"'`|)]*"
_PUNCTUATION = ".,;:"
_CREDENTIALS: Final = {
    "a token of Hugging Face": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "a token of GitHub": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})"),
    "an access key of AWS": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "an API key": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/@]+@"),
}
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_SECRET_CHARACTERS = 8
"""Shorter values of variables with such names are switches and the like."""
_NOBODY: Final = ("root", "user", "ubuntu", "admin", "runner", "jovyan", "app", "nobody", "localhost", "genesis")
"""Names that many machines and accounts have, and ours."""


@dataclass(frozen=True)
class Machine:
    """What is this machine's alone.

    Args:
        names: Of the host and of who works on it, by what they are.
        places: Directories.
        roots: Names of the directories that are at the top of its disks.
        secrets: Values of variables, by their names.
    """

    names: dict[str, str]
    places: tuple[str, ...]
    roots: tuple[str, ...]
    secrets: dict[str, str]

    @property
    def local_path(self) -> re.Pattern[str]:
        """What a path on a disk looks like, here or elsewhere."""
        roots = "|".join(map(re.escape, sorted({*self.roots, *_ROOTS})))
        begins = rf"~(?:[A-Za-z_][\w-]*)?/[\w.@-]|/(?:{roots})/[\w.@-]|[A-Z]:[\\/]\w|\\\\\w[\w.-]*\\\w|file://"
        return re.compile(rf"(?<![\w./<>-])(?:{begins}){_END_OF_PATH}")

    @classmethod
    def read(cls, *places: Path) -> Self:
        """Returns what can be known of it, with `places` among its directories."""
        names = {"the name of this machine": socket.gethostname(), "your name on this machine": _find_user()}
        known = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), *(place.resolve().parent for place in places))
        secrets = {
            f"the value of {name}": value
            for name, value in os.environ.items()
            if _SECRET_NAME.search(name) and len(value) >= _SECRET_CHARACTERS and not Path(value).exists()
        }
        token_file = Path(HF_TOKEN_PATH)  # not by get_token, which may ask the Hub for a newer one
        token = token_file.read_text().strip() if token_file.is_file() else ""
        return cls(
            {what: name for what, name in names.items() if name and name.lower() not in _NOBODY},
            tuple(sorted({str(place) for place in known if len(place.parts) > 2})),
            tuple(path.name for path in Path("/").iterdir() if path.is_dir() and path.name not in _SYSTEM_ROOTS),
            secrets | ({"your token of the Hub": token} if token else {}),
        )


def check_text(name: str, data: bytes, machine: Machine, allowed: Sequence[str]) -> None:
    """Refuses a file with anything in it that is of this machine or a credential.

    Args:
        name: The file's; of a wheel every member is looked at.
        data: Its bytes.
        machine: Where it was made.
        allowed: Words and paths that may be public all the same; a credential never may.

    Raises:
        UserError: Something is there; the line has file, line and what it is, and of a credential its beginning only.
    """
    if name.endswith(WHEEL_SUFFIX):
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            for member in wheel.namelist():
                check_text(f"{name}/{member}", wheel.read(member), machine, allowed)
        return
    text = data.decode("utf-8", errors="replace")
    for what, found in _find_credentials(text, machine):
        place = f"{name}, line {text.count(chr(10), 0, text.index(found)) + 1}"
        raise UserError(f"{place}: {found[:4]}... is {what}: take it out before anybody sees it")
    for what, found, start in _find_traces(name, text, machine):
        if found not in allowed:
            place = f"{name}, line {text.count(chr(10), 0, start) + 1}"
            raise UserError(f"{place}: {found!r} is {what}: take it out, or say by --allow {found!r} that it is public")


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container a user may have a number alone
        return ""


def _find_credentials(text: str, machine: Machine) -> Iterator[tuple[str, str]]:
    for what, secret in machine.secrets.items():
        if secret in text:
            yield what, secret
    for what, pattern in _CREDENTIALS.items():
        if found := pattern.search(text):
            yield what, found[0]


def _find_traces(name: str, text: str, machine: Machine) -> Iterator[tuple[str, str, int]]:
    """Yields what it is, the words, and where they begin."""
    for place in machine.places:
        for found in re.finditer(rf"(?<![\w.-]){re.escape(place)}(?![\w-]){_END_OF_PATH}", text):
            yield "a path of this machine", found[0].rstrip(_PUNCTUATION), found.start()
    # A vocabulary holds words and paths of the training text: only this machine's own paths and credentials count.
    if name in (FAST_NAME, *list_file_names()) or f"{WHEEL_SUFFIX}/" in name:  # code is about paths, too
        return
    for found in machine.local_path.finditer(text):
        yield "a local path", found[0].rstrip(_PUNCTUATION), found.start()
    for what, word in machine.names.items():
        for found in re.finditer(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text, re.IGNORECASE):
            yield what, found[0], found.start()
