"""Finds and describes the files of a source, and refuses files that changed after they were listed."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from genesis.base.errors import UserError
from genesis.data.remote import file_name, list_files, strip_local
from genesis.data.sources.options import Kind, SourceOptions
from genesis.data.sources.walk import NO_TARGET, FoundFile, is_hidden, match_files, walk_files
from genesis.data.store import is_url
from genesis_callbacks.base.untrusted import RefusedFileError, open_file

Compression = Literal[".gz", ".zst"]

READING: Final = 2
"""The rules by which files are read: 1 are those of earlier versions, by which a stream that was begun goes on.

Since 2, a byte order mark at the beginning of a text is left out, line breaks of a separator match those of Windows,
documents of white space are dropped, and an object of JSON with a key twice and a file that is no text are refused.
"""
_DIRECTORY_SUFFIXES: Final = (".txt", ".jsonl", ".parquet", ".arrow")
"""Suffixes of the files that are taken from a directory if the source gives no suffixes."""
_COMPRESSIONS: Final[tuple[Compression, ...]] = (".gz", ".zst")
_KINDS: Final[dict[str, Kind]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Formats by suffix, in any case; any other file is text."""
_MAX_SUFFIXES_SHOWN: Final = 6


@dataclass(frozen=True)
class InputFile:
    """A file as it was listed; a file that changes later is refused.

    For a file in a store, `path` is the URL, and `identity` replaces the modification time: it is a value of the store
    that changes with the file, such as the ETag.
    """

    path: str
    num_bytes: int
    mtime_ns: int
    identity: str = ""


@dataclass(frozen=True)
class Span:
    """A part of a file that can be read alone: bytes, row groups (batches in arrow), or the whole file."""

    file: InputFile
    start: int
    end: int
    num_bytes: int
    reading: int = READING


class Skipped(NamedTuple):
    """How many files are not read for a reason, and the path of the first one."""

    number: int
    first: str


class Skips(dict[str, Skipped]):
    """Files that are not read, by reason: a suffix, or words."""

    def add(self, reason: str, first: str, number: int = 1) -> None:
        """Counts files."""
        known = self.get(reason, Skipped(0, first))
        self[reason] = known._replace(number=known.number + number)

    def leave_out(self, path: str, names: Sequence[str], endings: tuple[str, ...]) -> bool:
        """Returns whether a file that was found by its directory or a pattern is left out, and counts it if it is.

        Args:
            path: The path of the file.
            names: The directories below the one that was searched, and the name of the file.
            endings: The endings of names, in lower case, of which the file must have one.
        """
        if is_hidden(names):
            self.add("hidden", path)
        elif not file_name(path).lower().endswith(endings):
            self.add(suffix_of(path) or "without a suffix", path)
        else:
            return False
        return True

    def describe(self) -> str:
        """Returns the counts by reason, with the first path if the reason is not a suffix."""
        suffixes = sorted(
            (reason for reason in self if reason.startswith(".")), key=lambda suffix: -self[suffix].number
        )
        parts = [f"{self[suffix].number:,} {suffix}" for suffix in suffixes[:_MAX_SUFFIXES_SHOWN]]
        if more := suffixes[_MAX_SUFFIXES_SHOWN:]:
            parts.append(f"{sum(self[suffix].number for suffix in more):,} with other suffixes")
        parts += [
            f"{number:,} {reason} ({first})" for reason, (number, first) in self.items() if reason not in suffixes
        ]
        return ", ".join(parts)


@dataclass(frozen=True)
class Listing:
    """The files of a source, and how many others were found at its paths, by the reason why they are not read.

    Args:
        source: The source.
        files: The files, each once, sorted by path.
        skipped: The other files.
    """

    source: SourceOptions
    files: tuple[InputFile, ...]
    skipped: Skips

    def describe(self) -> str:
        """Returns a line with the files that are read, by kind, and those that are not, by reason."""
        kinds = Counter(kind_of(file.path, self.source) for file in self.files)
        num_empty = sum(file.num_bytes == 0 for file in self.files)
        read = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
        empty = f", {num_empty:,} of them empty" if num_empty else ""
        files = f"{len(self.files):,} file" + ("" if len(self.files) == 1 else "s")
        line = f"source {self.source.name}: reads {files} ({read}{empty})"
        return f"{line}; does not read {self.skipped.describe()}" if self.skipped else line


def kind_of(path: str, source: SourceOptions) -> Kind:
    """Returns the kind of a file: how it holds documents."""
    if source.format != "auto":
        return source.format
    return _KINDS.get(suffix_of(path), "text")


def suffix_of(path: str) -> str:
    """Returns the suffix of a file in lower case, without that of a compression; empty if it has none.

    Example:
        >>> suffix_of("data/UP.JSONL.gz")
        '.jsonl'
    """
    name = file_name(path).lower()
    return Path(name.removesuffix(compression_of(path) or "")).suffix


def compression_of(path: str) -> Compression | None:
    """Returns the compression of a file, which its name shows."""
    name = file_name(path).lower()
    return next((ending for ending in _COMPRESSIONS if name.endswith(ending)), None)


def find_files(source: SourceOptions) -> tuple[InputFile, ...]:
    """Returns the files of a source without duplicates, sorted by path; see `list_source`."""
    return list_source(source).files


