"""Keys of `config.json` about layers with linear attention, and about heads of which a part is rotated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError, numbered
from genesis.huggingface.family import Family
from genesis.model.decoder import DecoderConfig

_LINEAR: Final = "linear_attention"
_WHOLE: Final = "full_attention"
_DEFAULT_EVERY: Final = 4


def read_linear(path: Path, content: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the field of a decoder's shape about linear layers; none if all layers of the model have attention.

    Raises:
        UserError: The layers with attention are not evenly spaced.
    """
    every = _read_attention_every(path, content)
    if every == 1:
        return {}
    fields = {field: content[key] for key, field in family.linear_keys.items()}
    return {_LINEAR: {**fields, "attention_every": every, "norm_eps": content["rms_norm_eps"]}}


def find_linear_differences(config: DecoderConfig, family: Family) -> list[str]:
    """Returns what a family does not have of a decoder's linear layers, as `Family.find_differences` does."""
    linear, eps = config.linear_attention, config.parts.norm.eps
    if linear is not None and not family.linear_keys:
        return ["it has linear attention"]
    if linear is not None and linear.norm_eps != eps:
        return [f"linear_attention.norm_eps is {linear.norm_eps!r}, not {eps!r}"]
    return []


def _read_attention_every(path: Path, content: Mapping[str, Any]) -> int:
    """Returns the distance of the layers with attention; the first of them is that many layers from the beginning."""
    num_layers, listed = content["num_hidden_layers"], content.get("layer_types")
    if listed is None:
        every = content.get("full_attention_interval", _DEFAULT_EVERY)
        if type(every) is not int or every < 1:
            raise UserError(f"{path}: full_attention_interval is {every!r}; it must be at least 1")
        return every
    if not isinstance(listed, list) or set(map(str, listed)) - {_WHOLE, _LINEAR} or len(listed) != num_layers:
        raise UserError(
            f"{path}: layer_types is {listed!r}; it must list {_WHOLE!r} or {_LINEAR!r} for each of "
            f"{numbered(num_layers, 'layers')}"
        )
    every = listed.index(_WHOLE) + 1 if _WHOLE in listed else num_layers + 1
    if listed != _list_kinds(num_layers, every):
        raise UserError(f"{path}: layer_types is {listed!r}; layers with {_WHOLE!r} must follow at one distance")
    return every


def _list_kinds(num_layers: int, every: int) -> list[str]:
    return [_WHOLE if (layer + 1) % every == 0 else _LINEAR for layer in range(num_layers)]


def write_linear(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of `config.json` about linear layers."""
    linear = config.linear_attention
    if linear is None:
        return {"layer_types": [_WHOLE] * config.num_layers}
    keys = {key: getattr(linear, field) for key, field in family.linear_keys.items()}
    # llama.cpp's converter does not read the list for every family.
    keys["full_attention_interval"] = linear.attention_every
    return {**keys, "layer_types": _list_kinds(config.num_layers, linear.attention_every)}


def read_rotary_dim(path: Path, content: Mapping[str, Any], head_dim: int) -> int | None:
    """Returns the number of rotated dimensions of a head; None if all are rotated.

    Raises:
        UserError: The share of these dimensions is not a number above 0 and at most 1.
    """
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if share is None or share == 1:
        return None
    if type(share) is not float or not 0.0 < share < 1.0:
        raise UserError(f"{path}: partial_rotary_factor is {share!r}; it must be above 0 and at most 1")
    return int(head_dim * share)
