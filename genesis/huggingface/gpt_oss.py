"""GPT-OSS: attention with sinks and biases, a window in every other layer, and experts with a clamped activation.

Its files hold the matrices of all experts as [inputs, outputs], with the outputs of `gate` and `up` in turn; published
ones hold them in MXFP4 (`genesis.huggingface.mxfp4`).
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mixture import MixtureTable, without_dense
from genesis.huggingface.qwen2 import QWEN2
from genesis.model.expert_products import GATE_SLOPE
from genesis.model.mixture import MixtureConfig

_GATE_UP: Final = "mlp.experts.gate_up_proj"

GPT_OSS: Final = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={
        **without_dense(QWEN2.block_tensors),
        "attention.output_bias": "self_attn.o_proj.bias",
        "attention.sinks": "self_attn.sinks",
        "feed_forward.router.weight": "mlp.router.weight",
        "feed_forward.router.bias": "mlp.router.bias",
        "feed_forward.experts.gate": _GATE_UP,
        "feed_forward.experts.up": _GATE_UP,
        "feed_forward.experts.gate_bias": f"{_GATE_UP}_bias",
        "feed_forward.experts.up_bias": f"{_GATE_UP}_bias",
        "feed_forward.experts.down": "mlp.experts.down_proj",
        "feed_forward.experts.down_bias": "mlp.experts.down_proj_bias",
    },
    woven=frozenset({_GATE_UP, f"{_GATE_UP}_bias", "mlp.experts.down_proj"}),
    keys={key: field for key, field in LLAMA.keys.items() if key != "intermediate_size"},
    constants={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": GATE_SLOPE},
    defaults={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": GATE_SLOPE,
    },
    only={
        "attention_bias": (True,),
        "hidden_act": ("silu",),
        "attention_dropout": (0.0,),
        "swiglu_alpha": (GATE_SLOPE,),
        "original_max_position_embeddings": (),
        "partial_rotary_factor": (1.0,),
    },
    attention={"has_qkv_bias": True, "has_output_bias": True, "has_sinks": True},
    free=LLAMA.free | {"sliding_window", "window_layers"},
    windows="listed",
    mixture=MixtureTable(
        ("num_local_experts",), "intermediate_size", normalized=True, gate_limit="swiglu_limit", has_biases=True
    ),
    reads_mxfp4=True,
)
