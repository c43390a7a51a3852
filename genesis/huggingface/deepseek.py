"""DeepSeek-V2 and DeepSeek-V3: latent attention, and experts beside shared ones behind some dense layers.

Moonlight is a model of the second type. Published checkpoints of V3 hold layers behind the last one, which predict
further tokens; they are left out.
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.dots1 import DOTS1
from genesis.huggingface.latent import LATENT_TENSORS, LatentTable
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mixture import MixtureTable
from genesis.model.mixture import MixtureConfig

_OUTER: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "rms_norm_eps")
_ONLY: Final = {**LLAMA.only, "moe_layer_freq": (1,)}

DEEPSEEK_V3: Final = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={
        **{ours: theirs for ours, theirs in DOTS1.block_tensors.items() if not ours.startswith("attention.")},
        **LATENT_TENSORS,
    },
    stacks=DOTS1.stacks,
    keys={key: LLAMA.keys[key] for key in (*_OUTER, "tie_word_embeddings")},
    constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        # Programs other than transformers read these.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    defaults={
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_interleave": True,
        "tie_word_embeddings": False,
    },
    only={**_ONLY, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    latent=LatentTable("rope_interleave"),
    rope_kinds=("yarn", "linear"),
    mixture=DOTS1.mixture,
    extra_layers="num_nextn_predict_layers",
)

DEEPSEEK_V2: Final = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    block_tensors={
        ours: theirs for ours, theirs in DEEPSEEK_V3.block_tensors.items() if not ours.endswith("balance_bias")
    },
    constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
    },
    defaults={
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
    },
    # transformers never divides the weights of a token's experts by their sum in this family.
    only={**_ONLY, "scoring_func": ("softmax",), "norm_topk_prob": (False,)},
    latent=LatentTable(True),
    mixture=MixtureTable(
        ("n_routed_experts",),
        "moe_intermediate_size",
        "first",
        shared_count="n_shared_experts",
        normalized=False,
        has_greedy_groups=True,
    ),
    extra_layers=None,
)
