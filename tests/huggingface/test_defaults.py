"""A key that `config.json` lacks, or that is null there, means what it means in transformers."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from genesis.base.errors import UserError
from genesis.huggingface.directory import CONFIG_NAME, WEIGHTS_NAME
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_weights
from genesis.model.attention import AttentionConfig, RopeScaling
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.feed_forward import DenseConfig
from genesis.model.norm import NormConfig
from genesis.model.recipe import build_decoder_config, dump_decoder_config

CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "olmo2": Olmo2Config,
    "smollm3": SmolLM3Config,
}
PARTS: dict[str, dict[str, Any]] = {
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "projection"},
}
LAYERED = ("qwen2", "qwen3", "smollm3")
"""Families in which layers differ in whether they have the window."""
FULL: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "rope_theta": 777.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "quantization_config": None,
    "logit_scale": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 1,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 2,
}
"""Every key that is read, with values that are no defaults where they are numbers of the shape."""
HARMLESS = {"initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
"""Fields of transformers' classes that no logits depend on."""
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "theta at the top alone": {"rope_parameters": None},
    "theta in rope_parameters alone": {"rope_theta": 10_000.0},
    "head_dim of its own": {"head_dim": 6},
    "no head_dim": {"head_dim": ...},
    "window": {"sliding_window": 100},
    "window in the last layers": {"sliding_window": 100, "use_sliding_window": True},
    "window in all layers": {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0},
    "window in listed layers": {
        "sliding_window": 100,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "default window": {"sliding_window": ..., "use_sliding_window": True, "max_position_embeddings": 8192},
    "scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 777.0,
        }
    },
    "scaled in the key of transformers 4": {
        "rope_parameters": ...,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0}},
    "dynamic in the key of transformers 4": {
        "rope_parameters": ...,
        "rope_scaling": {"type": "dynamic", "factor": 2.5},
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 20.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
            "rope_theta": 777.0,
        }
    },
    "yarn in the key of transformers 4": {"rope_parameters": ..., "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "no layer without positions": {"no_rope_layers": [1, 1]},
}


def build_scaling(rope: dict[str, Any], longest: int) -> RopeScaling | None:
    """Returns what transformers knows of the scaling; None without one."""
    fields = {"original_seq_len": "original_max_position_embeddings", "has_whole_bounds": "truncate"}
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", *fields)
    found = {name: rope.get(fields.get(name, name)) for name in names}
    given = {name: value for name, value in found.items() if value is not None}
    kind = rope["rope_type"]
    if kind == "dynamic":
        given["original_seq_len"] = longest
    return None if kind == "default" else RopeScaling(**given, kind=kind)


def build_theirs(family: str, content: dict[str, Any]) -> DecoderConfig | None:
    """Returns the shape that transformers makes of the keys; None where it refuses them or the decoder has no such."""
    try:
        theirs: Any = CLASSES[family](**json.loads(json.dumps(content)))
        if theirs.hidden_size % theirs.num_attention_heads:
            return None
        window, layers = theirs.sliding_window if family == "mistral" else None, None
        if family in LAYERED:
            is_windowed = theirs.use_sliding_window and theirs.sliding_window is not None
            if "sliding_attention" in theirs.layer_types and not is_windowed:
                return None  # the forward fails, or takes a window that is off
            layers = tuple(index for index, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
            if is_windowed and layers:
                window, layers = theirs.sliding_window, None if len(layers) == theirs.num_hidden_layers else layers
        if window is not None and window >= theirs.max_position_embeddings:
            window = None
        rope = theirs.rope_parameters
        max_seq_len = theirs.max_position_embeddings
        scaling = build_scaling(rope, max_seq_len)
        if rope["rope_type"] == "dynamic":
            max_seq_len = int(max_seq_len * rope["factor"])
        has_rope = theirs.no_rope_layers if family == "smollm3" else []
        without = [layer for layer, has in enumerate(has_rope) if not has]
        head_dim = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
        norms = {"qk_norm_eps": theirs.rms_norm_eps} if "qk_norm" in PARTS.get(family, {}) else {}
        attention = AttentionConfig(
            theirs.num_attention_heads,
            theirs.num_key_value_heads,
            rope["rope_theta"],
            head_dim=None if head_dim == theirs.hidden_size // theirs.num_attention_heads else head_dim,
            rope_scaling=scaling,
            no_rope_every=without[0] + 1 if without else None,
            sliding_window=window,
            window_layers=None if window is None else layers,
            **PARTS.get(family, {}),
            **norms,
        )
        config = DecoderConfig(
            dim=theirs.hidden_size,
            num_layers=theirs.num_hidden_layers,
            attention=attention,
            feed_forward=DenseConfig(theirs.intermediate_size),
            norm=NormConfig(theirs.rms_norm_eps, "after" if family == "olmo2" else "before"),
            max_seq_len=max_seq_len,
            vocab_size=theirs.vocab_size,
            has_tied_embeddings=theirs.tie_word_embeddings,
        )
        return unify(config)
    except Exception:  # of its strict checks, of whatever class they are
        return None


def unify(config: DecoderConfig) -> DecoderConfig:
    return build_decoder_config(dump_decoder_config(config), where="here")


def read_ours(directory: Path, family: str, content: dict[str, Any]) -> DecoderConfig | None:
    (directory / CONFIG_NAME).write_text(json.dumps({"model_type": family, **content}))
    try:
        return unify(read_shape(directory)[1])
    except UserError:
        return None


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        (family, variant)
        for family in CLASSES
        for variant, changes in VARIANTS.items()
        if family in LAYERED or "use_sliding_window" not in changes
    ],
)
def test_a_missing_key_takes_the_default_of_transformers(family: str, variant: str, tmp_path: Path) -> None:
    full = {name: value for name, value in (FULL | VARIANTS[variant]).items() if value is not ...}
    if family == "olmo2" and variant == "window":
        full["sliding_window"] = 600  # of no effect there
    if family == "llama":
        full.pop("sliding_window", None)  # which it does not read
    assert read_ours(tmp_path, family, full) == build_theirs(family, full) is not None
    for key in full:
        content = {name: value for name, value in full.items() if name != key}
        assert read_ours(tmp_path, family, content) == build_theirs(family, content), key


