"""Finds and describes the files of a source, and refuses files that changed after they were listed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from genesis.data.remote import file_name, list_files, strip_local
from genesis.data.sources.options import Kind, SourceOptions
from genesis.data.store import is_url
from genesis.errors import UserError

Compression = Literal[".gz", ".zst"]

_DIRECTORY_SUFFIXES: Final = (".txt", ".jsonl", ".parquet", ".arrow")
"""Suffixes of the files that are taken from a directory if the source gives no suffixes."""
_COMPRESSIONS: Final[tuple[Compression, ...]] = (".gz", ".zst")
_KINDS: Final[dict[str, Kind]] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
"""Formats by suffix; any other file is text."""


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


def kind_of(path: str, source: SourceOptions) -> Kind:
    """Returns the kind of a file: how it holds documents."""
    if source.format != "auto":
        return source.format
    stem = file_name(path).removesuffix(compression_of(path) or "")
    return next((kind for ending, kind in _KINDS.items() if stem.endswith(ending)), "text")


def compression_of(path: str) -> Compression | None:
    """Returns the compression of a file, which its name shows."""
    return next((ending for ending in _COMPRESSIONS if file_name(path).endswith(ending)), None)


def find_files(source: SourceOptions) -> tuple[InputFile, ...]:
    """Returns the files of a source without duplicates, sorted by path.

    Raises:
        UserError: A path does not exist or cannot be read, or a directory has no file with one of the suffixes.
    """
    found: set[str] = set()
    remote: dict[str, InputFile] = {}
    for pattern in map(strip_local, source.paths):
        if is_url(pattern):
            remote.update({file.path: file for file in _find_remote(source, pattern)})
            continue
        matches = [Path(pattern)] if Path(pattern).exists() else _glob(pattern)
        if not matches:
            raise UserError(
                f"source {source.name}: no such file: {pattern} (relative to {Path.cwd()}); correct the path"
            )
        for match in matches:
            found.update(_files_under(match, source) if match.is_dir() else [str(match)])
    local = {path: _stat(path, source) for path in found}
    return tuple(file for _, file in sorted({**local, **remote}.items()))


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


def explain_unreadable(path: str, source: SourceOptions, error: OSError) -> UserError:
    """Returns the error for a file that the operating system refuses to read."""
    return UserError(
        f"source {source.name}: cannot read {path} ({error.strerror or error}); fix the cause, or remove the path"
    )


def _find_remote(source: SourceOptions, url: str) -> list[InputFile]:
    files = list_files(url, _endings(source))
    if not files:
        raise UserError(
            f"source {source.name}: no file at {url} (in directories only files with the suffixes "
            f"{', '.join(source.suffixes or _DIRECTORY_SUFFIXES)} are used); correct the URL or `suffixes`"
        )
    return [InputFile(file.url, file.num_bytes, 0, file.identity) for file in files]


def _endings(source: SourceOptions) -> tuple[str, ...]:
    suffixes = source.suffixes or _DIRECTORY_SUFFIXES
    return tuple(suffix + ending for suffix in suffixes for ending in ("", *_COMPRESSIONS))


def _glob(pattern: str) -> list[Path]:
    root = Path(pattern).anchor
    try:
        return [match for match in Path(root).glob(str(Path(pattern).relative_to(root))) if match.is_file()]
    except ValueError as error:
        raise UserError(f"{pattern!r} is not a path or a glob ({error})") from None


def _files_under(directory: Path, source: SourceOptions) -> list[str]:
    endings = _endings(source)
    files = [str(path) for path in directory.rglob("*") if path.name.endswith(endings) and path.is_file()]
    if not files:
        suffixes = source.suffixes or _DIRECTORY_SUFFIXES
        raise UserError(
            f"source {source.name}: {directory} has no file with suffix {', '.join(suffixes)}; give other `suffixes`"
        )
    return files


def _stat(path: str, source: SourceOptions) -> InputFile:
    try:
        with Path(path).open("rb"):
            status = Path(path).stat()
    except OSError as error:
        raise explain_unreadable(path, source, error) from None
    return InputFile(path, status.st_size, status.st_mtime_ns)
