"""Qwen3's mixtures of experts, and OLMoE, which differs in its norms of queries and keys."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mixture import ROUTER, STACKS, MixtureTable, without_dense
from genesis.huggingface.qwen3 import QK_NORMS, QWEN3
from genesis.model.mixture import MixtureConfig

_KEYS: Final = {key: field for key, field in QWEN3.keys.items() if key != "intermediate_size"}

QWEN3_MOE: Final = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={**QWEN3.block_tensors, **ROUTER},
    stacks=STACKS,
    keys=_KEYS,
    constants={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    only={**QWEN3.only, "use_sliding_window": (False,)},
    free=LLAMA.free,
    windows=None,
    mixture=MixtureTable(("num_experts", "num_local_experts"), "moe_intermediate_size", "step", default_experts=128),
)

OLMOE: Final = replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={**without_dense(LLAMA.block_tensors), **QK_NORMS, **ROUTER},
    stacks=STACKS,
    keys={key: field for key, field in LLAMA.keys.items() if key not in ("intermediate_size", "head_dim")},
    constants={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    defaults={
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    only={**LLAMA.only, "clip_qkv": ()},
    attention={"qk_norm": "projection"},
    free=LLAMA.free - {"head_dim"},
    mixture=MixtureTable(("num_experts",), "intermediate_size", default_experts=64),
)
