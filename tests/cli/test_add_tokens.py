"""Special tokens that are added to a model, through every command that trains and uses them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from genesis.generate.load import load_decoder
from genesis.tokenizer.open import open_tokenizer
from tests.cli.conftest import Genesis
from tests.export.test_add_tokens import NEW, build_base
from tests.tokenizer.test_huggingface import TEXTS, qwen


@pytest.mark.slow
def test_new_rows_are_trained_beside_adapters_and_exported(genesis: Genesis, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    base = build_base(tmp_path / "base", open_tokenizer(qwen(tmp_path / "theirs")), vocab_size=640)
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<|user turn|>{{ m.role }} {{ m.content }}<|tool|>{% endfor %}"
        "{% if add_generation_prompt %}<|user turn|>assistant {% endif %}"
    )
    command = ("model", "add-tokens", str(base), str(tmp_path / "new"), *NEW, "--eos", NEW[0], "--multiple-of", "641")
    added = genesis(*command, "--chat_template", str(template))
    assert added.status == 0, added.err
    chats = [
        json.dumps({"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": text}]})
        for text in TEXTS
        for _ in range(20)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(chats))
    sources = json.dumps([{"name": "chat", "paths": [str(tmp_path / "chat.jsonl")], "chat": "auto"}])
    prepared = genesis(
        *("data", "prepare", "--name", "corpus", "--out", str(tmp_path), "--tokenizer", str(tmp_path / "new")),
        *("--num_workers", "2", "--sources", sources, "--validation_fraction", "0.1"),
    )
    assert prepared.status == 0, prepared.err
    fitted = genesis(
        *("fit", "--config", str(tmp_path / "new/recipe.yaml"), "--data.corpus", str(tmp_path / "corpus")),
        *("--data.seq_len", "64", "--data.global_batch_size", "2", "--run_dir", str(tmp_path / "tuned")),
        *("--trainer.max_steps", "3", "--trainer.accelerator", "cpu", "--model.optimizer.lr", "0.01"),
        *("--model.adapter.rank", "4", "--model.adapter.also_train", "[embedding]"),
    )
    assert fitted.status == 0, fitted.err
    before, after = (load_decoder(tmp_path / name) for name in ("new", "tuned"))
    new_rows = slice(before.text_tokenizer.vocab_size - 2, before.text_tokenizer.vocab_size)
    moved = (after.decoder.embedding.weight - before.decoder.embedding.weight)[new_rows]
    assert bool(moved.abs().amax(dim=1).gt(0).all())
    # Each proof compares the logits with PEFT's or transformers'.
    for name in ("adapter", "merge"):
        exported = genesis("export", str(tmp_path / "tuned"), str(tmp_path / name), f"--{name}")
        assert exported.status == 0, exported.err
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "merge"), after.text_tokenizer
    fast = AutoTokenizer.from_pretrained(tmp_path / "merge")
    text = "<|user turn|>user All human<|tool|>"
    ids = fast(text, add_special_tokens=False).input_ids
    assert ids == tokenizer.encode_with_controls(text)
    assert {tokenizer.vocab_size - 1, tokenizer.vocab_size - 2} <= {*ids}
    assert model.generation_config.eos_token_id == fast.eos_token_id == tokenizer.eos_id
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits
        assert torch.allclose(theirs, after.decoder(torch.tensor([ids])), atol=2e-3)
