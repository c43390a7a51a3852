"""SmolLM3: Llama in which every few layers have no rotary positions."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA

SMOLLM3: Final = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    free=LLAMA.free | {"no_rope_every", "sliding_window", "window_layers"},
    windows="without_rope",
)
