"""Finds the files of a foreign source and their format."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from genesis.data.foreign.datatrove import read_datatrove
from genesis.data.foreign.flat import read_flat
from genesis.data.foreign.huggingface import SPLITS_NAME, STATE_NAME, list_arrow_files, read_arrow
from genesis.data.foreign.megatron import read_megatron
from genesis.data.foreign.token_file import TokenFile
from genesis.errors import UserError

ForeignFormat = Literal["datatrove", "megatron", "flat", "huggingface"]

_FORMATS: Final[dict[str, ForeignFormat]] = {
    ".ds": "datatrove",
    ".bin": "flat",
    ".npy": "flat",
    ".arrow": "huggingface",
}
"""By the ending of a name; a .bin with an .idx beside it is Megatron's."""


@dataclass(frozen=True)
class FoundFile:
    """A file of a known format, not yet looked into."""

    path: Path
    format: ForeignFormat


def find_token_files(paths: tuple[str, ...], wanted: ForeignFormat | Literal["auto"]) -> list[FoundFile]:
    """Returns the files that `paths` name, in this order; those of a directory by name, through all levels.

    Args:
        paths: Files, or directories of files. Of Megatron's pairs either file, or their common prefix.
        wanted: Their format; auto goes by names, and refuses several formats.

    Raises:
        UserError: A path leads to no file of the format, or the files are of several formats.
    """
    found = [file for path in paths for file in _find(Path(path).absolute(), wanted)]
    formats = {file.format for file in found}
    if len(formats) > 1:
        counts = ", ".join(f"{sum(file.format == name for file in found)} {name}" for name in sorted(formats))
        raise UserError(f"{', '.join(paths)}: files of several formats ({counts}); name one as format, or the files")
    return found


def reader_of(file: FoundFile, column: str, dtype: str | None) -> Callable[[], TokenFile]:
    """Returns what looks into a file.

    Args:
        file: The file.
        column: Of a Hugging Face dataset: where the ids are.
        dtype: Of a flat file that does not say it.
    """
    readers: dict[ForeignFormat, Callable[[], TokenFile]] = {
        "datatrove": partial(read_datatrove, file.path),
        "megatron": partial(read_megatron, file.path),
        "flat": partial(read_flat, file.path, dtype),
        "huggingface": partial(read_arrow, file.path, column),
    }
    return readers[file.format]


def _find(path: Path, wanted: ForeignFormat | Literal["auto"]) -> list[FoundFile]:
    if path.is_dir():
        files = list(_find_in_directory(path, wanted))
        if not files:
            what = "tokens (.ds, .bin, .npy, or a dataset of Hugging Face's)" if wanted == "auto" else wanted
            raise UserError(f"{path} holds no file of {what}; mend the path or the format")
        return files
    if not path.is_file() and wanted in ("auto", "megatron") and Path(f"{path}.idx").is_file():
        path = Path(f"{path}.idx")
    if not path.is_file():
        raise UserError(f"nothing is at {path}; mend the path")
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    kind = _format_of(path) if wanted == "auto" else wanted
    if kind is None:
        raise UserError(
            f"{path} does not tell its format by its name; give format (datatrove, megatron, flat, huggingface)"
        )
    return [FoundFile(path, kind)]


def _find_in_directory(directory: Path, wanted: ForeignFormat | Literal["auto"]) -> Iterator[FoundFile]:
    if wanted in ("auto", "huggingface") and any((directory / name).exists() for name in (STATE_NAME, SPLITS_NAME)):
        yield from (FoundFile(path, "huggingface") for path in list_arrow_files(directory))
        return
    for path in sorted(directory.rglob("*")):
        if path.name == STATE_NAME and wanted in ("auto", "huggingface"):
            yield from (FoundFile(file, "huggingface") for file in list_arrow_files(path.parent))
        kind = _format_of(path)
        if kind is None or kind == "huggingface" or not path.is_file():
            continue
        if wanted in ("auto", kind):
            yield FoundFile(path, kind)


def _format_of(path: Path) -> ForeignFormat | None:
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        return "megatron"
    return _FORMATS.get(path.suffix)