@pytest.mark.parametrize("family", CLASSES)
def test_a_null_means_what_transformers_takes_it_for_or_is_refused(family: str, tmp_path: Path) -> None:
    for key in FULL:
        content = FULL | {key: None}
        theirs = build_theirs(family, content)
        if theirs is not None:
            assert read_ours(tmp_path, family, content) in (theirs, None), key


@pytest.mark.parametrize("family", CLASSES)
def test_no_key_of_transformers_goes_unread(family: str) -> None:
    common = {field.name for field in fields(PreTrainedConfig)}
    own = {field.name for field in fields(CLASSES[family])} - common
    assert own - HARMLESS <= FULL.keys()


def test_beyond_the_default_window_a_missing_key_means_that_window(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 16, "max_seq_len": 4160}
    decoder = Decoder(DecoderConfig(**shape, vocab_size=64, norm_eps=1e-6, rope_theta=1e4))
    decoder.init_weights(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0)  # sharp enough that one key of 4,096 counts
    save_file(LLAMA.to_theirs(decoder.state_dict()), tmp_path / WEIGHTS_NAME, metadata={"format": "pt"})
    content: dict[str, Any] = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4160,
        "tie_word_embeddings": decoder.config.has_tied_embeddings,
    }
    ids = torch.randint(64, (1, 4160))
    with torch.no_grad():
        ours = decoder.eval()(ids)[0]

    def ask_transformers(**changes: Any) -> torch.Tensor:
        (tmp_path / CONFIG_NAME).write_text(json.dumps(content | changes))
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            logits: torch.Tensor = model(ids).logits[0]
        return logits

    without_window, missing = ask_transformers(sliding_window=None), ask_transformers()
    allowed = 1e-4 * float(ours.abs().max())
    assert read_ours(tmp_path, "mistral", content | {"sliding_window": None}) == decoder.config
    assert read_weights(tmp_path, decoder.config, LLAMA).keys() == decoder.state_dict().keys()
    assert float((ours - without_window).abs().max()) < allowed
    assert float((ours - missing)[:4096].abs().max()) < allowed
    assert float((ours - missing)[4096:].abs().max()) > 100 * allowed
    windowed = read_ours(tmp_path, "mistral", content)
    assert windowed is not None
    assert windowed.parts.attention.sliding_window == 4096
    other = Decoder(windowed)
    other.load_state_dict(decoder.state_dict())
    with torch.no_grad():
        assert float((other.eval()(ids)[0] - missing).abs().max()) < allowed
    short = read_ours(tmp_path, "mistral", content | {"max_position_embeddings": 4096})
    assert short is not None
    assert (short.max_seq_len, short.parts.attention.sliding_window) == (4096, None)
