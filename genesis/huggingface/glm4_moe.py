"""GLM-4.5: experts as in dots.llm1, and attention with optional biases and norms, in which a part of a head is rotated.

Published checkpoints hold layers behind the last one, which predict further tokens; they are left out.
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.dots1 import DOTS1
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.qwen2 import QWEN2

GLM4_MOE: Final = replace(
    DOTS1,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    block_tensors={**QWEN2.block_tensors, **DOTS1.block_tensors},
    keys={key: field for key, field in LLAMA.keys.items() if key != "intermediate_size"},
    constants={"hidden_act": "silu", "num_nextn_predict_layers": 0},
    defaults={
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    only={key: LLAMA.only[key] for key in LLAMA.only.keys() - {"attention_bias", "partial_rotary_factor"}},
    attention={},
    free=LLAMA.free | {"rotary_dim"},
    switches={"attention_bias": ("has_qkv_bias", True), "use_qk_norm": ("qk_norm", "head")},
    windows=None,
    extra_layers="num_nextn_predict_layers",
)
