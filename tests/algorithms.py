"""The algorithms of optimizers, by the names that tests and their records have."""

from typing import Any

from genesis.optim import AdamW, AdamW8bit, Algorithm, Muon


def algorithm_of(name: str, **options: Any) -> Algorithm:
    """Returns an algorithm whose AdamW, for all parameters or for what is no matrix, has some options."""
    return {
        "adamw": AdamW(**options),
        "adamw8bit": AdamW8bit(block=16, **options),
        "muon": Muon(others=AdamW(**options)),
    }[name]
