"""A folder that is to be: its texts, and the files that it takes from elsewhere, each with its hash."""

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from genesis.errors import UserError
from genesis.export.staging import check_is_new, staged
from genesis.release.leaks import Machine, check_text
from genesis_callbacks.checkpoint import hash_file

SUMS_NAME: Final = "SHA256SUMS"


@dataclass
class Folder:
    """What a folder will hold, by path in it.

    Args:
        texts: Written here.
        taken: Files elsewhere, with the sha256 that they must have.
    """

    texts: dict[str, bytes] = field(default_factory=dict)
    taken: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def add_sums(self) -> None:
        """Adds the list of all hashes, in the form that `sha256sum --check` reads."""
        lines = (f"{digest}  {name}\n" for name, digest in sorted(self.hashes().items()))
        self.texts[SUMS_NAME] = "".join(lines).encode()

    def hashes(self) -> dict[str, str]:
        """Returns the sha256 of every file."""
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in self.texts.items()}
        return hashes | {name: digest for name, (_, digest) in self.taken.items()}

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of every file."""
        sizes = {name: len(data) for name, data in self.texts.items()}
        return dict(sorted((sizes | {name: path.stat().st_size for name, (path, _) in self.taken.items()}).items()))

    def check(self, machine: Machine, allowed: tuple[str, ...]) -> None:
        """Refuses what must not leave this machine, in any file but the weights.

        Raises:
            UserError: Something is there.
        """
        for name, data in self.texts.items():
            check_text(name, data, machine, allowed)
        for name, (path, _) in self.taken.items():
            if not name.endswith(".safetensors"):
                check_text(PurePosixPath(name).name, path.read_bytes(), machine, allowed)

    def check_place(self, out: Path) -> None:
        """Refuses a place where something else is; the same folder may be there.

        Raises:
            UserError: Something else is at `out`.
        """
        if not self._is_at(out):
            check_is_new(out)

    def write(self, out: Path) -> None:
        """Makes the folder; large files are linked where the disk can. One that is there as it would be made is taken.

        Raises:
            UserError: Something else is at `out`, there is no room, or a file is not what its hash says.
        """
        if self._is_at(out):
            return
        with staged(out, sum(self.sizes().values())) as staging:
            for name, data in self.texts.items():
                _place(staging, name).write_bytes(data)
            for name, (path, digest) in self.taken.items():
                _link_or_copy(path, _place(staging, name))
                if hash_file(staging / name, "sha256") != digest:
                    raise UserError(f"{path} has changed meanwhile; begin again")

    def _is_at(self, out: Path) -> bool:
        if not out.is_dir():
            return False
        files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if not path.is_dir()}
        hashes = self.hashes()
        return files.keys() == hashes.keys() and all(
            hash_file(path, "sha256") == hashes[name] for name, path in files.items()
        )


def _place(directory: Path, name: str) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _link_or_copy(source: Path, target: Path) -> None:
    """Links weights, which nobody edits; anything else is copied, so that an edit of the one leaves the other."""
    if source.suffix == ".safetensors":
        try:
            os.link(source.resolve(), target)
        except OSError:  # another disk, or one without links
            pass
        else:
            return
    shutil.copyfile(source, target)
