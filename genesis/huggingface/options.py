"""Keys of `config.json` that become options of the attention part: rotary positions and windows."""

import math
from collections.abc import Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError, numbered
from genesis.huggingface.family import Family, attention_of
from genesis.huggingface.latent import latents_of, write_growth
from genesis.model.attention import AttentionConfig
from genesis.model.decoder import DecoderConfig, Scales
from genesis.model.latent import LatentAttentionConfig

_NEEDED: Final = ("factor", "low_freq_factor", "high_freq_factor", "short_factors", "long_factors")
_ORIGINAL: Final = "original_max_position_embeddings"
_SCALING_KEYS: Final[dict[str, dict[str, str]]] = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        _ORIGINAL: "original_seq_len",
    },
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "has_whole_bounds",
        _ORIGINAL: "original_seq_len",
    },
    "longrope": {
        "factor": "factor",
        "attention_factor": "attention_factor",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        _ORIGINAL: "original_seq_len",
    },
}
"""Keys of each rope_type, to fields of `RopeScaling`."""
_MAGNITUDES: Final = ("mscale", "mscale_all_dim")
"""Keys of the rope_type "yarn" from which an attention_factor that is not given follows."""
_SOFTMAX: Final = "softmax_scale"
_GROWTH: Final = "llama_4_scaling_beta"
_WHOLE: Final = "full_attention"
_WINDOWED: Final = "sliding_attention"


def read_rope(
    path: Path, content: Mapping[str, Any], family: Family, allowed: Set[str] = frozenset()
) -> dict[str, Any]:
    """Returns the fields of `AttentionConfig` about rotary wavelengths: their base, and their scaling if they have one.

    Args:
        path: The path of `config.json`, for the message.
        content: The content of `config.json`, with the family's defaults.
        family: The family.
        allowed: Other keys that may stand beside the base.

    Raises:
        UserError: The wavelengths are scaled in a way that the decoder cannot represent.
    """
    # The same precedence as in transformers.
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    rope = content.get(key) or {}
    if family.has_window_rope:
        return _read_ropes_by_layer(path, key, rope, content)
    has_growth = "query_growth" in family.free
    found = _read_rope(
        path, key, rope, content, allowed | ({_GROWTH, "max_position_embeddings"} if has_growth else set())
    )
    kind = found.get("rope_scaling", {}).get("kind")
    if kind is not None and family.rope_kinds is not None and kind not in family.rope_kinds:
        known = " and ".join(map(repr, ("default", *family.rope_kinds)))
        raise UserError(f"{path}: {key} is {rope!r}; models of {family.model_type} have the rope_types {known} only")
    if not has_growth:
        return found
    if rope.get(_GROWTH) is None:
        raise UserError(f"{path}: {key} is {rope!r}, without {_GROWTH}; give its value")
    return {**found, "query_growth": rope[_GROWTH]}


