"""OLMo 3: OLMo 2 with a window in three of four layers, whose positions are not scaled."""

from dataclasses import replace
from typing import Final

from genesis.huggingface.olmo2 import OLMO2

OLMO3: Final = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={
        **OLMO2.defaults,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 500_000.0,  # no key of OLMo 3's, but transformers' base where there is no other
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    free=OLMO2.free | {"sliding_window", "window_layers", "window_rope_theta"},
    windows="listed",
    has_window_rope=True,
)
