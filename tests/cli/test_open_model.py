"""An open model with a tokenizer of `tokenizer.json`, through every command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from genesis.evaluate.heldout import measure_held_out, read_texts
from genesis.export.importing import import_directory
from genesis.generate.load import load_decoder
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import encode_prompt
from tests.cli.conftest import Genesis
from tests.data.corpus_support import write_jsonl
from tests.serve.test_ids import ask_all
from tests.tokenizer.test_huggingface import TEMPLATE, TEXTS, qwen

VOCAB_SIZE = 640
"""More than the tokenizer has ids, as Qwen's models do."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("open") / "model"
    directory.mkdir()
    qwen(directory)
    torch.manual_seed(0)
    config: Any = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0], "temperature": 0.7}')
    return directory


@pytest.fixture(scope="module")
def run(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "imported"
    import_directory(theirs, out, has_tokenizer=True)
    return out


@pytest.mark.slow
def test_it_is_trained_evaluated_served_and_exported_with_its_own_files(
    theirs: Path, run: Path, genesis: Genesis, tmp_path: Path
) -> None:
    proof = json.loads((run / "proof.json").read_text())
    assert proof["tokenizer"]["num_different"] == 0
    tokenizer = open_tokenizer(run)
    assert tokenizer.chat_template == TEMPLATE
    shown = genesis("generate", str(run), "--prompt", "All human", "--max_new_tokens", "5", "--device", "cpu")
    assert (shown.status, shown.out[:9]) == (0, "All human"), shown.err
    ((status, answer, _),) = ask_all(run, {"model": "latest", "prompt": "All", "max_tokens": 4, "temperature": 0.0})
    assert status == 200, answer

    write_jsonl(tmp_path / "web.jsonl", [text for text in TEXTS for _ in range(4)])
    sources = json.dumps([{"name": "web", "paths": [str(tmp_path / "web.jsonl")]}])
    command = ("--name", "corpus", "--out", str(tmp_path), "--tokenizer", str(run), "--num_workers", "2")
    prepared = genesis("data", "prepare", *command, "--sources", sources, "--validation_fraction", "0.2")
    assert prepared.status == 0, prepared.err
    checked = genesis("data", "verify", str(tmp_path / "corpus"))
    assert checked.status == 0, checked.err
    common = ("--config", str(run / "recipe.yaml"), "--data.corpus", str(tmp_path / "corpus"))
    small = ("--data.seq_len", "64", "--data.global_batch_size", "2", "--run_dir", str(tmp_path / "tuned"))
    fitted = genesis("fit", *common, *small, "--trainer.max_steps", "3", "--trainer.accelerator", "cpu")
    assert fitted.status == 0, fitted.err
    validated = genesis("validate", *common, *small, "--ckpt_path", "latest", "--trainer.accelerator", "cpu")
    assert validated.status == 0, validated.err

    loaded = load_decoder(tmp_path / "tuned", tokenizer=run)
    held_out = read_texts(tmp_path / "web.jsonl", 64, loaded.text_tokenizer)
    measures = {one.metric: one for one in measure_held_out(loaded.decoder, held_out, 256)}
    assert measures["bits_per_byte"].num_items == sum(
        int(tokenizer.token_num_bytes[ids].sum() - (0 if first_is_label else tokenizer.token_num_bytes[ids[0]]))
        for text in TEXTS
        for ids, first_is_label in [(tokenizer.encode(text), tokenizer.bos_id is not None)]
        for _ in range(4)
    )
    exported = genesis("export", str(tmp_path / "tuned"), str(tmp_path / "back"), "--dtype", "bfloat16")
    assert exported.status == 0, exported.err
    for name in tokenizer.files:
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()
    assert load_decoder(tmp_path / "back").text_tokenizer.hash == tokenizer.hash
    again, fast = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "back"),
        AutoTokenizer.from_pretrained(tmp_path / "back"),
    )
    assert again.config.model_type == "qwen2"
    assert again.generation_config.eos_token_id == [2, 0]
    assert fast("All human").input_ids == list(encode_prompt(tokenizer, "All human"))


@pytest.mark.slow
def test_a_tokenizer_that_transformers_opens_otherwise_is_refused_by_what_differs(
    theirs: Path, genesis: Genesis, tmp_path: Path
) -> None:
    """transformers builds the tokenizer of some classes by its own code and not from `tokenizer.json`."""
    other = tmp_path / "other"
    other.mkdir()
    for file in theirs.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    content = json.loads((other / "tokenizer.json").read_bytes())
    content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    (other / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((other / "tokenizer_config.json").read_bytes())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    refused = genesis("import", str(other), str(tmp_path / "out"))
    assert refused.status == 1, refused.out
    assert "the proof failed" in refused.err
    assert " here and " in refused.err
    assert "--no_tokenizer" in refused.err
    assert not (tmp_path / "out").exists()
