"""Gemma 3's text models: norms with an offset before and after each part, scaled embeddings, and GELU.

Layers with a window have rotary wavelengths of their own. Larger published models also read images; their towers are
left out by name, and the settings of the text model are in `text_config`.
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.qwen3 import QK_NORMS

TOWERS: Final = tuple(
    f"{start}{tower}." for start in ("", "model.") for tower in ("vision_tower", "multi_modal_projector")
)
"""Beginnings of the names of tensors with which a model reads images."""

GEMMA3: Final = replace(
    LLAMA,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    block_tensors={
        **LLAMA.block_tensors,
        **QK_NORMS,
        "attention_output_norm.weight": "post_attention_layernorm.weight",
        "feed_forward_norm.weight": "pre_feedforward_layernorm.weight",
        "feed_forward_output_norm.weight": "post_feedforward_layernorm.weight",
    },
    constants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    only={
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "partial_rotary_factor": (1.0,),
        "original_max_position_embeddings": (),
        "final_logit_softcapping": (),
        "attn_logit_softcapping": (),
        "use_bidirectional_attention": (False,),
    },
    attention={"qk_norm": "head", "qk_norm_has_offset": True},
    free=LLAMA.free | {"sliding_window", "window_layers", "window_rope_theta", "softmax_scale"},
    norm_placement="both",
    has_norm_offset=True,
    windows="listed",
    has_window_rope=True,
    activation="gelu_tanh",
    multipliers={"hidden_size": ("embedding", 0.5), "query_pre_attn_scalar": ("softmax_scale", -0.5)},
    wrapped_type="gemma3",
    dropped=TOWERS,
)
