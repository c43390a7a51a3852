"""Qwen3.5's text model: layers with the gated delta rule, every fourth with attention whose output has a gate.

Published checkpoints also contain a vision tower and layers that predict several tokens; both are left out by name, and
the settings of the text model are in `text_config`.
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.qwen3 import QWEN3

_ONLY: Final = {key: values for key, values in QWEN3.only.items() if key != "partial_rotary_factor"}

LINEAR_TENSORS: Final = {
    "linear_attention.query_key_value.weight": "linear_attn.in_proj_qkv.weight",
    "linear_attention.gate.weight": "linear_attn.in_proj_z.weight",
    "linear_attention.beta.weight": "linear_attn.in_proj_b.weight",
    "linear_attention.decay.weight": "linear_attn.in_proj_a.weight",
    "linear_attention.conv_weight": "linear_attn.conv1d.weight",
    "linear_attention.log_rate": "linear_attn.A_log",
    "linear_attention.decay_bias": "linear_attn.dt_bias",
    "linear_attention.norm_weight": "linear_attn.norm.weight",
    "linear_attention.output.weight": "linear_attn.out_proj.weight",
}

QWEN3_5: Final = replace(
    QWEN3,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    block_tensors={**QWEN3.block_tensors, **LINEAR_TENSORS},
    constants={"hidden_act": "silu", "attention_bias": False},
    defaults={
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    only=_ONLY,
    attention={"qk_norm": "head", "qk_norm_has_offset": True, "has_output_gate": True},
    free=LLAMA.free | {"rotary_dim"},
    windows=None,
    has_norm_offset=True,
    linear_keys={
        "linear_num_key_heads": "num_key_heads",
        "linear_num_value_heads": "num_value_heads",
        "linear_key_head_dim": "key_dim",
        "linear_value_head_dim": "value_dim",
        "linear_conv_kernel_dim": "conv_width",
    },
    wrapped_type="qwen3_5",
    dropped=("model.visual.", "mtp."),
)
