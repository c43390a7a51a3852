"""The process that proves an export, part by part."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from genesis.export import prove


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
    _, text = prove._ask_transformers(tmp_path, [prompt], [len(prompt)], prompt, 8)
    assert text[0] == first
    assert len(text) == 8
