"""Tiny models with experts, for tests of what goes on around a mixture; `tests.model.test_mixture` tests the part."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from genesis.model.attention import AttentionConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.norm import NormConfig
from tests.tiny_runs import decides_decays

_LINEAR: Final = GatedDeltaConfig(2, 4, 8, 8, attention_every=2)

MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "softmax": {
        "feed_forward": MixtureConfig(num_experts=4, top_k=2, ffn_dim=16, balance_loss=0.1, z_loss=0.1),
    },
    "shared": {
        "feed_forward": MixtureConfig(
            num_experts=8,
            top_k=2,
            ffn_dim=16,
            shared_ffn_dim=16,
            scores="sigmoid",
            has_balance_bias=True,
            num_dense_layers=1,
            dense_ffn_dim=48,
        ),
    },
    "linear": {
        "feed_forward": MixtureConfig(num_experts=4, top_k=2, ffn_dim=16, shared_ffn_dim=16, has_shared_gate=True),
        "attention": AttentionConfig(num_heads=4, num_kv_heads=2, qk_norm="head", rotary_dim=4, has_output_gate=True),
        "norm": NormConfig(1e-5, has_offset=True),
        "linear_attention": _LINEAR,
    },
    "sinks": {
        "feed_forward": MixtureConfig(num_experts=4, top_k=2, ffn_dim=16, has_biases=True, gate_limit=0.3),
        "attention": AttentionConfig(
            num_heads=4,
            num_kv_heads=2,
            sliding_window=5,
            window_layers=(0,),
            has_qkv_bias=True,
            has_output_bias=True,
            has_sinks=True,
        ),
    },
    "linear without experts": {"linear_attention": _LINEAR},
}
"""Fields of a decoder: like Mixtral, like DeepSeek-V3, like Qwen3-Next, like GPT-OSS, and like the dense Qwen3.5."""

LINEAR: Final = [name for name, fields in MIXTURES.items() if "linear_attention" in fields]


def mix(dense: DecoderConfig, name: str, known: Mapping[str, dict[str, Any]] = MIXTURES) -> DecoderConfig:
    """Returns a dense decoder's shape with the parts of one of `MIXTURES`, or of other known fields."""
    fields = dict(known[name])
    if "feed_forward" in fields:
        fields["ffn_dim"] = None
    if "attention" in fields:
        fields |= {"num_heads": None, "num_kv_heads": None}
    return replace(dense, **fields)


def build_sharp(config: DecoderConfig, seed: int = 0) -> Decoder:
    """Returns a decoder whose choices are sharper than those of one that knows nothing, with biases and sinks."""
    decoder = Decoder(config)
    decoder.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" not in name and not decides_decays(name):
                parameter.mul_(4.0)
            if name.endswith(("bias", "sinks")) and not decides_decays(name):
                # Larger biases of experts and projections would decide each token, whatever the text.
                std = 0.2 if name.endswith("balance_bias") else 0.05
                parameter.normal_(0.0, std, generator=generator)
    return decoder.eval()
