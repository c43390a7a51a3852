"""Adapters that PEFT wrote with options of its own: read with the layers that they have, or refused by the option."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from genesis.base.errors import UserError
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.peft import read_peft_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]


def write_adapters(directory: Path, **options: Any) -> Path:
    shape: Any = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    config: Any = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], **options)
    get_peft_model(LlamaForCausalLM(shape), config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, [f"blocks.{number}.attention.{name}" for number in range(3) for name in ("query", "value")]),
        (
            {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
            [f"blocks.{number}.attention.{name}" for number in (0, 2) for name in ("query", "value")],
        ),
        ({"exclude_modules": ["q_proj"]}, [f"blocks.{number}.attention.value" for number in range(3)]),
    ],
)
def test_the_layers_are_those_that_have_weights(options: dict[str, Any], layers: list[str], tmp_path: Path) -> None:
    found = read_peft_config(write_adapters(tmp_path, **options), LLAMA)
    assert list(found.include) == layers
    assert (found.rank, found.alpha, found.also_train) == (2, 6.0, ())


@pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
def test_layers_of_different_rank_or_alpha_are_refused_by_name(option: str, tmp_path: Path) -> None:
    directory = write_adapters(tmp_path, **{option: {"q_proj": 4}})
    with pytest.raises(UserError, match=rf"adapter_config\.json: {option} is \{{'q_proj': 4\}}"):
        read_peft_config(directory, LLAMA)
