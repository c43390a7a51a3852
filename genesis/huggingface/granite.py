"""Granite: Llama with constant factors of embedding, parts, softmax and logits.

Granite 4's dense models are of the type that also has Mamba layers and experts; those have neither. They name the same
parts in another way, with gate and up in one tensor: an export writes them as Granite has them.
"""

from dataclasses import replace
from typing import Final

from genesis.huggingface.llama import LLAMA

GRANITE: Final = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    multipliers={
        "embedding_multiplier": ("embedding", 1.0),
        "residual_multiplier": ("residual", 1.0),
        "attention_multiplier": ("softmax_scale", 1.0),
        "logits_scaling": ("logits", -1.0),
    },
    defaults={
        **LLAMA.defaults,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    free=LLAMA.free | {"softmax_scale"},
)

_GATE_UP: Final = "shared_mlp.input_linear.weight"

GRANITE_HYBRID: Final = replace(
    GRANITE,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    block_tensors={
        **LLAMA.block_tensors,
        "feed_forward.gate.weight": _GATE_UP,
        "feed_forward.up.weight": _GATE_UP,
        "feed_forward.down.weight": "shared_mlp.output_linear.weight",
    },
    keys={
        "shared_intermediate_size" if key == "intermediate_size" else key: field for key, field in LLAMA.keys.items()
    },
    defaults={
        **{key: value for key, value in GRANITE.defaults.items() if key != "intermediate_size"},
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "layer_types": "mamba",
        "position_embedding_type": "nope",
    },
    only={**LLAMA.only, "num_local_experts": (0,), "position_embedding_type": ("rope",)},
    is_written=False,
)
