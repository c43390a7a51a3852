"""dots.llm1: Qwen3's attention, and experts whose scores are sigmoids with a balance bias, beside shared experts."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.mixture import ROUTER, STACKS, MixtureTable
from genesis.huggingface.qwen3 import QWEN3
from genesis.model.mixture import MixtureConfig

DOTS1: Final = replace(
    QWEN3,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={
        **QWEN3.block_tensors,
        **ROUTER,
        "feed_forward.router.balance_bias": "mlp.gate.e_score_correction_bias",
        **{
            f"feed_forward.shared.{part}.weight": f"mlp.shared_experts.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    },
    stacks=STACKS,
    keys={key: field for key, field in QWEN3.keys.items() if key not in ("intermediate_size", "head_dim")},
    # transformers has one way to score; llama.cpp's converter reads it from this key.
    constants={"hidden_act": "silu", "attention_bias": False, "scoring_func": "sigmoid"},
    defaults={
        "vocab_size": 152_064,
        "hidden_size": 4608,
        "intermediate_size": 10_944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "use_sliding_window": True,  # transformers has no switch here
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    free=QWEN3.free - {"head_dim"},
    mixture=MixtureTable(
        ("n_routed_experts",), "moe_intermediate_size", "first", shared_count="n_shared_experts", has_bias=True
    ),
)
