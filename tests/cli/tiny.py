"""A recipe of `genesis fit` for the tiny corpus: a few thousand parameters, milliseconds a step."""

from pathlib import Path
from typing import Any

import yaml


def build_recipe(corpus: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "model": {
            "decoder": {
                "vocab_size": 320,
                "dim": 32,
                "num_layers": 1,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_dim": 48,
                "max_seq_len": 16,
            },
            "optimizer": {"lr": 1e-2},
        },
        "data": {"corpus": str(corpus), "seq_len": 16, "micro_batch_size": 2, "global_batch_size": 8},
        "schedule": {"total_updates": 100},
        # Most tests are not about writers.
        "checkpoint": {"every_n_steps": 2, "mode": "sync"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "log_every_n_steps": 1,
            "val_check_interval": 2,
        },
    }


def write_recipe(path: Path, recipe: dict[str, Any], changes: dict[str, Any] | None = None) -> Path:
    """Writes `recipe` with `changes`, a mapping of dotted keys to values."""
    for key, value in (changes or {}).items():
        *groups, last = key.split(".")
        target = recipe
        for group in groups:
            target = target.setdefault(group, {})
        target[last] = value
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
