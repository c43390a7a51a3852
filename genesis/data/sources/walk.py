"""Finds the files below local directories, and those that match a pattern; links are followed."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from fsspec.utils import glob_translate

from genesis_callbacks.base.files import find_irregular_kind

NO_TARGET: Final = "a link without a target"


class FoundFile(NamedTuple):
    """A file that was found below a directory.

    Args:
        path: The path by which it was found.
        real: The path without links, the same for all names of one file.
        kind: What it is if it cannot be read like a file, such as "a FIFO"; None for a file.
        names: The directories below the one that was searched, and the name of the file.
    """

    path: str
    real: str
    kind: str | None
    names: tuple[str, ...]


class _Directory(NamedTuple):
    path: Path
    real: str
    names: tuple[str, ...]
    above: frozenset[str]


def is_hidden(names: Sequence[str]) -> bool:
    """Returns whether a file or a directory that it is in is hidden, as the copies that notebooks make are."""
    return any(name.startswith(".") for name in names)


def walk_files(root: Path) -> Iterator[FoundFile]:
    """Yields the files below a directory, and each hidden directory as one entry, which is not searched.

    Each directory is searched once, whatever links lead to it, and links are followed after all other directories.

    Raises:
        OSError: A directory cannot be listed, or a link cannot be followed; its `filename` has the path.
    """
    seen: set[str] = set()

    def may_enter(directory: _Directory) -> bool:
        is_new = directory.real not in seen
        seen.add(directory.real)
        return is_new

    yield from _walk(root, may_enter, has_hidden=False)


def match_files(pattern: str) -> Iterator[FoundFile]:
    """Yields the files that match a pattern, in which "**" stands for any number of directories.

    A link is followed unless it leads to a directory above itself. The files are those of `walk_files`; if the pattern
    itself names something hidden, its matches have no `names`, so that they do not count as hidden.

    Raises:
        OSError: A directory that may have matches cannot be listed, or a link cannot be followed.
        ValueError: The pattern has "**" as a part of a name.
    """
    parts = Path(pattern).parts
    first = next((index for index, part in enumerate(parts) if re.search(r"[*?\[]", part)), None)
    if first is None or not (root := Path(*parts[:first])).is_dir():
        return
    wanted = parts[first:]
    matches = re.compile(glob_translate("/".join(wanted))).match

    def may_enter(directory: _Directory) -> bool:
        if directory.real in directory.above:
            return False
        for name, part in zip(directory.names, wanted, strict=False):
            if part == "**":
                return True
            if not fnmatchcase(name, part):
                return False
        return len(directory.names) < len(wanted)

    names_hidden = is_hidden(wanted)
    for found in _walk(root, may_enter, has_hidden=names_hidden):
        if found.kind == "a directory" or matches("/".join(found.names)):
            yield found._replace(names=()) if names_hidden else found


def _walk(root: Path, may_enter: Callable[[_Directory], bool], *, has_hidden: bool) -> Iterator[FoundFile]:
    waiting, linked = [_Directory(root, os.path.realpath(root), (), frozenset())], list[_Directory]()
    while waiting or linked:
        directory = waiting.pop() if waiting else linked.pop(0)
        if not may_enter(directory):
            continue
        with os.scandir(directory.path) as entries:
            found = sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
        for entry in found:
            path, names = directory.path / entry.name, (*directory.names, entry.name)
            is_link = entry.is_symlink()
            real = os.path.realpath(path) if is_link else f"{directory.real}/{entry.name}"
            try:
                kind = find_irregular_kind(path.stat().st_mode)
            except OSError as error:
                if not is_link or error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                kind = NO_TARGET
            if kind != "a directory":
                yield FoundFile(str(path), real, kind, names)
                continue
            inner = _Directory(path, real, names, directory.above | {directory.real})
            if has_hidden or not is_hidden(names):
                (linked if is_link else waiting).append(inner)
            elif may_enter(inner):
                yield FoundFile(f"{path}/", real, kind, names)
