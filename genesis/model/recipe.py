"""Reads the shape of a decoder from a recipe or from its own YAML file, strictly, and writes it in the same form."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, get_args

import yaml

from genesis.base.errors import UserError
from genesis.model.adapter import AdapterConfig
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import SHORT_FIELDS, DecoderConfig, Parts, Scales, find_owner
from genesis.model.delta import GatedDeltaConfig
from genesis.model.feed_forward import FeedForwardConfig
from genesis.model.float8 import Float8Options
from genesis.model.foreign.config import TransformersConfig as TransformersConfig  # as for the mixture below
from genesis.model.language_model import BodyConfig, BodyShape
from genesis.model.latent import LatentAttentionConfig as LatentAttentionConfig  # as for the mixture below
from genesis.model.mixer import SequenceMixerConfig
from genesis.model.mixture import MixtureConfig as MixtureConfig  # a recipe and a checkpoint may then name it
from genesis.model.norm import NormConfig
from genesis.recipe.imports import check_imports, import_allowed
from genesis.recipe.yaml import load_yaml
from genesis_callbacks.base.untrusted import read_text

DECODER_PREFIX: Final = "model.decoder."
"""The prefix of the decoder's tensors in a checkpoint."""
_PLAIN_TYPES: Final = (int, float, bool, str, NoneType)


def read_decoder_config(path: Path) -> DecoderConfig:
    """Returns the shape in the YAML file `path`: a recipe of `genesis fit`, or the fields of `DecoderConfig` alone.

    Raises:
        UserError: The file cannot be read, or has no valid shape.
    """
    content = _read_yaml(path)
    if isinstance(content, dict) and "model" in content:
        model = content["model"]
        content = model.get("decoder") if isinstance(model, dict) else None
        if isinstance(content, str):
            return read_decoder_config(path.parent / content)
    return build_decoder_config(content, where=str(path))


def check_mixers(path: Path) -> None:
    """Refuses the recipe in the YAML file `path` if its list of mixers is wrong, also if the decoder is not complete.

    Raises:
        UserError: An entry of the list cannot be built.
    """
    decoder = _find_part(_read_yaml(path), "decoder") if path.is_file() else None
    if isinstance(decoder, Mapping) and decoder.get("mixers") is not None:
        _build_mixers(decoder["mixers"], f"{path}: model.decoder: mixers")


def build_decoder_config(content: Any, where: str) -> DecoderConfig:
    """Returns the shape whose fields `content` maps to values.

    A file alone cannot cause an import of code: it may name classes of parts that are known, or that the user allows
    (`genesis.recipe.imports`).

    Args:
        content: The content of a YAML or JSON file.
        where: The file's name, for the message.

    Raises:
        UserError: A field is unknown, missing or of the wrong type, or the shape cannot be built.
    """
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: no shape of a model found; give the fields of model.decoder (dim, num_layers, ...)")
    parts: dict[str, Any] = {}
    plain = {"attention": AttentionConfig, "norm": NormConfig, "linear_attention": GatedDeltaConfig, "scales": Scales}
    for name, part in plain.items():
        if content.get(name) is not None:
            parts[name] = build_dataclass(part, content[name], f"{where}: {name}")
    if content.get("feed_forward") is not None:
        parts["feed_forward"] = _build_chosen(FeedForwardConfig, content["feed_forward"], f"{where}: feed_forward")
    if content.get("body") is not None:
        parts["body"] = _build_chosen(BodyConfig, content["body"], f"{where}: body")
    if content.get("mixers") is not None:
        parts["mixers"] = _build_mixers(content["mixers"], f"{where}: mixers")
    config: DecoderConfig = build_dataclass(DecoderConfig, {**content, **parts}, where)
    return config


def read_adapter_config(recipe: Any, where: str) -> AdapterConfig | None:
    """Returns the adapters in a recipe; None if it has no adapters.

    Args:
        recipe: Plain JSON, as a manifest has it.
        where: The recipe's path, for the message.

    Raises:
        UserError: A field is unknown or has an invalid value.
    """
    content = _find_part(recipe, "adapter")
    if content is None:
        return None
    config: AdapterConfig = build_dataclass(AdapterConfig, content, f"{where}: model.adapter")
    return config


def _find_part(recipe: Any, name: str) -> Any:
    """Returns a part of a recipe's model; None if it has none."""
    model = recipe.get("model") if isinstance(recipe, Mapping) else None
    return model.get(name) if isinstance(model, Mapping) else None


def read_float8_options(recipe: Any, where: str) -> Float8Options | None:
    """Returns the float8 layers that a recipe asks for; None if it has none. Otherwise as `read_adapter_config`."""
    content = _find_part(recipe, "float8")
    if content is None:
        return None
    options: Float8Options = build_dataclass(Float8Options, content, f"{where}: model.float8")
    return options


