"""Finds private facts of this machine in a text: its paths, its name, its user's name, and credentials."""

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

from genesis.base.errors import UserError
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.open import list_file_names

WHEEL_SUFFIX: Final = ".whl"
_ROOTS: Final = (
    *("home", "root", "Users", "Volumes", "mnt", "media", "opt", "srv", "tmp", "private"),
    *("data", "scratch", "work", "fsx", "gpfs", "lustre", "nfs"),
)
"""Directories with which paths of other machines may begin, in addition to those of this machine."""
_SYSTEM_ROOTS: Final = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "sbin", "sys", "usr")
"""Directories that every machine has and that contain no user's work."""
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
"""Shorter values of variables with such names are switches rather than secrets."""
_NOBODY: Final = ("root", "user", "ubuntu", "admin", "runner", "jovyan", "app", "nobody", "localhost", "genesis")
"""Names that many machines and accounts have, and the project's own name."""


@dataclass(frozen=True)
class Machine:
    """Facts that identify this machine.

    Args:
        names: The names of the host and its user, by a description.
        places: The machine's directories.
        roots: Names of the top-level directories.
        secrets: Values of environment variables, by a description.
    """

    names: dict[str, str]
    places: tuple[str, ...]
    roots: tuple[str, ...]
    secrets: dict[str, str]

    @property
    def local_path(self) -> re.Pattern[str]:
        """The pattern of a path on this or another machine."""
        roots = "|".join(map(re.escape, sorted({*self.roots, *_ROOTS})))
        begins = rf"~(?:[A-Za-z_][\w-]*)?/[\w.@-]|/(?:{roots})/[\w.@-]|[A-Z]:[\\/]\w|\\\\\w[\w.-]*\\\w|file://"
        return re.compile(rf"(?<![\w./<>-])(?:{begins}){_END_OF_PATH}")

    @classmethod
    def read(cls, *places: Path) -> Self:
        """Returns the facts about this machine, with `places` among its directories."""
        names = {"the name of this machine": socket.gethostname(), "your name on this machine": _find_user()}
        known = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), *(place.resolve().parent for place in places))
        secrets = {
            f"the value of {name}": value
            for name, value in os.environ.items()
            if _SECRET_NAME.search(name) and len(value) >= _SECRET_CHARACTERS and not Path(value).exists()
        }
        token_file = Path(HF_TOKEN_PATH)  # not by get_token, which may request a newer one from the Hub
        token = token_file.read_text().strip() if token_file.is_file() else ""
        return cls(
            {what: name for what, name in names.items() if name and name.lower() not in _NOBODY},
            tuple(sorted({str(place) for place in known if len(place.parts) > 2})),
            tuple(path.name for path in Path("/").iterdir() if path.is_dir() and path.name not in _SYSTEM_ROOTS),
            secrets | ({"your token of the Hub": token} if token else {}),
        )


def check_text(name: str, data: bytes, machine: Machine, allowed: Sequence[str]) -> None:
    """Refuses a file that contains facts about this machine, or a credential.

    Args:
        name: The file's name; every member of a wheel is checked.
        data: The file's content.
        machine: The facts about this machine.
        allowed: Words and paths that may be public; credentials are never allowed.

    Raises:
        UserError: The file contains such a fact. Of a credential, the message quotes only the beginning.
    """
    if name.endswith(WHEEL_SUFFIX):
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            for member in wheel.namelist():
                check_text(f"{name}/{member}", wheel.read(member), machine, allowed)
        return
    text = data.decode("utf-8", errors="replace")
    for what, found in _find_credentials(text, machine):
        place = f"{name}, line {text.count(chr(10), 0, text.index(found)) + 1}"
        raise UserError(f"{place}: {found[:4]}... is {what}: remove it before you publish the file")
    for what, found, start in _find_traces(name, text, machine):
        if found not in allowed:
            place = f"{name}, line {text.count(chr(10), 0, start) + 1}"
            raise UserError(
                f"{place}: {found!r} is {what}: remove it, or allow it by --allow {found!r} if it may be public"
            )


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container a user may have only a number
        return ""


def _find_credentials(text: str, machine: Machine) -> Iterator[tuple[str, str]]:
    for what, secret in machine.secrets.items():
        if secret in text:
            yield what, secret
    for what, pattern in _CREDENTIALS.items():
        if found := pattern.search(text):
            yield what, found[0]


def _find_traces(name: str, text: str, machine: Machine) -> Iterator[tuple[str, str, int]]:
    """Yields (description, text, start) of each finding."""
    for place in machine.places:
        for found in re.finditer(rf"(?<![\w.-]){re.escape(place)}(?![\w-]){_END_OF_PATH}", text):
            yield "a path of this machine", found[0].rstrip(_PUNCTUATION), found.start()
    # A vocabulary holds words and paths of the training text: only this machine's own paths and credentials count.
    if f"{WHEEL_SUFFIX}/" in name or name in (FAST_NAME, *list_file_names()):  # code contains paths legitimately
        return
    for found in machine.local_path.finditer(text):
        yield "a local path", found[0].rstrip(_PUNCTUATION), found.start()
    for what, word in machine.names.items():
        for found in re.finditer(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text, re.IGNORECASE):
            yield what, found[0], found.start()
