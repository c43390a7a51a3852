"""Qwen3: Llama with a norm of each head's queries and keys, and heads of a width of their own."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.qwen2 import QWEN2

QK_NORMS: Final = {
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}

QWEN3: Final = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    block_tensors={**LLAMA.block_tensors, **QK_NORMS},
    constants={"hidden_act": "silu", "attention_bias": False},
    defaults={**QWEN2.defaults, "head_dim": 128},
    attention={"qk_norm": "head"},
)
