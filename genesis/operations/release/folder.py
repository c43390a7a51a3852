"""A planned folder: its texts, and the files that are copied into it, each with its hash."""

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from genesis.base.errors import UserError
from genesis.export.staging import check_is_new, staged
from genesis.operations.release.leaks import Machine, check_text
from genesis_callbacks.base.hashing import hash_file
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, read_file

SUMS_NAME: Final = "SHA256SUMS"


@dataclass
class Folder:
    """The planned content of a folder, by path in the folder.

    Args:
        texts: New files.
        taken: Existing files to copy or link, with their expected sha256.
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
        """Returns the size of every file in bytes."""
        sizes = {name: len(data) for name, data in self.texts.items()}
        return dict(sorted((sizes | {name: path.stat().st_size for name, (path, _) in self.taken.items()}).items()))

    def check(self, machine: Machine, allowed: tuple[str, ...]) -> None:
        """Checks that no file but the weights contains anything that must not leave this machine.

        Raises:
            UserError: A file contains a path, a name or a credential of this machine.
        """
        for name, data in self.texts.items():
            check_text(name, data, machine, allowed)
        for name, (path, _) in self.taken.items():
            if not name.endswith(".safetensors"):
                check_text(PurePosixPath(name).name, read_file(path, MAX_DOCUMENT_BYTES), machine, allowed)

    def check_place(self, out: Path) -> None:
        """Checks that `out` does not exist, or is a folder with the same content.

        Raises:
            UserError: `out` exists with other content.
        """
        if not self._is_at(out):
            check_is_new(out)

    def write(self, out: Path) -> None:
        """Writes the folder, with links to large files where possible; an equal existing folder is kept.

        Raises:
            UserError: `out` exists with other content, the disk has too little space, or a file differs from its hash.
        """
        if self._is_at(out):
            return
        with staged(out, sum(self.sizes().values())) as staging:
            for name, data in self.texts.items():
                _place(staging, name).write_bytes(data)
            for name, (path, digest) in self.taken.items():
                _link_or_copy(path, _place(staging, name))
                if hash_file(staging / name, "sha256") != digest:
                    raise UserError(f"{path} has changed during the release; start again")

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
    """Links weights, which are not edited; copies other files, so that an edit of one does not change the other."""
    if source.suffix == ".safetensors":
        try:
            os.link(source.resolve(), target)
        except OSError:  # another disk, or a file system without links
            pass
        else:
            return
    shutil.copyfile(source, target)
