"""Mistral: Llama with other defaults and, in some models, a window of attention.

Ministral has the window in some layers only. Ministral 3 has scaled positions, and queries that grow with them.
Mistral Small 3 and Ministral 3 also read images; their towers are left out by name, and the settings of the text model
are in `text_config`.
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.gemma3 import TOWERS
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
    wrapped_type="mistral3",
    dropped=TOWERS,
)

MINISTRAL: Final = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    free=MISTRAL.free | {"window_layers"},
    windows="listed",
    wrapped_type=None,
    dropped=(),
)

MINISTRAL3: Final = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        **MISTRAL.defaults,
        "vocab_size": 131_072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    free=MISTRAL.free | {"query_growth"},
)
