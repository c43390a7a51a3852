"""ERNIE 4.5: Llama whose positions turn neighbouring dimensions of a head."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA

ERNIE4_5: Final = replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    constants={"hidden_act": "silu", "use_bias": False},
    defaults={
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    only={**LLAMA.only, "use_bias": (False,)},
    attention={"has_interleaved_rope": True},
)
