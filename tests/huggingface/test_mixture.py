"""Mixtures of experts in Hugging Face's layout: defaults, refusals, stacks in files, arrangements of other families."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from genesis.base.errors import UserError
from genesis.huggingface.directory import CONFIG_NAME, WEIGHTS_NAME
from genesis.huggingface.family import Family
from genesis.huggingface.shape import FAMILIES, find_family, read_shape, write_shape
from genesis.huggingface.weights import read_weights
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.mixture import MixtureConfig

NEW = [family for family in FAMILIES if family.mixture is not None or family.linear_keys]
OWN = {"use_sliding_window", "sliding_window_pattern"}
"""Keys that only our tables have, for families in which transformers has no switch."""
SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTURE = MixtureConfig(6, 2, 24)


@pytest.mark.parametrize("family", NEW, ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family: Family) -> None:
    theirs: Any = AutoConfig.for_model(family.model_type)
    for key, value in family.defaults.items():
        if key in OWN and not hasattr(theirs, key):
            continue
        if key in ("rope_theta", "partial_rotary_factor"):
            assert theirs.rope_parameters[key] == value
        elif key == "rope_parameters":
            assert {**theirs.rope_parameters, "rope_theta": value["rope_theta"]} == value
        elif value is None and key == "num_key_value_heads":
            assert theirs.num_key_value_heads == theirs.num_attention_heads
        else:
            assert getattr(theirs, key) == value, key
    if family.mixture is not None and family.mixture.default_experts is not None:
        assert theirs.num_experts == family.mixture.default_experts


def build_config(family: Family, **changes: Any) -> dict[str, Any]:
    theirs: Any = AutoConfig.for_model(family.model_type, **(SHAPE | changes))
    content: dict[str, Any] = json.loads(theirs.to_json_string(use_diff=False))
    return content


def write(directory: Path, content: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / CONFIG_NAME).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("family", NEW, ids=lambda family: family.model_type)
def test_a_shape_is_read_back_from_what_is_written(family: Family, tmp_path: Path) -> None:
    has_counts = family.mixture and (family.mixture.has_bias or family.mixture.has_greedy_groups)
    counts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1} if has_counts else {}
    counts |= {"num_key_value_heads": 4, "n_group": 3, "topk_group": 1} if family.latent else {}
    found, config = read_shape(write(tmp_path, build_config(family, **counts)))
    assert replace(found, dropped=family.dropped) == family
    written = find_family(config)
    assert written is family or not family.is_written
    assert read_shape(write(tmp_path, write_shape(written, config))) == (written, config)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers is \[2\]"),
        ("mixtral", {"rms_norm_eps": float("nan")}, "norm_eps is nan: it must be above 0 and finite"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ("mixtral", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1 to 1,000"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "num_experts is 0"),
        ("qwen3_moe", {"num_experts_per_tok": 500}, "top_k is 500"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ("mixtral", {"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv is 8\.0"),
        ("glm4_moe", {"use_qk_norm": "yes"}, "use_qk_norm is 'yes'; it must be true or false"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is None"),
        (
            "dots1",
            {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 4, "n_shared_experts": 1},
            "not a multiple of num_groups",
        ),
        ("deepseek_v3", {}, "num_key_value_heads is 2; with latents it must be num_attention_heads, 4, or null"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be from 1 to 1,048,576"),
        ("deepseek_v3", {"num_key_value_heads": 4, "rope_interleave": 1}, "rope_interleave is 1; it must be true or"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'.* it must be 'sigmoid'"),
        ("deepseek_v3", {"num_key_value_heads": 4, "attention_bias": True}, "attention_bias is True"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (
            "deepseek_v2",
            {"num_key_value_heads": 4, "num_experts_per_tok": 2, "topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'; it must be 'greedy' or 'group_limited_greedy'",
        ),
        ("qwen3_5_moe_text", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"] * 2}, "at one distance"),
    ],
)
def test_what_the_decoder_cannot_represent_is_refused_by_its_key(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    family = next(family for family in FAMILIES if family.model_type == model_type)
    with pytest.raises(UserError, match=message):
        read_shape(write(tmp_path, build_config(family) | changes))


@pytest.mark.parametrize(
    ("changes", "closest"),
    [
        ({"scores": "sigmoid"}, "mixtral, but feed_forward.scores is 'sigmoid', not 'softmax'"),
        ({"has_balance_bias": True}, "mixtral, but feed_forward.has_balance_bias is True, not False"),
        ({"routed_scale": 2.0}, "mixtral, but feed_forward.routed_scale is 2.0, not 1.0"),
        ({"shared_ffn_dim": 24}, "mixtral, but feed_forward.shared_ffn_dim is 24, not None"),
        (
            {"has_balance_bias": True, "scores": "sigmoid", "shared_ffn_dim": 25},
            "glm4_moe, but feed_forward.shared_ffn_dim is 25, not 24",
        ),
        (
            {"has_balance_bias": True, "scores": "sigmoid"},
            "glm4_moe, but feed_forward.shared_ffn_dim is None, not a multiple of ffn_dim",
        ),
    ],
)
def test_a_mixture_that_no_family_has_is_exported_as_none(changes: dict[str, Any], closest: str) -> None:
    config = DecoderConfig(
        dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, feed_forward=replace(MIXTURE, **changes)
    )
    with pytest.raises(UserError, match="no family of Hugging Face's has this decoder") as caught:
        find_family(config)
    assert f"the closest is {closest}; export as --format safetensors" in str(caught.value)


def test_training_options_change_no_export() -> None:
    shape: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 64}
    trained = replace(MIXTURE, balance_loss=0.01, z_loss=0.001)
    assert find_family(DecoderConfig(**shape, feed_forward=trained)).model_type == "mixtral"


def save(directory: Path, family: Family, config: DecoderConfig) -> Decoder:
    decoder = Decoder(config)
    decoder.init_weights(0)
    write(directory, write_shape(family, config))
    state = {name: tensor.contiguous() for name, tensor in family.to_theirs(decoder.state_dict()).items()}
    save_file(state, directory / WEIGHTS_NAME)
    return decoder


@pytest.fixture
def mixtral(tmp_path: Path) -> tuple[Path, Family, DecoderConfig, Decoder]:
    config = DecoderConfig(
        dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, vocab_size=31, feed_forward=MIXTURE
    )
    family = find_family(config)
    return tmp_path / "model", family, config, save(tmp_path / "model", family, config)


def test_experts_are_stacked_in_memory_and_in_mapped_files(
    mixtral: tuple[Path, Family, DecoderConfig, Decoder], tmp_path: Path
) -> None:
    directory, family, config, decoder = mixtral
    before = sorted(tmp_path.iterdir())
    for scratch in (None, tmp_path):
        found = read_weights(directory, config, family, scratch)
        assert found.keys() == decoder.state_dict().keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in decoder.state_dict().items())
    assert sorted(tmp_path.iterdir()) == before, "the mapped files have no names"


@pytest.mark.parametrize("fault", ["missing", "missing at the end", "shape", "unknown"])
def test_a_wrong_expert_is_named(mixtral: tuple[Path, Family, DecoderConfig, Decoder], fault: str) -> None:
    directory, family, config, _ = mixtral
    state = load_file(directory / WEIGHTS_NAME)
    name = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    if fault == "missing":
        del state[name.format(2)]
    elif fault == "missing at the end":
        del state[name.format(5)]
    elif fault == "shape":
        state[name.format(2)] = torch.zeros(3, 3)
    else:
        state[name.format(6)] = state[name.format(0)].clone()
    save_file(state, directory / WEIGHTS_NAME)
    wanted = {
        "missing": r"experts\.2\.w3\.weight is missing",
        "missing at the end": r"experts\.\*\.w3\.weight is \[5, 24, 32\]",
        "shape": r"experts\.2\.w3\.weight has another shape",
        "unknown": r"experts\.\*\.w3\.weight is \[7, 24, 32\]",
    }
    with pytest.raises(UserError, match=wanted[fault]):
        read_weights(directory, config, family)


def test_files_with_stacks_of_all_experts_are_read(tmp_path: Path) -> None:
    """As published checkpoints of Qwen3.5 have them, with a vision tower that is left out."""
    family = next(family for family in FAMILIES if family.model_type == "qwen3_5_moe_text")
    _, config = read_shape(write(tmp_path, build_config(family, num_experts=4, num_experts_per_tok=2)))
    decoder = save(tmp_path, family, config)
    state = load_file(tmp_path / WEIGHTS_NAME)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        taken = {
            part: [state.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(4)]
            for part in ("gate", "up", "down")
        }
        state[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(taken["gate"]), torch.stack(taken["up"])], dim=1)
        state[f"{prefix}.down_proj"] = torch.stack(taken["down"])
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    wrapped |= {"model.visual.blocks.0.norm.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    save_file(wrapped, tmp_path / WEIGHTS_NAME)
    content = json.loads((tmp_path / CONFIG_NAME).read_text())
    write(tmp_path, {"model_type": "qwen3_5_moe", "text_config": content, "vision_config": {}})
    found_family, found_config = read_shape(tmp_path)
    assert (found_family, found_config) == (family, config)
    found = read_weights(tmp_path, config, family)
    assert all(torch.equal(tensor, found[name]) for name, tensor in decoder.state_dict().items())


def test_layers_that_predict_further_tokens_are_left_out_if_the_configuration_has_them(tmp_path: Path) -> None:
    """As published checkpoints of GLM-4.5 have them, behind the last layer."""
    family = next(family for family in FAMILIES if family.model_type == "glm4_moe")
    _, config = read_shape(write(tmp_path, build_config(family, n_routed_experts=4, num_experts_per_tok=2)))
    decoder = save(tmp_path, family, config)
    extra = {"model.layers.4.eh_proj.weight": torch.zeros(32, 64), "model.layers.4.mlp.gate.weight": torch.ones(4, 32)}
    save_file(load_file(tmp_path / WEIGHTS_NAME) | extra, tmp_path / WEIGHTS_NAME)
    content = json.loads((tmp_path / CONFIG_NAME).read_text())
    found_family, _ = read_shape(write(tmp_path, content | {"num_nextn_predict_layers": 1}))
    found = read_weights(tmp_path, config, found_family)
    assert all(torch.equal(tensor, found.pop(name)) for name, tensor in decoder.state_dict().items())
    assert not found
    found_family, _ = read_shape(write(tmp_path, content | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"'model\.layers\.4\.\S*' is unknown"):
        read_weights(tmp_path, config, found_family)


@pytest.mark.parametrize("changes", [{"vocab_size": 10**30}, {"dim": 10**12}])
def test_sizes_beyond_all_memory_are_one_line(
    mixtral: tuple[Path, Family, DecoderConfig, Decoder], changes: dict[str, int]
) -> None:
    directory, family, config, _ = mixtral
    with pytest.raises(UserError, match="requires a tensor of more than 2"):
        read_weights(directory, replace(config, **changes), family)
