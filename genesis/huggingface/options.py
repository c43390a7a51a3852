"""Keys of `config.json` that become options of the attention part: rotary positions and windows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from genesis.errors import UserError
from genesis.model.attention import AttentionConfig

_SCALING_KEYS: Final = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
}
"""Keys of the rope_type "llama3", to fields of `RopeScaling`."""


def read_rope_scaling(path: Path, content: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Returns the base of the rotary wavelengths and the fields of their scaling; None if they are not scaled.

    Raises:
        UserError: The wavelengths are scaled in a way that the decoder cannot represent.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"  # the same precedence as in transformers
    rope = content.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    known = {"default": set[str](), "llama3": set(_SCALING_KEYS)}
    if kind not in known or not rope.keys() <= known[kind] | {"rope_type", "type", "rope_theta"}:
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


def read_sliding_window(path: Path, content: Mapping[str, Any], can_have: bool) -> int | None:
    """Returns the window of attention; None if the model has no window that is shorter than the context.

    Args:
        path: The path of `config.json`, for the message.
        content: The content of `config.json`.
        can_have: Whether transformers applies the key to models of this family.

    Raises:
        UserError: The window is not a number, or transformers has no window for this family.
    """
    window, context = content.get("sliding_window"), content.get("max_position_embeddings")
    if window is None or (not can_have and content.get("use_sliding_window") is False):
        return None
    if type(window) is not int or window < 1:
        raise UserError(f"{path}: sliding_window is {window!r}; it must be a number of tokens or null")
    if not isinstance(context, int) or window >= context:
        return None
    if not can_have:
        raise UserError(
            f"{path}: sliding_window is {window!r}, which models of {content['model_type']} do not have; set it to "
            "null if the model was trained without one"
        )
    return window


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
