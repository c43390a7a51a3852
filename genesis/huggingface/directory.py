"""A directory in Hugging Face's layout: the names of its files, and their hashes.

The `proof.json` of an export lists the hashes of the files that were proved; `check_files` compares them.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from genesis.base.errors import UserError, blaming_directory, numbered, printable
from genesis_callbacks.base.hashing import hash_file
from genesis_callbacks.base.json_text import MAX_LIST, find_longest_list, load_json
from genesis_callbacks.base.untrusted import check_file, path_below, read_file

reads_directory = blaming_directory("download the model again, or correct its files")
"""Decorates a reader whose first argument is such a directory."""
CONFIG_NAME = "config.json"
DECODER_NAME = "decoder.json"
"""The shape beside tensors under our own names, where there is no config.json."""
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CARD_NAME = "README.md"
PROOF_NAME = "proof.json"
_NUM_NAMED = 3
MAX_JSON_BYTES = 64 << 20
_NOT_HASHED = (CARD_NAME, PROOF_NAME)
"""Files without a hash: users may edit the model card, and the proof contains the hashes."""
DATA_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""Suffixes of the files of a model that are read."""
CODE_NAMES = (CONFIG_NAME, GENERATION_CONFIG_NAME, "tokenizer_config.json", "processor_config.json")
"""Files that may name Python code."""
CODE_KEYS = frozenset(
    {"auto_map", "attn_implementation", "custom_generate", "custom_pipelines", "experts_implementation"}
)
"""Their keys by which transformers finds Python code, in the directory or on the Hub."""
_READ_SUFFIXES = (".json", ".safetensors", ".model")
"""Suffixes of files that genesis or transformers would read, whoever added them."""


_OTHER_FORMATS = (
    (".gguf", "GGUF", "from_pretrained(DIRECTORY, gguf_file=NAME)"),
    (".bin", "pickle", "from_pretrained(DIRECTORY)"),
    (".pth", "pickle", "a converter of the model's authors"),
    (".onnx", "ONNX", "the model that it was made from"),
    (".h5", "TensorFlow", "from_pretrained(DIRECTORY, from_tf=True), in transformers 4"),
)
"""Suffix of weight files that genesis does not read, their format, and how transformers loads them."""


def explain_other_formats(names: Iterable[str], where: str) -> str:
    """Returns the end of a message about missing safetensors files, by the names of the files that are there."""
    present = sorted(names)
    for suffix, kind, loader in _OTHER_FORMATS:
        found = next((name for name in present if name.endswith(suffix)), None)
        if found is not None:
            return (
                f"; {found} is {kind}, which is not read: convert {where} with transformers ({loader}, then "
                "save_pretrained)"
            )
    return "; other formats are not read"


def describe_code(directory: Path) -> str | None:
    """Returns what a model brings of Python code, none of which ever runs; None if it brings nothing."""
    named = [
        f"{key} in {name}"
        for name in CODE_NAMES
        if (directory / name).is_file()
        for key in sorted(CODE_KEYS & read_json(directory / name).keys())
    ]
    files = sorted(path.name for path in directory.glob("*.py"))
    found = [*named, *files[:_NUM_NAMED], *([f"{len(files) - _NUM_NAMED} more files"] if files[_NUM_NAMED:] else [])]
    return printable(", ".join(found)) if found else None


def hash_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns size and sha256 (as on the Hub) of each file by its name, except for the model card and the proof."""
    return {path.name: _describe_file(path) for path in sorted(directory.iterdir()) if path.name not in _NOT_HASHED}


def hash_listed(directory: Path) -> str:
    """Returns a hash of the hashes that the proof of a directory lists: the identity of its weights and tokenizer.

    Raises:
        UserError: The directory has no proof with hashes.
    """
    files = read_json(directory / PROOF_NAME).get("files")
    if not isinstance(files, dict):
        raise UserError(f"{directory / PROOF_NAME} has no hashes of files; write the directory again")
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def is_export(path: Path) -> bool:
    """Returns whether `path` is a directory that looks like an export or another model in Hugging Face's layout."""
    return any((path / name).is_file() for name in (CONFIG_NAME, DECODER_NAME))


def check_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns size and hash of each file that was proved, after checking that none has changed.

    Raises:
        UserError: The directory has no proof with hashes, or a file is missing, has changed or was added.
    """
    path = directory / PROOF_NAME
    if not path.exists():
        raise UserError(
            f"{directory} has no {PROOF_NAME}, so `genesis export` did not write it; `genesis import` reads "
            "other models"
        )
    files = read_json(path).get("files")
    if not isinstance(files, dict):
        raise UserError(f"{path} is of an earlier version and has no hashes of files; export the checkpoint again")
    for name, record in files.items():
        file = path_below(directory, name, path)
        if not file.is_file():
            raise UserError(f"{directory} has no file {name}, which {PROOF_NAME} lists; export the checkpoint again")
        if record != _describe_file(file):
            raise UserError(f"{file} has changed since it was proved; export the checkpoint again")
    for file in sorted(directory.iterdir()):
        if file.suffix in _READ_SUFFIXES and file.name not in (*files, *_NOT_HASHED):
            raise UserError(f"{file} did not exist when the export was proved; remove it")
    return files


def _describe_file(path: Path) -> dict[str, Any]:
    return {"num_bytes": check_file(path), "sha256": hash_file(path, "sha256")}


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file of the directory.

    Raises:
        UserError: The file cannot be read, is larger than any configuration, or is not a JSON object.
    """
    try:
        content = load_json(read_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give a directory of Hugging Face's layout") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object")
    longest = find_longest_list(content)  # a library copies them again and again
    if longest > MAX_LIST:
        raise UserError(
            f"{path} has a list of {numbered(longest, 'values')}; at most {MAX_LIST:,} are read: correct it"
        )
    return content
