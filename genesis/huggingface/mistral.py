"""Mistral: Llama with other defaults and, in some models, a window of attention."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA

MISTRAL: Final = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    free=LLAMA.free | {"sliding_window"},
    windows="all",
)
