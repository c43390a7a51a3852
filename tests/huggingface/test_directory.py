"""What of a directory in Hugging Face's layout is read, and what is refused by name."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from genesis.base.errors import UserError
from genesis.huggingface.directory import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_weights

SHAPE = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def write_llama(directory: Path, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).to(torch.bfloat16)
    model.save_pretrained(directory)
    return model


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    family, config = read_shape(directory)
    return read_weights(directory, config, family)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("sliding_window", 255),
        ("sliding_window", "long"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", "all"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 8.0, "beta_fast": 32.0}),
        ("rope_scaling", {"type": "longrope", "factor": 8.0, "short_factor": [1.0] * 4}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 8.0, "mscale": "all", "mscale_all_dim": 1.0}),
        ("rope_parameters", {"rope_type": "proportional", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_parameters", "fast"),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("quantization_config", {"bits": 4}),
        ("head_dim", 127),
        ("hidden_size", 33),
        ("num_key_value_heads", 3),
        ("intermediate_size", "many"),
        ("rms_norm_eps", None),
    ],
)
def test_a_configuration_that_cannot_be_represented_is_refused_by_name(
    key: str, value: Any, exported: Path, tmp_path: Path
) -> None:
    content = json.loads((exported / CONFIG_NAME).read_bytes())
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**content, key: value}))
    with pytest.raises(UserError, match=str(tmp_path)) as error:
        read_shape(tmp_path)
    known = {
        "hidden_size": "dim 33",
        "num_key_value_heads": "num_kv_heads 3",
        "intermediate_size": "ffn_dim is 'many'",
        "rms_norm_eps": "rms_norm_eps is null",
    }
    assert known.get(key, f"{key} is {value!r}") in str(error.value)
    assert "\n" not in str(error.value)


def drop(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.mlp.up_proj.weight"]


def add_bias(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)


def add_layer(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(48, 32)


def reshape(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = torch.zeros(31)


def quantise(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


def spoil(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"][7] = torch.nan


def keep_the_output_alone(state: dict[str, torch.Tensor]) -> None:
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")


def untie(state: dict[str, torch.Tensor]) -> None:
    state["lm_head.weight"] = torch.zeros(90, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (add_bias, r"q_proj\.bias.* is (unknown|not a tensor)"),
        (add_layer, r"model\.layers\.7\.mlp\.up_proj\.weight is not a tensor of the model"),
        (reshape, r"model\.norm\.weight is \[31\], but config\.json requires \[32\]"),
        (quantise, r"model\.norm\.weight is int8, but weights must be float32, bfloat16 or float16"),
        (spoil, r"model\.norm\.weight has values that are NaN or infinite"),
        (keep_the_output_alone, r"model\.embed_tokens\.weight is missing"),
        (untie, r"tie_word_embeddings is true, and lm_head\.weight is not"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    write_llama(tmp_path, tie_word_embeddings=True)
    state = load_file(tmp_path / WEIGHTS_NAME)
    change(state)
    save_file(state, tmp_path / WEIGHTS_NAME)
    with pytest.raises(UserError, match=message):
        read_state(tmp_path)


def test_files_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    content = (tmp_path / WEIGHTS_NAME).read_bytes()
    (tmp_path / WEIGHTS_NAME).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        read_state(tmp_path)
    (tmp_path / WEIGHTS_NAME).unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"weight_map": None}, "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"model.norm.weight": 3}}, f"{INDEX_NAME} lists 3, which is no text"),
        ({"weight_map": {"model.norm.weight": "../outside.safetensors"}}, "which leads upwards"),
        ({"weight_map": {"model.norm.weight": "link/outside.safetensors"}}, "which leads out of"),
    ],
)
def test_an_index_that_names_no_files_beside_it_is_refused(index: Any, message: str, tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / WEIGHTS_NAME).rename(tmp_path.parent / "outside.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    (tmp_path / "link").symlink_to("..")
    with pytest.raises(UserError, match=re.escape(message)):
        read_state(tmp_path)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME, "model-1.safetensors"])
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_is_no_file_is_refused_without_waiting(put: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    write_llama(tmp_path)
    if name not in (CONFIG_NAME, WEIGHTS_NAME):
        (tmp_path / WEIGHTS_NAME).unlink()
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    (tmp_path / name).unlink(missing_ok=True)
    put(tmp_path / name)
    with pytest.raises(UserError, match=r"but must be a file|leads out of"):
        read_state(tmp_path)


def test_an_index_beside_one_file_of_weights_does_not_count_as_for_transformers(tmp_path: Path) -> None:
    write_llama(tmp_path)
    expected = read_state(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"model.norm.weight": "another.safetensors"}}))
    state = read_state(tmp_path)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="merge it into the weights first"):
        read_state(tmp_path)
