"""Reads the shape of a decoder from a recipe, or from a YAML file that holds only the shape."""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from genesis.errors import UserError
from genesis.model.decoder import DecoderConfig


def read_decoder_config(path: Path) -> DecoderConfig:
    """Returns the shape in the YAML file `path`: a recipe of `genesis fit`, or the fields of `DecoderConfig` alone.

    Raises:
        UserError: The file cannot be read or names no shape that can be built.
    """
    content = _read_yaml(path)
    if isinstance(content, dict) and "model" in content:
        model = content["model"]
        content = model.get("decoder") if isinstance(model, dict) else None
        if isinstance(content, str):
            return read_decoder_config(path.parent / content)
    return build_decoder_config(content, where=str(path))


def build_decoder_config(content: Any, where: str) -> DecoderConfig:
    """Returns the shape whose fields `content` maps to values.

    Args:
        content: What a YAML or JSON file held.
        where: The file's name, for the message.

    Raises:
        UserError: A field is unknown, missing or of the wrong type, or the shape cannot be built.
    """
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: no model shape there; give the fields of model.decoder (dim, num_layers, ...)")
    types = {field.name: field.type for field in fields(DecoderConfig)}
    for name, value in content.items():
        if name not in types:
            near = difflib.get_close_matches(str(name), types, n=1)
            raise UserError(f"{where}: unknown key {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        if not _has_type(value, types[name]):
            raise UserError(f"{where}: {name} is {value!r}; it must be {getattr(types[name], '__name__', types[name])}")
    missing = [field.name for field in fields(DecoderConfig) if field.default is MISSING and field.name not in content]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; a decoder needs {', '.join(missing)}")
    try:
        return DecoderConfig(**content)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _has_type(value: Any, wanted: Any) -> bool:
    return type(value) in ((int, float) if wanted is float else (wanted,))


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
