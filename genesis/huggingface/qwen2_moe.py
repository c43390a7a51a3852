"""Qwen1.5-MoE and Qwen2's mixtures of experts: Qwen2's attention, and a shared expert with a gate."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mixture import ROUTER, SHARED, SHARED_GATE, STACKS, MixtureTable
from genesis.huggingface.qwen2 import QWEN2
from genesis.model.mixture import MixtureConfig

QWEN2_MOE: Final = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={**QWEN2.block_tensors, **ROUTER, **SHARED, **SHARED_GATE},
    stacks=STACKS,
    keys={key: field for key, field in QWEN2.keys.items() if key != "intermediate_size"},
    constants={"hidden_act": "silu", "use_sliding_window": False},
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
    },
    only={**QWEN2.only, "use_sliding_window": (False,)},
    attention={},
    free=LLAMA.free,
    switches={"qkv_bias": ("has_qkv_bias", True)},
    windows=None,
    mixture=MixtureTable(
        ("num_experts",),
        "moe_intermediate_size",
        "step",
        shared_width="shared_expert_intermediate_size",
        default_experts=60,
    ),
)
