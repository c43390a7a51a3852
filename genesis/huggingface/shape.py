"""`config.json`: a decoder's shape as one of the families writes it, and back."""

from pathlib import Path
from typing import Any, Final

from genesis.errors import UserError
from genesis.huggingface.directory import CONFIG_NAME, read_json
from genesis.huggingface.family import Family
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mistral import MISTRAL
from genesis.model.decoder import SHORT_FIELDS, DecoderConfig
from genesis.model.recipe import build_decoder_config

FAMILIES: Final[tuple[Family, ...]] = (LLAMA, MISTRAL)
_DERIVED: Final = ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings")
"""Keys whose values are not simply those of the decoder's fields."""


def read_shape(directory: Path) -> tuple[Family, DecoderConfig]:
    """Returns the family of a directory in Hugging Face's layout, and the decoder's shape from its `config.json`.

    Raises:
        UserError: There is none, or it says something that the decoder cannot represent; the line names the key.
    """
    path = directory / CONFIG_NAME
    content = read_json(path)
    family = next((family for family in FAMILIES if family.model_type == content.get("model_type")), None)
    if family is None:
        raise UserError(
            f"{path}: model_type is {content.get('model_type')!r}, which the decoder cannot represent; "
            f"it must be {' or '.join(family.model_type for family in FAMILIES)}"
        )
    return family, _build_shape(path, {**family.defaults, **content}, family)


def find_family(config: DecoderConfig) -> Family:
    """Returns the family that a decoder is exported as.

    Raises:
        UserError: No family has its feed-forward part.
    """
    wanted = type(config.parts.feed_forward)
    for family in FAMILIES:
        if family.feed_forward is wanted:
            return family
    raise UserError(
        f"the feed-forward part is {wanted.__name__}, which no family of Hugging Face's has; export as --format "
        "safetensors"
    )


def write_shape(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for transformers, plain JSON."""
    content: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for key, field in family.keys.items():
        content[key] = _read_field(config, field)
        if key == "rope_theta":  # which transformers 4 reads; transformers 5 reads the other
            content["rope_parameters"] = {"rope_theta": content[key], "rope_type": "default"}
    return {**content, **family.constants}


def _read_field(config: DecoderConfig, field: str) -> Any:
    part, name = SHORT_FIELDS.get(field, (None, field))
    return getattr(config if part is None else getattr(config.parts, part), name)


def _build_shape(path: Path, content: dict[str, Any], family: Family) -> DecoderConfig:
    for key, allowed in family.only.items():
        value = content.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "null"
            raise UserError(f"{path}: {key} is {value!r}, which the decoder cannot represent; it must be {wanted}")
    rope = content.get("rope_parameters") or {}
    is_plain = isinstance(rope, dict) and rope.keys() <= {"rope_type", "rope_theta"}
    if not is_plain or rope.get("rope_type", "default") != "default":
        raise UserError(f"{path}: rope_parameters is {rope!r}; only the rope_type 'default' can be represented")
    plain = {key: field for key, field in family.keys.items() if key not in _DERIVED}
    null = [key for key in plain if content.get(key) is None]
    if null:
        raise UserError(f"{path}: {null[0]} is null; give its value")
    shape = {field: content[key] for key, field in plain.items()} | {
        "num_kv_heads": content.get("num_key_value_heads") or content["num_attention_heads"],
        "rope_theta": rope.get("rope_theta", content["rope_theta"]),
        "has_tied_embeddings": bool(content["tie_word_embeddings"]),
    }
    config = build_decoder_config(shape, where=str(path))
    _check_window(path, content.get("sliding_window"), config)
    head_dim = content.get("head_dim")
    if head_dim is not None and head_dim != config.head_dim:
        raise UserError(f"{path}: head_dim is {head_dim}, and the decoder's is hidden_size / heads, {config.head_dim}")
    return config


def _check_window(path: Path, window: Any, config: DecoderConfig) -> None:
    """Refuses a window of attention that is shorter than the context; a longer one changes nothing."""
    if window is not None and (type(window) is not int or window < config.max_seq_len):
        raise UserError(
            f"{path}: sliding_window is {window!r} (a missing key is 4096 in mistral), shorter than the context of "
            f"{config.max_seq_len}, which the decoder cannot represent; set sliding_window to null if the model was "
            "trained without one, or max_position_embeddings to the window"
        )
