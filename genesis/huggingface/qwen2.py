"""Qwen2 and Qwen2.5: Llama with biases of query, key and value."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA

QWEN2: Final = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    block_tensors={
        **LLAMA.block_tensors,
        "attention.query.bias": "self_attn.q_proj.bias",
        "attention.key.bias": "self_attn.k_proj.bias",
        "attention.value.bias": "self_attn.v_proj.bias",
    },
    constants={"hidden_act": "silu"},
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    attention={"has_qkv_bias": True},
    free=LLAMA.free | {"sliding_window", "window_layers"},
    windows="last",
)