def list_source(source: SourceOptions) -> Listing:
    """Finds the files of a source: each once, whatever paths and links lead to it.

    Of a directory, files with the suffixes of the source are taken, in any case. Hidden files are left out unless a
    path names them.

    Raises:
        UserError: A path does not exist or cannot be read or listed, or a directory has no file with a suffix of the
            source.
    """
    skips = Skips()
    local: dict[str, str] = {}
    remote: dict[str, InputFile] = {}
    for pattern in map(strip_local, source.paths):
        here = Skips()
        if is_url(pattern):
            remote.update({file.path: file for file in _find_remote(source, pattern, here)})
        else:
            for path, real in _find_local(source, pattern, here):
                if local.setdefault(real, path) != path:
                    here.add("that are read by another name", path)
        for reason, (number, first) in here.items():
            skips.add(reason, first, number)
    files = {path: _stat(path, source) for path in local.values()}
    return Listing(source, tuple(file for _, file in sorted({**files, **remote}.items())), skips)


def check_unchanged(source: SourceOptions, file: InputFile) -> None:
    """Checks that a file has not changed since it was listed.

    Files in stores are checked when they are copied to the cache; the copy never changes.

    Raises:
        UserError: The file has changed.
    """
    if not is_url(file.path) and _stat(file.path, source) != file:
        raise UserError(
            f"{file.path} has changed since it was listed (size or modification time); restore it, or start again "
            "(data prepare and data clean: --restart; a run from a stream: a new run)"
        )


def check_reading(plan: dict[str, Any], directory: Path, *, is_finished: bool) -> None:
    """Checks that an earlier attempt read by these rules; a finished result stays, by whichever rules it was read.

    Args:
        plan: The plan of the attempt, whose `version` becomes that of these rules.
        directory: The attempt's directory.
        is_finished: Whether its result is complete.

    Raises:
        UserError: The attempt is unfinished, and read by other rules.
    """
    if not is_finished and plan.get("version") != READING:
        raise UserError(
            f"{directory} was begun by another version of genesis, which reads text by other rules; start again with "
            "--restart"
        )
    plan["version"] = READING


def explain_unreadable(path: str, source: SourceOptions, error: OSError) -> UserError:
    """Returns the error for a file or directory that the operating system refuses to read."""
    return UserError(
        f"source {source.name}: cannot read {path} ({error.strerror or error}); fix the cause, or remove the path"
    )


def _suffixes(source: SourceOptions) -> tuple[str, ...]:
    return source.suffixes or _DIRECTORY_SUFFIXES


def _endings(source: SourceOptions) -> tuple[str, ...]:
    return tuple(f"{suffix}{ending}".lower() for suffix in _suffixes(source) for ending in ("", *_COMPRESSIONS))


def _describe_none(source: SourceOptions, skips: Skips) -> str:
    has = f" (found: {skips.describe()})" if skips else ""
    return f"with suffix {', '.join(_suffixes(source))}{has}; set `suffixes`"


def _find_local(source: SourceOptions, pattern: str, skips: Skips) -> Iterator[tuple[str, str]]:
    """Yields the path, and the path without links, of each file at a local path or of a pattern."""
    try:
        found = _search(source, pattern, skips)
    except OSError as error:
        raise explain_unreadable(str(error.filename or pattern), source, error) from None
    for file in found:
        if file.kind is None:
            yield file.path, file.real
        elif file.kind == NO_TARGET:
            raise UserError(f"source {source.name}: {file.path} is {file.kind}; restore its target, or remove the link")
        else:
            skips.add(f"that are {file.kind}", file.path)


def _search(source: SourceOptions, pattern: str, skips: Skips) -> list[FoundFile]:
    path = Path(pattern)
    if path.is_dir():
        endings = _endings(source)
        found = [file for file in walk_files(path) if not skips.leave_out(file.path, file.names, endings)]
        if not found:
            raise UserError(f"source {source.name}: {path} has no file {_describe_none(source, skips)}")
        return found
    if os.path.lexists(path):
        return [FoundFile(str(path), os.path.realpath(path), None, ())]
    try:
        found = [file for file in match_files(pattern) if not skips.leave_out(file.path, file.names, ("",))]
    except ValueError as error:
        raise UserError(f"{pattern!r} is not a path or a glob ({error})") from None
    if not found:
        raise UserError(f"source {source.name}: no such file: {pattern} (relative to {Path.cwd()}); correct the path")
    return found


def _find_remote(source: SourceOptions, url: str, skips: Skips) -> list[InputFile]:
    files = list_files(url, _endings(source), skips.leave_out)
    if not files:
        raise UserError(f"source {source.name}: no file at {url} {_describe_none(source, skips)}, or correct the URL")
    return [InputFile(file.url, file.num_bytes, 0, file.identity) for file in files]


def _stat(path: str, source: SourceOptions) -> InputFile:
    try:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
    except RefusedFileError as error:
        raise UserError(f"source {source.name}: {path} {error.strerror}; write its content to a file") from None
    except OSError as error:
        raise explain_unreadable(path, source, error) from None
    return InputFile(path, status.st_size, status.st_mtime_ns)