def dump_decoder_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of a shape in the form of a recipe, as plain JSON.

    `build_decoder_config` reads it. A part that the short fields can describe is written by them, which earlier
    releases can also read.
    """
    if config.body is not None:
        shape = {name: getattr(config, name) for name in BodyShape._fields}
        return {**shape, "body": _dump_chosen(config.body)}
    config = _shorten(config)
    content: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        part = find_owner(config, field.name)
        if isinstance(value, FeedForwardConfig):
            content[field.name] = _dump_chosen(value)
        elif field.name == "mixers" and value is not None:
            content[field.name] = [_dump_chosen(mixer) for mixer in value]
        elif is_dataclass(value):
            content[field.name] = _to_plain(asdict(value))  # type: ignore[arg-type]  # it is no class
        elif value is not None and (part == field.name or getattr(config, part) is None):
            content[field.name] = value
    return content


def _dump_chosen(value: Any) -> dict[str, Any]:
    return {"class_path": _path_of(type(value)), "init_args": _to_plain(asdict(value))}


def _to_plain(content: dict[str, Any]) -> dict[str, Any]:
    lists = {name: list(value) for name, value in content.items() if isinstance(value, tuple)}
    return content | lists | {name: _to_plain(value) for name, value in content.items() if isinstance(value, dict)}


def unify_decoder(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe whose decoder uses short fields for each part that they can describe.

    Two recipes of the same decoder then have equal decoders, even if they describe it differently. A recipe without a
    valid decoder is returned unchanged.

    Args:
        recipe: Plain JSON, as a manifest has it.
    """
    model = recipe.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("decoder"), Mapping):
        return recipe
    try:
        config = build_decoder_config(model["decoder"], where="the recipe")
    except UserError:
        return recipe
    return {**recipe, "model": {**model, "decoder": dump_decoder_config(config)}}


def _shorten(config: DecoderConfig) -> DecoderConfig:
    """Returns the decoder with each part's configuration replaced by short fields if these can describe it."""
    for part in Parts._fields:
        given = getattr(config, part)
        short = {name: getattr(given, field, None) for name, (owner, field) in SHORT_FIELDS.items() if owner == part}
        if given is not None and None not in short.values():
            changes: dict[str, Any] = {part: None, **short}
            shortened = replace(config, **changes)
            if shortened.parts == config.parts:  # except for parts of another class or with fields of their own
                config = shortened
    return config


def _build_mixers(content: Any, where: str) -> tuple[SequenceMixerConfig, ...]:
    if not isinstance(content, list | tuple):
        raise UserError(f"{where} is {content!r}: it must be a list of class_path, init_args")
    return tuple(_build_chosen(SequenceMixerConfig, one, f"{where}[{number}]") for number, one in enumerate(content))


def _build_chosen(base: type[Any], content: Any, where: str) -> Any:
    """Returns the configuration of a part that `content` names by its class, which is derived from `base`."""
    if not isinstance(content, Mapping) or not content.keys() <= {"class_path", "init_args"}:
        raise UserError(f"{where} is {content!r}: it must be a mapping of class_path, init_args")
    path = content.get("class_path")
    if isinstance(path, str):
        import_allowed(path)
    known = {_path_of(config): config for config in _subclasses(base)}
    if not isinstance(path, str) or path not in known:
        check_imports([path] if isinstance(path, str) else [], where)
        raise UserError(f"{where}: class_path is {path!r}; it must be {' or '.join(sorted(known))}")
    return build_dataclass(known[path], content.get("init_args", {}), where)


def _subclasses(config: type[Any]) -> Iterator[type[Any]]:
    for subclass in config.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _path_of(config: type) -> str:
    return f"{config.__module__}.{config.__qualname__}"


def build_dataclass(config: Any, content: Any, where: str) -> Any:
    """Returns the dataclass `config` of the fields in `content`, checked by name and type."""
    if not isinstance(content, Mapping):
        raise UserError(f"{where} is {content!r}: it must be a mapping of {', '.join(f.name for f in fields(config))}")
    types = {field.name: field.type for field in fields(config)}
    content = dict(content)
    for name, value in content.items():
        if name not in types:
            near = difflib.get_close_matches(str(name), types, n=1)
            raise UserError(f"{where}: unknown key {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        if not _has_type(value, types[name]):
            raise UserError(f"{where}: {name} is {value!r}; it must be {_name_of(types[name])}")
        nested: Any = next((option for option in _options(types[name]) if is_dataclass(option)), None)
        if nested is not None and value is not None and not isinstance(value, nested):
            content[name] = build_dataclass(nested, value, f"{where}: {name}")
    missing = [field.name for field in fields(config) if field.default is MISSING and field.name not in content]
    if missing:
        needed = [field.name for field in fields(config) if field.default is MISSING]
        raise UserError(f"{where}: {missing[0]} is missing; it needs {', '.join(needed)}")
    try:
        return config(**content)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _options(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)


def _has_type(value: Any, wanted: Any) -> bool:
    """Returns whether a value has one of the expected types; only plain values are checked, other types are built."""
    options = _options(wanted)
    return not set(options) <= set(_PLAIN_TYPES) or type(value) in (*options, *((int,) if float in options else ()))


def _name_of(wanted: Any) -> str:
    return " or ".join(option.__name__ for option in _options(wanted) if option is not NoneType)


def _read_yaml(path: Path) -> Any:
    try:
        return load_yaml(read_text(path), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
