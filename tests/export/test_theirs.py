"""No code that a model brings runs when transformers opens it."""

import json
import shutil
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.export.theirs import load_model, load_tokenizer
from genesis.huggingface.directory import describe_code
from tests.planted import plant_code


@pytest.mark.parametrize("tokenizer_class", ["PlantedTokenizer", "PreTrainedTokenizerFast", None])
def test_code_that_a_directory_names_does_not_run(
    exported: Path, tmp_path: Path, tokenizer_class: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, marker = tmp_path / "model", tmp_path / "it-ran"
    shutil.copytree(exported, directory)
    plant_code(directory, marker)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = tokenizer_class
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert load_tokenizer(directory).encode("class alpha") == load_tokenizer(exported).encode("class alpha")
    model, report = load_model(directory)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__module__.startswith("transformers.models.llama")
    assert not marker.exists()


def test_what_is_not_run_is_named(exported: Path, tmp_path: Path) -> None:
    assert describe_code(exported) is None
    directory = tmp_path / "model"
    shutil.copytree(exported, directory)
    plant_code(directory, tmp_path / "it-ran")
    assert describe_code(directory) == (
        "auto_map in config.json, custom_generate in generation_config.json, auto_map in tokenizer_config.json, "
        "configuration_planted.py, generation_planted.py, modeling_planted.py, 1 more files"
    )


def test_classes_of_a_classifier_take_no_memory(exported: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(exported, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_labels": 200_000_000}))
    model, _ = load_model(directory)
    assert len(model.config.id2label) < 10


def test_a_package_that_a_configuration_asks_for_is_named_in_one_line(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(exported, directory)
    config = json.loads((directory / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_accelerate_available", lambda *_: False)
    with pytest.raises(UserError, match=r"transformers cannot open .*model \(.*accelerate.*\): correct its config"):
        load_model(directory)
