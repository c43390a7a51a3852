"""The algorithms of optimizers, by the names that tests and their records have."""

from typing import Any

from genesis.optim import AdamW, Algorithm, Muon


def algorithm_of(name: str, **options: Any) -> Algorithm:
    """Returns an algorithm whose AdamW, for all parameters or for what is no matrix, has some options."""
    return {"adamw": AdamW(**options), "muon": Muon(others=AdamW(**options))}[name]
