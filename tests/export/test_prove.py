"""The process that proves an export, part by part."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from genesis.base.errors import UserError
from genesis.cli.export import print_proof
from genesis.export import prove
from genesis.export.proof_size import ProofSize
from genesis.huggingface.llama import LLAMA
from genesis.tokenizer.open import open_tokenizer


def test_greedy_text_of_transformers_goes_on_beyond_eos(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape))
    prompt = [1, 2, 3]
    with torch.no_grad():
        first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    assert model.generation_config is not None
    model.generation_config.eos_token_id = first
    model.save_pretrained(tmp_path)
    _, text = prove._ask_transformers(tmp_path, [prompt], [len(prompt)], prompt, 8, LLAMA)
    assert text[0] == first
    assert len(text) == 8


def test_a_tokenizer_that_transformers_opens_as_one_of_its_own_is_refused_by_its_class(
    exported: Path, tmp_path: Path
) -> None:
    ours = open_tokenizer(exported)
    assert prove.prove_tokenizer(exported, ours, False, ProofSize())["num_different"] == 0
    copy = copytree(exported, tmp_path / "copy")
    shape = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3_5_moe_text"}))
    with pytest.raises(
        UserError, match=r"no exact fast form.*opens every tokenizer of this family as Qwen3_5Tokenizer"
    ):
        prove.prove_tokenizer(copy, ours, False, ProofSize())


def test_merged_values_are_not_called_bit_equal(capsys: pytest.CaptureFixture[str]) -> None:
    print_proof({"weights": {"num_values": 5000, "num_different": 0, "num_merged": 3000}})
    assert capsys.readouterr().out == "weights: 2,000 values bit-equal, 3,000 merged values equal to one rounding\n"
    print_proof({"weights": {"num_values": 5000, "num_different": 0}})
    assert capsys.readouterr().out == "weights: 5,000 values bit-equal\n"
