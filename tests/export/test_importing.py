"""What of a Llama is taken over, and what is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from genesis.base.errors import UserError
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import count_alike_stops, import_directory, read_tokenizer
from genesis.generate.load import load_decoder
from genesis.huggingface.directory import WEIGHTS_NAME
from genesis.huggingface.shape import read_shape
from genesis.tokenizer.open import open_tokenizer
from genesis.train.adapter_base import find_adapter_base
from genesis_callbacks.checkpoint import read_manifest
from tests.chat.support import write_tokenizer
from tests.huggingface.test_directory import read_state, write_llama


@pytest.mark.slow
def test_an_untied_llama_in_bfloat16_without_tokenizer_becomes_a_checkpoint(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "llama", tie_word_embeddings=False, rope_theta=20_000.0)
    proof = import_directory(tmp_path / "llama", tmp_path / "run", has_tokenizer=False)
    assert proof["tokenizer"] is None
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000000")
    decoder = manifest.recipe["model"]["decoder"]
    assert not decoder["has_tied_embeddings"]
    assert decoder["rope_theta"] == 20_000.0
    assert manifest.identity == {"imported_as": "llama"}
    assert not manifest.has_optimizer
    state = read_state(tmp_path / "llama")
    assert torch.equal(state["output.weight"], model.lm_head.weight)


def test_a_run_that_was_imported_finds_its_tokenizer_wherever_it_lies(imported: Path, tmp_path: Path) -> None:
    shutil.copytree(imported, tmp_path / "elsewhere")
    loaded = load_decoder(tmp_path / "elsewhere")
    assert loaded.checkpoint.name == "step-00000000"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("class alpha")) == "class alpha"


@pytest.mark.slow
def test_a_copy_of_tied_embeddings_and_old_inverse_frequencies_are_left_out(tmp_path: Path) -> None:
    write_llama(tmp_path, tie_word_embeddings=True)
    state = load_file(tmp_path / WEIGHTS_NAME)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(state, tmp_path / WEIGHTS_NAME)
    import_directory(tmp_path, tmp_path / "run", has_tokenizer=False)
    assert "output.weight" not in read_state(tmp_path)


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_taken_over_is_refused_with_the_way_out(exported: Path, tmp_path: Path) -> None:
    _, config = read_shape(exported)
    with pytest.raises(UserError, match=r"has no tokenizer\.model.*--no_tokenizer"):
        read_tokenizer(tmp_path, config)
    shutil.copy(exported / "tokenizer.model", tmp_path)
    assert read_tokenizer(tmp_path, config).vocab_size == 700
    fast = json.loads((exported / "tokenizer.json").read_bytes())
    fast["model"]["merges"] = fast["model"]["merges"][::-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fast))
    with pytest.raises(UserError, match=r"no exact fast form.*--no_tokenizer"):
        read_tokenizer(tmp_path, config)


def test_weights_are_never_rounded_by_an_import(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is float32, which --dtype bfloat16 would round: leave --dtype out"):
        import_directory(exported, tmp_path / "run", has_tokenizer=False, dtype=torch.bfloat16)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.repeat  # the base whose routers are float32
def test_a_base_for_adapters_keeps_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoints([checkpoint], tmp_path / "small", ExportOptions(dtype="bfloat16"))
    import_directory(tmp_path / "small", tmp_path / "run", has_tokenizer=True, dtype=torch.bfloat16)
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000000")
    assert {record.dtype for record in manifest.tensors.values()} == {"bfloat16"}


@pytest.mark.slow
def test_the_routers_of_a_base_in_bfloat16_are_float32(tmp_path: Path) -> None:
    shape: Any = MixtralConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
    )  # fmt: skip
    MixtralForCausalLM(shape).to(torch.bfloat16).save_pretrained(tmp_path / "mixtral")
    import_directory(tmp_path / "mixtral", tmp_path / "run", has_tokenizer=False, dtype=torch.bfloat16)
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000000")
    routers = {name for name in manifest.tensors if name.endswith("router.weight")}
    assert len(routers) == 2
    assert {name for name, record in manifest.tensors.items() if record.dtype == "float32"} == routers
    assert find_adapter_base(str(tmp_path / "run"), None).format.dtype == torch.bfloat16


@pytest.mark.parametrize("head", ["embedding.weight", "output.weight"])
def test_stops_whose_output_weights_no_training_reached_are_counted(head: str, tmp_path: Path) -> None:
    """Adapters never learn such stops (QwenLM/Qwen3#1064, hiyouga/LlamaFactory#7943, unslothai/unsloth#1072)."""
    tokenizer = open_tokenizer(write_tokenizer(tmp_path))
    state = {"embedding.weight": torch.randn(tokenizer.vocab_size, 64)}
    state[head] = torch.randn(tokenizer.vocab_size, 64)
    assert count_alike_stops(state, tokenizer) == {}
    controls = [token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token)]
    (stop,) = [token for token in controls if tokenizer.spell([token], has_controls=True) == "<|im_end|>"]
    others = [token for token in controls if token not in (stop, *tokenizer.stop_ids)][:2]
    state[head][others] = state[head][stop] * 1.001
    assert count_alike_stops(state, tokenizer) == {stop: 2}
