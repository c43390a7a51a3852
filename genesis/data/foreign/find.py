"""Finds the files of a foreign source and their format."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from genesis.base.errors import UserError, blaming
from genesis.data.foreign.datatrove import read_datatrove
from genesis.data.foreign.flat import read_flat
from genesis.data.foreign.huggingface import SPLITS_NAME, STATE_NAME, list_arrow_files, read_arrow
from genesis.data.foreign.megatron import read_megatron
from genesis.data.foreign.token_file import TokenFile

ForeignFormat = Literal["datatrove", "megatron", "flat", "huggingface"]

_FORMATS: Final[dict[str, ForeignFormat]] = {
    ".ds": "datatrove",
    ".bin": "flat",
    ".npy": "flat",
    ".arrow": "huggingface",
}
"""Formats by suffix; a .bin next to an .idx of the same name is Megatron's."""


@dataclass(frozen=True)
class FoundFile:
    """A file of a known format that has not been read yet."""

    path: Path
    format: ForeignFormat


def find_token_files(paths: tuple[str, ...], wanted: ForeignFormat | Literal["auto"]) -> list[FoundFile]:
    """Returns the files at `paths`, in this order; files of a directory, on all levels, are sorted by name.

    Args:
        paths: Files, or directories of files. For a pair of Megatron's either file, or the common prefix.
        wanted: The format; auto decides by the names and refuses a mixture of formats.

    Raises:
        UserError: A path has no file of the format, or the files are of several formats.
    """
    found = [file for path in paths for file in _find(Path(path).absolute(), wanted)]
    formats = {file.format for file in found}
    if len(formats) > 1:
        counts = ", ".join(f"{sum(file.format == name for file in found)} {name}" for name in sorted(formats))
        raise UserError(
            f"{', '.join(paths)}: files of several formats ({counts}); give one by format, or list the files"
        )
    return found


def read_token_file(file: FoundFile, column: str, dtype: str | None) -> TokenFile:
    """Returns the content of a file, by the reader of its format.

    Args:
        file: The file.
        column: The column of ids in a Hugging Face dataset.
        dtype: The type of tokens in a flat file without a header.
    """
    with blaming(file.path, "write it again"):
        match file.format:
            case "datatrove":
                return read_datatrove(file.path)
            case "megatron":
                return read_megatron(file.path)
            case "flat":
                return read_flat(file.path, dtype)
            case "huggingface":
                return read_arrow(file.path, column)


def _find(path: Path, wanted: ForeignFormat | Literal["auto"]) -> list[FoundFile]:
    if path.is_dir():
        files = list(_find_in_directory(path, wanted))
        if not files:
            what = "tokens (.ds, .bin, .npy, or a dataset of Hugging Face's)" if wanted == "auto" else wanted
            raise UserError(f"{path} has no file of {what}; correct the path or the format")
        return files
    if not path.is_file() and wanted in ("auto", "megatron") and Path(f"{path}.idx").is_file():
        path = Path(f"{path}.idx")
    if not path.is_file():
        raise UserError(f"no such file or directory: {path}; correct the path")
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    kind = _format_of(path) if wanted == "auto" else wanted
    if kind is None:
        raise UserError(
            f"the format of {path} is unknown by its name; give format (datatrove, megatron, flat, huggingface)"
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
