"""Mixtral: Mistral with a mixture of experts in every layer."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.mistral import MISTRAL
from genesis.huggingface.mixture import MixtureTable, without_dense
from genesis.model.mixture import MixtureConfig

_BLOCK: Final = "block_sparse_moe"

MIXTRAL: Final = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    feed_forward=MixtureConfig,
    block_tensors={**without_dense(MISTRAL.block_tensors), "feed_forward.router.weight": f"{_BLOCK}.gate.weight"},
    stacks={
        f"feed_forward.experts.{ours}": f"{_BLOCK}.experts.{{}}.{theirs}.weight"
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    keys={key: field for key, field in MISTRAL.keys.items() if key != "intermediate_size"},
    constants={"hidden_act": "silu", "router_jitter_noise": 0.0},
    wrapped_type=None,
    dropped=(),
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    mixture=MixtureTable(("num_local_experts",), "intermediate_size", normalized=True),
)
