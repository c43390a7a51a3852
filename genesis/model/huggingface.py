"""The decoder in Hugging Face's Llama layout, and back: the same tensors under other names.

Nothing is transposed or permuted: the rotary halves pair as they do there. An embedding that is tied stands once.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from genesis.errors import UserError
from genesis.model.decoder import DecoderConfig

_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_NAMES_BACK = {theirs: ours for ours, theirs in _NAMES.items()}
_BLOCK_NAMES_BACK = {theirs: ours for ours, theirs in _BLOCK_NAMES.items()}


def huggingface_name(name: str) -> str:
    """Returns what Llama calls the decoder's parameter `name`.

    >>> huggingface_name("blocks.3.attention.query.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}" if block else _NAMES[name]


def decoder_name(name: str) -> str:
    """Returns what the decoder calls Llama's parameter `name`.

    Raises:
        UserError: It has no such parameter.
    """
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    ours = _BLOCK_NAMES_BACK.get(layer[2]) if layer else _NAMES_BACK.get(name)
    if ours is None:
        raise UserError(f"parameter {name!r} has no place in the decoder: only the plain Llama layout can be read")
    return f"blocks.{layer[1]}.{ours}" if layer else ours


def to_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the decoder's state under Llama's names; the tensors are the same, not copies."""
    return {huggingface_name(name): tensor for name, tensor in state.items()}


def from_huggingface(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Returns Llama's state under the decoder's names; the tensors are the same, not copies.

    Args:
        state: As a Llama checkpoint holds it; an output weight beside tied embeddings is their copy and left out.
        config: The decoder's.

    Raises:
        UserError: A parameter has no place in the decoder.
    """
    renamed = {decoder_name(name): tensor for name, tensor in state.items()}
    if config.has_tied_embeddings:
        renamed.pop("output.weight", None)
    return renamed


def llama_config_dict(config: DecoderConfig) -> dict[str, Any]:
    """Returns the content of `config.json` for transformers' LlamaForCausalLM, plain JSON."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},  # transformers 5
        "tie_word_embeddings": config.has_tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
