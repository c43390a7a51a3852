"""OLMo 2: Llama with norms after the parts, and a norm of all queries and of all keys of a token."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.qwen3 import QK_NORMS

OLMO2: Final = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    block_tensors={
        **LLAMA.block_tensors,
        **QK_NORMS,
        "attention_norm.weight": "post_attention_layernorm.weight",
        "feed_forward_norm.weight": "post_feedforward_layernorm.weight",
    },
    constants={"hidden_act": "silu", "attention_bias": False},
    defaults={
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # defaults to the number of query heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    attention={"qk_norm": "projection"},
    norm_placement="after",
)
