"""Phi-3 and Phi-4: Llama with one tensor for query, key and value, and one for gate and up.

A part of each head may be rotated, and the original context of scaled wavelengths stands beside their scaling.
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA

_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

PHI3: Final = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    block_tensors={
        **LLAMA.block_tensors,
        "attention.query.weight": _QKV,
        "attention.key.weight": _QKV,
        "attention.value.weight": _QKV,
        "feed_forward.gate.weight": _GATE_UP,
        "feed_forward.up.weight": _GATE_UP,
    },
    constants={"hidden_act": "silu", "attention_bias": False, "pad_token_id": None},
    defaults={
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # defaults to the number of query heads
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    only={
        **{
            key: values
            for key, values in LLAMA.only.items()
            if key not in ("partial_rotary_factor", "original_max_position_embeddings")
        },
        "resid_pdrop": (0.0,),
        "embd_pdrop": (0.0,),
    },
    free=LLAMA.free | {"rotary_dim", "sliding_window"},
    windows="all",
    rope_kinds=("longrope",),
)
