"""Tiny models of transformers with random weights, and the bodies that train them."""

from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.foreign.config import PREFIX, TransformersConfig
from genesis.model.foreign.decoder import TransformersDecoder, find_shape

_SHAPE: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_MIXED: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **_MIXED},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 8,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **_MIXED,
    },
    "phi3": {"sliding_window": 8},
    "granite": {
        "logits_scaling": 8.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
    },
    "olmo3": _MIXED,
    "ministral3": {"head_dim": 8},
}
"""The keys of a configuration that differ from `_SHAPE`, by `model_type`."""


def configure(kind: str, **changes: Any) -> Any:
    """Returns transformers' configuration of a tiny model."""
    return CONFIG_MAPPING[kind](**{**_SHAPE, **FAMILIES.get(kind, {}), **changes})


def make_theirs(config: Any) -> Any:
    """Returns transformers' model, with weights at which sinks, windows and bounds matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.ndim > 1:
                parameter.mul_(2.0)
    return model


def describe(config: Any, **options: Any) -> DecoderConfig:
    """Returns our configuration of that model."""
    body = TransformersConfig(config.to_dict(), **{"experts": "eager", **options})
    return DecoderConfig(**find_shape(config)._asdict(), body=body)


def wrap(theirs: Any, **options: Any) -> TransformersDecoder:
    """Returns our model with the weights of transformers' model."""
    with torch.device("meta"):
        model = build_model(describe(theirs.config, **options))
    assert isinstance(model, TransformersDecoder)
    model.to_empty(device="cpu")
    model.fill_buffers()
    state = {f"{PREFIX}{name}": tensor for name, tensor in theirs.state_dict().items()}
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model
