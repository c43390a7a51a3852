"""The figures of the published shapes, and the command that prints them."""

import json
from pathlib import Path

import pytest
import torch

from genesis.base.errors import UserError
from genesis.cli.model import describe_main
from genesis.model.adapter import BASE_FORMATS, attach_adapters
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.describe import describe, describe_training
from genesis.model.recipe import build_decoder_config, read_adapter_config, read_decoder_config
from genesis.recipe.yaml import load_yaml

SHAPES = Path(__file__).parents[2] / "configs" / "model"
NANO = {
    "dim": 8,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_dim": 12,
    "max_seq_len": 16,
    "vocab_size": 20,
}


def test_genesis_1b_has_the_published_parameters_to_within_a_million():
    assert abs(describe(read_decoder_config(SHAPES / "genesis-1b.yaml")).num_parameters - 1_003e6) < 1e6


def test_genesis_1b_deep_has_as_many_to_within_a_hundredth():
    deep, wide = (describe(read_decoder_config(SHAPES / f"{name}.yaml")) for name in ("genesis-1b-deep", "genesis-1b"))
    assert deep.config.num_layers == 32
    assert abs(deep.num_parameters / wide.num_parameters - 1) < 0.01


def test_genesis_10m_has_ten_million():
    config = read_decoder_config(SHAPES / "genesis-10m.yaml")
    assert config.vocab_size == 8192
    assert describe(config).num_parameters == pytest.approx(10e6, rel=0.05)


def test_figures_equal_those_counted_by_hand():
    figures = describe(DecoderConfig(**NANO))
    attention, feed_forward, norms = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8), 3 * 3 * 8 * 12, 3 * 2 * 8 + 8
    assert figures.parameters == {
        "embedding": 160,
        "attention": attention,
        "feed_forward": feed_forward,
        "norms": norms,
        "output": 0,
    }
    assert figures.flops_per_token == 6 * (160 + attention + feed_forward)
    assert figures.attention_flops_per_token == 12 * 3 * 8 * 16
    assert figures.kv_cache_bytes_per_token == 2 * 3 * 4 * 2


def test_an_untied_output_multiplies_and_its_embedding_does_not():
    tied, untied = (describe(DecoderConfig(**NANO, has_tied_embeddings=is_tied)) for is_tied in (True, False))
    assert untied.num_parameters == tied.num_parameters + 160
    assert untied.flops_per_token == tied.flops_per_token


def test_a_recipe_may_hold_the_shape_or_name_its_file(tmp_path):
    (tmp_path / "model").mkdir()
    lines = "".join(f"{key}: {value}\n" for key, value in NANO.items())
    (tmp_path / "model/nano.yaml").write_text(lines)
    (tmp_path / "named.yaml").write_text("trainer: {}\nmodel:\n  decoder: model/nano.yaml\n")
    (tmp_path / "held.yaml").write_text(f"model:\n  decoder: {json.dumps(NANO)}\n")
    wanted = DecoderConfig(**NANO)
    assert [read_decoder_config(tmp_path / name) for name in ("model/nano.yaml", "named.yaml", "held.yaml")] == [
        wanted
    ] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, "unknown key 'num_layer'; did you mean 'num_layers'"),
        ({"dim": "wide"}, "dim is 'wide'; it must be int"),
        ({"dim": True}, "dim is True; it must be int"),
        ({"num_kv_heads": 3}, "num_heads 2 is not a multiple"),
    ],
)
def test_a_bad_shape_is_refused_by_the_file_and_the_field(changes, message):
    with pytest.raises(UserError, match=message) as error:
        build_decoder_config({**NANO, **changes}, where="shape.yaml")
    assert str(error.value).startswith("shape.yaml: ")
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match=r"shape\.yaml: ffn_dim is missing"):
        build_decoder_config({key: value for key, value in NANO.items() if key != "ffn_dim"}, where="shape.yaml")


@pytest.mark.parametrize("content", [None, "model: {}", "[1, 2]", "a: b: c", b"\xff\xfe"])
def test_a_file_without_a_shape_is_one_line(content, tmp_path):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"recipe\.yaml") as error:
        read_decoder_config(path)
    assert "\n" not in str(error.value)


def test_the_command_prints_a_table_or_json(capsys):
    config = ["--config", str(SHAPES / "genesis-1b.yaml")]
    assert describe_main(config) == 0
    assert "1,002,522,624" in capsys.readouterr().out
    assert describe_main([*config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == 1_002_522_624


def test_adapters_need_the_memory_of_what_they_train(capsys):
    recipe = SHAPES.parent / "finetune/qwen3-8b-lora.yaml"
    config, adapter = (
        read_decoder_config(recipe),
        read_adapter_config(load_yaml(recipe.read_text(), recipe), str(recipe)),
    )
    half = BASE_FORMATS["bfloat16"]
    memory, whole = describe_training(config, adapter, half), describe_training(config, None, half)
    with torch.device("meta"):
        decoder = Decoder(config)
        layers = attach_adapters(decoder, adapter)
    num_trained = sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in layers.values())
    assert memory.num_trained == num_trained
    assert (memory.frozen_bytes, memory.weights_bytes) == (2 * 8_190_735_360, 4 * num_trained)
    assert (whole.num_trained, whole.frozen_bytes) == (8_190_735_360, 0)
    assert describe_main(["--config", str(recipe), "--base_dtype", "bfloat16"]) == 0
    page = capsys.readouterr().out
    assert f"{num_trained:,}" in page
    assert "122" not in page.split("training state")[1].split("\n")[0]  # GiB to train all weights
    assert describe_main(["--config", str(recipe), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["adapter"]
    assert (shown["num_trained"], shown["optimizer_bytes"]) == (num_trained, 8 * num_trained)


def test_the_moments_are_those_of_the_algorithm_in_the_last_recipe(capsys, tmp_path):
    recipe, adamw = SHAPES.parent / "genesis-10m.yaml", tmp_path / "adamw.yaml"
    adamw.write_text("model: {optimizer: {class_path: genesis.optim.AdamW}}")
    assert describe_main(["--config", str(recipe), "--json"]) == 0
    muon = json.loads(capsys.readouterr().out)
    matrices = muon["parameters"]["attention"] + muon["parameters"]["feed_forward"]
    assert muon["optimizer_bytes"] == 8 * muon["num_parameters"] - 4 * matrices
    assert describe_main(["--config", str(recipe), "--config", str(adamw), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer_bytes"] == 8 * muon["num_parameters"]
    assert describe_main(["--config", str(recipe)]) == 0
    assert "of Muon and AdamW" in capsys.readouterr().out
