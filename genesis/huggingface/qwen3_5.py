"""Qwen3.5's text models, dense or with experts, and Qwen3-Next.

Most layers have the gated delta rule; every fourth has attention whose output has a gate. Published checkpoints also
contain a vision tower and layers that predict several tokens; both are left out by name, and the settings of the text
model are in `text_config`. Qwen3-Next has the parts of Qwen3.5 with experts, and another arrangement of two weights: an
export writes them as Qwen3.5 has them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.mixture import ROUTER, SHARED, SHARED_GATE, STACKS, MixtureTable, without_dense
from genesis.huggingface.qwen3 import QWEN3
from genesis.model.decoder import DecoderConfig
from genesis.model.mixture import MixtureConfig

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


def unpack_interleaved(name: str, tensor: Tensor, config: DecoderConfig) -> Mapping[str, Tensor] | None:
    """Returns the weights in Qwen3-Next's `in_proj_qkvz` and `in_proj_ba`, whose rows are ordered by key head.

    None for any other tensor, and for one of another size, which is refused later by its name.
    """
    linear = config.linear_attention
    sizes: dict[str, int]
    if linear is None or not name.startswith("linear_attn.in_proj_"):
        return None
    groups = linear.num_value_heads // linear.num_key_heads
    if name == "linear_attn.in_proj_qkvz.weight":
        values = groups * linear.value_dim
        sizes = {"q": linear.key_dim, "k": linear.key_dim, "v": values, "z": values}
    elif name == "linear_attn.in_proj_ba.weight":
        sizes = {"b": groups, "a": groups}
    else:
        return None
    if tensor.ndim != 2 or len(tensor) != linear.num_key_heads * sum(sizes.values()):
        return None
    by_head = tensor.view(linear.num_key_heads, -1, tensor.shape[1])
    start, rows = 0, {}
    for part, size in sizes.items():
        rows[part] = by_head[:, start : start + size].flatten(0, 1)
        start += size
    if "b" in rows:
        return {f"linear_attn.in_proj_{part}.weight": rows[part] for part in ("b", "a")}
    mixed = torch.cat([rows["q"], rows["k"], rows["v"]])
    return {"linear_attn.in_proj_qkv.weight": mixed, "linear_attn.in_proj_z.weight": rows["z"]}


_MIXTURE_DEFAULTS: Final = {
    **{key: value for key, value in QWEN3_5.defaults.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

QWEN3_5_MOE: Final = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={**without_dense(QWEN3_5.block_tensors), **ROUTER, **SHARED, **SHARED_GATE},
    stacks=STACKS,
    keys={key: field for key, field in QWEN3_5.keys.items() if key != "intermediate_size"},
    defaults={**_MIXTURE_DEFAULTS, "num_hidden_layers": 40, "num_experts_per_tok": 8},
    wrapped_type="qwen3_5_moe",
    mixture=MixtureTable(
        ("num_experts",),
        "moe_intermediate_size",
        shared_width="shared_expert_intermediate_size",
        normalized=True,
        default_experts=256,
    ),
)

QWEN3_NEXT: Final = replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    block_tensors={**QWEN3_5.block_tensors, **ROUTER, **SHARED, **SHARED_GATE},
    defaults={
        **_MIXTURE_DEFAULTS,
        "vocab_size": 151_936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    wrapped_type=None,
    dropped=("mtp.",),
    mixture=MixtureTable(
        ("num_experts",),
        "moe_intermediate_size",
        "step",
        shared_width="shared_expert_intermediate_size",
        default_experts=512,
    ),
    unpack=unpack_interleaved,
    is_written=False,
)
