"""Tiny models of transformers with random weights, and the bodies that train them."""

from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING

from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.foreign.config import PREFIX, TransformersConfig
from genesis.model.foreign.decoder import TransformersDecoder, choose_auto, find_shape

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


_IMAGES: Final = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PATCHES: Final = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
_ROPE_OF_IMAGES: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_OF_QWEN: Final = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_LLAMA: Final = {"model_type": "llama"}
TOWERS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "gemma3": (FAMILIES["gemma3_text"], _IMAGES, {"mm_tokens_per_image": 4, "image_token_index": 5}),
    "qwen2_5_vl": ({"rope_parameters": _ROPE_OF_IMAGES}, {**_PATCHES, "fullatt_block_indexes": [0]}, _OF_QWEN),
    "qwen3_vl": (
        {"head_dim": 8, "rope_parameters": {**_ROPE_OF_IMAGES, "mrope_interleaved": True}},
        {**_PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        _OF_QWEN,
    ),
    "qwen3_vl_moe": (
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "rope_parameters": {**_ROPE_OF_IMAGES, "mrope_interleaved": True},
        },
        {**_PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        _OF_QWEN,
    ),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {**_IMAGES, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 5, "tie_word_embeddings": False},
    ),
    "smolvlm": (_LLAMA, _IMAGES, {"image_token_id": 5, "scale_factor": 2, "pad_token_id": 0}),
    "llava": (_LLAMA, {**_IMAGES, "model_type": "clip_vision_model", "projection_dim": 16}, {"image_token_index": 5}),
}
"""Models with a tower of images: the keys of the language model, of the tower, and of both together."""


def configure(kind: str, **changes: Any) -> Any:
    """Returns transformers' configuration of a tiny model."""
    if kind in TOWERS:
        text, images, both = TOWERS[kind]
        return CONFIG_MAPPING[kind](text_config={**_SHAPE, **text}, vision_config=images, **both)
    return CONFIG_MAPPING[kind](**{**_SHAPE, **FAMILIES.get(kind, {}), **changes})


def make_theirs(config: Any) -> Any:
    """Returns transformers' model, with weights at which sinks, windows and bounds matter."""
    torch.manual_seed(0)
    model = choose_auto(config).from_config(
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
