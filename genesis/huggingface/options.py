"""Keys of `config.json` that become options of the attention part: rotary positions and windows."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError, numbered
from genesis.huggingface.family import Family
from genesis.model.attention import AttentionConfig

_SCALING_KEYS: Final = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
}
"""Keys of the rope_type "llama3", to fields of `RopeScaling`."""
_WHOLE: Final = "full_attention"
_WINDOWED: Final = "sliding_attention"


def read_rope_scaling(
    path: Path, content: Mapping[str, Any], allowed: Set[str] = frozenset()
) -> tuple[Any, dict[str, Any] | None]:
    """Returns the base of the rotary wavelengths and the fields of their scaling; None if they are not scaled.

    Args:
        path: The path of `config.json`, for the message.
        content: The content of `config.json`, with the family's defaults.
        allowed: Other keys that may stand beside the base.

    Raises:
        UserError: The wavelengths are scaled in a way that the decoder cannot represent.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"  # the same precedence as in transformers
    rope = content.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    known = {"default": set[str](), "llama3": set(_SCALING_KEYS)}
    if kind not in known or not rope.keys() <= known[kind] | {"rope_type", "type", "rope_theta"} | allowed:
        raise UserError(f"{path}: {key} is {rope!r}; only the rope_types 'default' and 'llama3' can be represented")
    theta = rope.get("rope_theta", content["rope_theta"])
    if kind == "default":
        return theta, None
    defaults = {"original_max_position_embeddings": content.get("max_position_embeddings")}
    missing = [name for name in _SCALING_KEYS if (defaults | rope).get(name) is None]
    if missing:
        raise UserError(f"{path}: {key} is {rope!r}, without {missing[0]}; give its value")
    return theta, {field: (defaults | rope)[name] for name, field in _SCALING_KEYS.items()}


def write_rope_scaling(attention: AttentionConfig) -> dict[str, Any]:
    """Returns the keys of `config.json`, for transformers 5 and, where wavelengths are scaled, for transformers 4."""
    scaling = attention.rope_scaling
    if scaling is None:
        return {"rope_parameters": {"rope_theta": attention.rope_theta, "rope_type": "default"}}
    fields = {"rope_type": "llama3"} | {key: getattr(scaling, field) for key, field in _SCALING_KEYS.items()}
    return {"rope_parameters": {"rope_theta": attention.rope_theta, **fields}, "rope_scaling": fields}


def read_windows(
    path: Path, content: Mapping[str, Any], family: Family, no_rope_every: int | None
) -> tuple[int | None, tuple[int, ...] | None]:
    """Returns the window of attention, and the layers that have it, as in `AttentionConfig`.

    The window is None if it would not be shorter than the context, or if no layer has it.

    Args:
        path: The path of `config.json`, for the message.
        content: The content of `config.json`, with the family's defaults.
        family: The family.
        no_rope_every: Which layers have no rotary positions, as in `AttentionConfig`.

    Raises:
        UserError: The window is not a number, transformers has no window for this family, or the layers with the
            window are not known.
    """
    listed = content.get("layer_types")
    if listed is not None and (not isinstance(listed, list) or set(map(str, listed)) - {_WHOLE, _WINDOWED}):
        raise UserError(f"{path}: layer_types is {listed!r}; it must list {_WHOLE!r} and {_WINDOWED!r}")
    num_layers = content["num_hidden_layers"]
    if listed is not None and len(listed) != num_layers:
        raise UserError(
            f"{path}: layer_types has {numbered(len(listed), 'entries')}; it must have one for each of {num_layers}"
        )
    has_switch = family.windows in ("last", "without_rope")
    window = _read_window(path, content, family, has_switch=has_switch)
    if listed is not None and (not has_switch or window is None) and _WINDOWED in listed:
        raise UserError(
            f"{path}: layer_types is {listed!r}, but models of {family.model_type} with these settings have no layers "
            f"of their own for the window; all layers must be {_WHOLE!r}"
        )
    context = content.get("max_position_embeddings")
    if window is None or not isinstance(context, int) or window >= context:
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
    return tuple(layer for layer in range(num_layers) if no_rope_every and (layer + 1) % no_rope_every == 0)


def write_windows(attention: AttentionConfig, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the keys of `config.json` for the window of attention and the layers that have it."""
    if family.windows is None:
        return {}
    window = attention.sliding_window
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