def _read_ropes_by_layer(path: Path, key: str, rope: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields where `rope_parameters` has a kind for layers with a window and one for the others."""
    by_layer = content.get("rope_parameters") or {}
    if not isinstance(by_layer, dict) or by_layer.keys() - {_WHOLE, _WINDOWED}:
        raise UserError(f"{path}: rope_parameters is {by_layer!r}; it must have {_WHOLE!r} and {_WINDOWED!r}")
    of_whole = by_layer.get(_WHOLE) or {}
    if key == "rope_parameters":
        rope = of_whole
    elif isinstance(rope, dict) and isinstance(of_whole, dict):  # transformers adds it to the layers without a window
        rope = {**of_whole, **rope}
    whole = _read_rope(path, key, rope, content, set())
    local = {**content, "rope_theta": content["rope_local_base_freq"]}
    windowed = _read_rope(path, "rope_parameters", by_layer.get(_WINDOWED) or {}, local, set())
    if windowed == whole:
        return whole
    if "rope_scaling" in windowed:
        raise UserError(f"{path}: rope_parameters is {by_layer!r}; {_WINDOWED!r} must have the rope_type 'default'")
    return {**whole, "window_rope_theta": windowed["rope_theta"]}


def settle_rope(rope: dict[str, Any], window: int | None, window_layers: tuple[int, ...] | None) -> dict[str, Any]:
    """Returns the fields of `read_rope` for the layers that there are, with a window or without one."""
    windowed = rope.get("window_rope_theta")
    if windowed is None or (window is not None and window_layers is not None):
        return rope
    plain = {name: value for name, value in rope.items() if name != "window_rope_theta"}
    return plain if window is None else {"rope_theta": windowed}


def _read_rope(path: Path, key: str, rope: Any, content: Mapping[str, Any], allowed: Set[str]) -> dict[str, Any]:
    """Returns the base of the wavelengths, and the fields of `RopeScaling` if they are scaled."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    keys = {"default": {}, **_SCALING_KEYS}.get(str(kind))
    plain = {"rope_type", "type", "rope_theta", *allowed, *(_MAGNITUDES if kind == "yarn" else ())}
    if keys is None or not rope.keys() <= keys.keys() | plain:
        kinds = ", ".join(map(repr, _SCALING_KEYS))
        raise UserError(
            f"{path}: {key} is {rope!r}; only the rope_types 'default', {kinds} and their own keys can be represented"
        )
    theta = rope.get("rope_theta", content["rope_theta"])
    if kind == "default":
        return {"rope_theta": theta}
    longest = content.get("max_position_embeddings")
    given = {name: value for name, value in rope.items() if value is not None}
    if _ORIGINAL in keys:
        if content.get(_ORIGINAL) is not None:  # transformers prefers it in families that have the key
            given[_ORIGINAL] = content[_ORIGINAL]
        given.setdefault(_ORIGINAL, longest)
        if "factor" not in given and kind != "llama3" and type(longest) is type(given[_ORIGINAL]) is int:
            given["factor"] = longest / max(given[_ORIGINAL], 1)
    found = {field: given[name] for name, field in keys.items() if given.get(name) is not None}
    missing = [name for name in keys if name not in given and keys[name] in _NEEDED]
    if missing:
        raise UserError(f"{path}: {key} is {rope!r}, without {missing[0]}; give its value")
    if kind == "dynamic":
        found["original_seq_len"] = longest
    if kind == "yarn" and "attention_factor" not in given:
        found |= _read_magnitude(path, key, rope)
    return {"rope_theta": theta, "rope_scaling": {"kind": kind, **found}}


def _read_magnitude(path: Path, key: str, rope: Mapping[str, Any]) -> dict[str, float]:
    """Returns the factor of rotated queries and keys that follows from two others; nothing without both of them."""
    values: list[Any] = [rope.get(name) for name in (*_MAGNITUDES, "factor")]
    if not all(values):
        return {}
    if not all(type(value) in (int, float) and value > 0 for value in values):
        raise UserError(f"{path}: {key} is {rope!r}; {' and '.join(_MAGNITUDES)} must be numbers above 0")
    above, below, factor = map(float, values)
    growth = 0.1 * math.log(max(factor, 1.0))
    return {"attention_factor": (growth * above + 1.0) / (growth * below + 1.0)}


def find_context(rope: Mapping[str, Any], content: Mapping[str, Any]) -> Any:
    """Returns the longest context: with the kind "dynamic", `max_position_embeddings` is that before the scaling."""
    scaling, longest = rope.get("rope_scaling") or {}, content["max_position_embeddings"]
    factor: Any = scaling.get("factor")
    if scaling.get("kind") != "dynamic" or type(longest) is not int or type(factor) not in (int, float):
        return longest
    return int(longest * factor)


def write_rope(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of `config.json`, for transformers 5 and, where wavelengths are scaled, for transformers 4."""
    latents = latents_of(config)
    if latents is not None:
        keys = _write_rope_of_all(latents)
        for rope in keys.values():
            rope |= write_growth(latents)
        return keys
    attention = attention_of(config)
    keys = _write_rope_of_all(attention)
    if attention.query_growth is not None:
        for rope in keys.values():
            rope[_GROWTH] = attention.query_growth
    if _ORIGINAL in family.defaults:
        scaling = attention.rope_scaling
        keys[_ORIGINAL] = config.max_seq_len if scaling is None else scaling.original_seq_len
    if not family.has_window_rope:
        return keys
    whole, theta = keys["rope_parameters"], attention.window_rope_theta
    windowed = whole if theta is None else {"rope_theta": theta, "rope_type": "default"}
    local = {} if theta is None else {"rope_local_base_freq": theta}  # transformers 4 reads it for Gemma 3
    return keys | local | {"rope_parameters": {_WHOLE: whole, _WINDOWED: windowed}}


def _write_rope_of_all(attention: AttentionConfig | LatentAttentionConfig) -> dict[str, Any]:
    scaling = attention.rope_scaling
    if scaling is None:
        return {"rope_parameters": {"rope_theta": attention.rope_theta, "rope_type": "default"}}
    values = {key: getattr(scaling, field) for key, field in _SCALING_KEYS[scaling.kind].items()}
    fields = {"rope_type": scaling.kind} | {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None
    }
    keys: dict[str, Any] = {"rope_parameters": {"rope_theta": attention.rope_theta, **fields}, "rope_scaling": fields}
    return keys | ({"max_position_embeddings": scaling.original_seq_len} if scaling.kind == "dynamic" else {})


def read_multipliers(path: Path, content: Mapping[str, Any], family: Family, head_dim: Any) -> dict[str, Any]:
    """Returns the fields of a decoder's shape about constant factors: `scales`, and the softmax's in `attention`.

    Raises:
        UserError: A factor is not a finite number above 0.
    """
    found: dict[str, Any] = {}
    for key, (field, power) in family.multipliers.items():
        value: Any = content.get(key)
        if type(value) not in (int, float) or not 0.0 < value < math.inf:
            raise UserError(f"{path}: {key} is {value!r}; it must be a finite number above 0")
        found[field] = float(value) ** power
    softmax = found.pop(_SOFTMAX, None)
    is_own = softmax is not None and isinstance(head_dim, int) and softmax != head_dim**-0.5
    return {"attention": {_SOFTMAX: softmax} if is_own else {}, "scales": found or None}


def write_multipliers(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of `config.json` about constant factors."""
    attention = attention_of(config)
    softmax = attention.softmax_scale
    held = {**asdict(config.scales or Scales()), _SOFTMAX: softmax or attention.head_width(config.dim) ** -0.5}
    found = {}
    for key, (field, power) in family.multipliers.items():
        if key not in family.keys:
            value = float(f"{held[field] ** (1.0 / power):.15g}")  # not 8.000000000000001, of a power and back
            found[key] = int(value) if value.is_integer() else value
    return found


def read_windows(
    path: Path, content: Mapping[str, Any], family: Family, no_rope_every: int | None, *, keeps_long: bool = False
) -> tuple[int | None, tuple[int, ...] | None]:
    """Returns the window of attention, and the layers that have it, as in `AttentionConfig`.

    The window is None if it would not be shorter than the context, or if no layer has it.

    Args:
        path: The path of `config.json`, for the message.
        content: The content of `config.json`, with the family's defaults.
        family: The family.
        no_rope_every: Which layers have no rotary positions, as in `AttentionConfig`.
        keeps_long: Whether a window that is not shorter than the context is kept, because other options follow it.

    Raises:
        UserError: The window is not a number, transformers has no window for this family, or the layers with the
            window are not known.
    """
    listed = content.get("layer_types")
    if isinstance(listed, list):  # transformers knows a second word for it
        listed = [_WHOLE if kind == "attention" else kind for kind in listed]
    if listed is not None and (not isinstance(listed, list) or set(map(str, listed)) - {_WHOLE, _WINDOWED}):
        raise UserError(f"{path}: layer_types is {listed!r}; it must list {_WHOLE!r} and {_WINDOWED!r}")
    num_layers = content["num_hidden_layers"]
    if listed is not None and len(listed) != num_layers:
        raise UserError(
            f"{path}: layer_types has {numbered(len(listed), 'entries')}; it must have one for each of {num_layers}"
        )
    has_switch = family.windows in ("last", "without_rope")
    window = _read_window(path, content, family, has_switch=has_switch)
    has_own_layers = has_switch or family.windows == "listed"
    if listed is not None and (not has_own_layers or window is None) and _WINDOWED in listed:
        raise UserError(
            f"{path}: layer_types is {listed!r}, but models of {family.model_type} with these settings have no layers "
            f"of their own for the window; all layers must be {_WHOLE!r}"
        )
    context = content.get("max_position_embeddings")
    if window is None or not isinstance(context, int) or (window >= context and not keeps_long):
        return None, None
    if family.windows == "all":
        return window, None
    layers = _list_window_layers(path, content, family, no_rope_every)
    return (window, None if len(layers) == content["num_hidden_layers"] else layers) if layers else (None, None)


def _read_window(path: Path, content: Mapping[str, Any], family: Family, *, has_switch: bool) -> int | None:
    """Returns the window that transformers applies to some layers; None if it applies none."""
    window, switch = content.get("sliding_window"), content.get("use_sliding_window")
    if has_switch and switch is not None and type(switch) is not bool:
        raise UserError(f"{path}: use_sliding_window is {switch!r}; it must be true or false")
    if window is None or (not switch if has_switch else switch is False and family.windows is None):
        return None
    if type(window) is not int or window < 1:
        raise UserError(f"{path}: sliding_window is {window!r}; it must be a number of tokens or null")
    context = content.get("max_position_embeddings")
    if family.windows is None and isinstance(context, int) and window < context:
        raise UserError(
            f"{path}: sliding_window is {window!r}, which models of {family.model_type} do not have; set it to null if "
            "the model was trained without one"
        )
    return window if family.windows is not None else None


def _list_window_layers(
    path: Path, content: Mapping[str, Any], family: Family, no_rope_every: int | None
) -> tuple[int, ...]:
    """Returns the layers that have the window, counted from 0."""
    num_layers, listed = content["num_hidden_layers"], content.get("layer_types")
    if listed is not None:
        return tuple(layer for layer, kind in enumerate(listed) if kind == _WINDOWED)
    if family.windows == "last":
        first = content["max_window_layers"]
        if type(first) is not int:
            raise UserError(f"{path}: max_window_layers is {first!r}; it must be a number of layers")
        return tuple(range(num_layers))[max(first, 0) :]
    if family.windows == "listed":
        every = content.get("sliding_window_pattern", num_layers + 1)
        if type(every) is not int or every < 1:
            raise UserError(f"{path}: sliding_window_pattern is {every!r}; it must be at least 1")
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every)
    return tuple(layer for layer in range(num_layers) if no_rope_every and (layer + 1) % no_rope_every == 0)


def write_windows(attention: AttentionConfig, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the keys of `config.json` for the window of attention and the layers that have it."""
    if family.windows is None:
        return {}
    window = attention.sliding_window
    if family.windows == "listed":
        kinds = [_WINDOWED if attention.has_window(layer) else _WHOLE for layer in range(num_layers)]
        return {"sliding_window": window, "layer_types": kinds}
    if family.windows == "all" or window is None:
        switch = {} if family.windows == "all" else {"use_sliding_window": False}
        return {"sliding_window": window, **switch}
    has_window = [attention.has_window(layer) for layer in range(num_layers)]
    first = has_window.index(True)
    # Versions of transformers that do not read `layer_types` read where the layers with the window begin.
    begin = {"max_window_layers": first} if family.windows == "last" and all(has_window[first:]) else {}
    kinds = [_WINDOWED if has else _WHOLE for has in has_window]
    return {"use_sliding_window": True, "sliding_window": window, **begin, "layer_types": kinds}


def read_no_rope_every(path: Path, content: Mapping[str, Any]) -> int | None:
    """Returns which layers have no rotary positions, as `AttentionConfig.no_rope_every`; None if all layers have them.

    Raises:
        UserError: The layers without rotary positions are not evenly spaced.
    """
    num_layers, layers = content["num_hidden_layers"], content.get("no_rope_layers")
    every = content.get("no_rope_layer_interval")
    if layers is None:
        if type(every) is not int or every < 1:
            raise UserError(f"{path}: no_rope_layer_interval is {every!r}; it must be at least 1")
        return every if isinstance(num_layers, int) and every <= num_layers else None
    if not isinstance(layers, list) or not isinstance(num_layers, int) or len(layers) < num_layers:
        raise UserError(f"{path}: no_rope_layers is {layers!r}; it must have a number for each layer")
    has_rope = [bool(layer) for layer in layers[:num_layers]]
    if all(has_rope):
        return None
    every = has_rope.index(False) + 1
    if has_rope != [(layer + 1) % every != 0 for layer in range(num_layers)]:
        raise UserError(f"{path}: no_rope_layers is {layers!r}; its zeros must follow at one distance")
    return every
