"""Multi-head latent attention in Hugging Face's layout: the keys of `config.json` that describe it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.model.decoder import DecoderConfig
from genesis.model.latent import LatentAttentionConfig

LATENT_TENSORS: Final = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.compress_query.weight": "self_attn.q_a_proj.weight",
    "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.expand_query.weight": "self_attn.q_b_proj.weight",
    "attention.compress.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.latent_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.expand.weight": "self_attn.kv_b_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
}
"""The decoder's name of a parameter within its block, to the name that all families with latents have."""
_QUERY_RANK: Final = "q_lora_rank"
_WIDTHS: Final = {
    "num_attention_heads": "num_heads",
    "kv_lora_rank": "latent_dim",
    "qk_nope_head_dim": "key_dim",
    "qk_rope_head_dim": "rotary_dim",
    "v_head_dim": "value_dim",
}
_MAX_WIDTH: Final = 1 << 20
_GROWTH: Final = "mscale_all_dim"
_NORM_EPS: Final = 1e-6  # transformers' for norms of latents, whatever rms_norm_eps is
_DIGITS: Final = 12


@dataclass(frozen=True)
class LatentTable:
    """The keys with which a family describes its latent attention.

    Args:
        interleaved: Key that makes positions turn neighbouring dimensions together, or its constant value.
    """

    interleaved: str | bool

    def read(self, path: Path, content: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of `LatentAttentionConfig`.

        Args:
            path: The path of `config.json`, for the message.
            content: The content of `config.json`, with the family's defaults.
            rope: The fields about rotary wavelengths.

        Raises:
            UserError: A key is missing or has a value that the decoder cannot represent.
        """
        widths = _WIDTHS if content.get(_QUERY_RANK) is None else {**_WIDTHS, _QUERY_RANK: "query_latent_dim"}
        for key in widths:
            if type(content.get(key)) is not int or not 1 <= content[key] <= _MAX_WIDTH:
                raise UserError(f"{path}: {key} is {content.get(key)!r}; it must be from 1 to {_MAX_WIDTH:,}")
        heads = content.get("num_key_value_heads")
        if heads not in (None, content["num_attention_heads"]):
            raise UserError(
                f"{path}: num_key_value_heads is {heads!r}; with latents it must be num_attention_heads, "
                f"{content['num_attention_heads']}, or null"
            )
        found = {field: content[key] for key, field in widths.items()}
        is_interleaved = self.interleaved if isinstance(self.interleaved, bool) else content.get(self.interleaved)
        if type(is_interleaved) is not bool:
            raise UserError(f"{path}: {self.interleaved} is {is_interleaved!r}; it must be true or false")
        found |= {"has_interleaved_rope": is_interleaved, "norm_eps": _NORM_EPS, **rope}
        scaling = content.get("rope_scaling") or content.get("rope_parameters") or {}
        if "rope_scaling" in rope and scaling.get(_GROWTH):
            found["softmax_growth"] = scaling[_GROWTH]
        return found

    def write(self, latents: LatentAttentionConfig) -> dict[str, Any]:
        """Returns the keys of `config.json` apart from those of rotary wavelengths."""
        keys = {key: getattr(latents, field) for key, field in _WIDTHS.items()}
        keys |= {"num_key_value_heads": latents.num_heads, _QUERY_RANK: latents.query_latent_dim}
        if isinstance(self.interleaved, str):
            keys[self.interleaved] = latents.has_interleaved_rope
        return keys

    def compare(self, latents: LatentAttentionConfig) -> dict[str, tuple[Any, Any]]:
        """Returns what no key sets of latent attention, and what it is in this family."""
        compared: dict[str, tuple[Any, Any]] = {"mixers.norm_eps": (latents.norm_eps, _NORM_EPS)}
        if isinstance(self.interleaved, bool):
            compared["mixers.has_interleaved_rope"] = (latents.has_interleaved_rope, self.interleaved)
        if latents.rope_scaling is None or latents.rope_scaling.kind != "yarn":
            compared["mixers.softmax_growth"] = (latents.softmax_growth, 0.0)
        return compared


def write_growth(latents: LatentAttentionConfig) -> dict[str, float]:
    """Returns the keys in `rope_parameters` from which the factors of queries and keys follow, where there are any.

    Transformers reads `attention_factor` beside them; other programs read these two alone.
    """
    scaling, growth = latents.rope_scaling, latents.softmax_growth
    if scaling is None or not growth:
        return {}
    slope = 0.1 * math.log(scaling.factor)
    magnitude = 0.0
    if scaling.attention_factor is not None and slope:
        magnitude = round((scaling.attention_factor * (slope * growth + 1.0) - 1.0) / slope, _DIGITS)
    return {_GROWTH: growth} | ({"mscale": magnitude} if magnitude > 0.0 else {})


def latents_of(config: DecoderConfig) -> LatentAttentionConfig | None:
    """Returns the latent attention of all layers of a decoder; None if a layer has another mixer."""
    mixers = [mixer for mixer, _ in config.list_mixers()]
    return mixers[0] if len(mixers) == 1 and isinstance(mixers[0], LatentAttentionConfig) else None
