"""What a fit on the fake device may be run with. Imports no torch."""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

NUM_MICRO_BATCHES: Final = 3
"""Of each step."""

STRATEGIES: Final = ("replicated", "zero1", "full", "grad_op", "hybrid")
PRECISIONS: Final = ("bf16-mixed", "32-true", "16-mixed", "bf16-true", "16-true")


@dataclass(frozen=True)
class Combination:
    """What a fit is run with."""

    strategy: str = "replicated"
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    num_ranks: int = 1
    has_offload: bool = False

    def __str__(self) -> str:
        offload = ", offload" if self.has_offload else ""
        return f"{self.strategy}, {self.precision}, {self.optimizer}, {self.num_ranks} ranks{offload}"


def all_combinations() -> list[Combination]:
    """Returns every combination that has a meaning: nothing but a sharded model can be offloaded."""
    every = (
        Combination(*values) for values in product(STRATEGIES, PRECISIONS, ("adamw", "muon"), (1, 2), (False, True))
    )
    return [one for one in every if not one.has_offload or one.strategy not in ("replicated", "zero1")]


def choose_pairwise(combinations: list[Combination]) -> list[Combination]:
    """Returns a few of them in which every two values that occur together do so: greedily, always the same."""

    def pairs(one: Combination) -> set[tuple[Any, Any]]:
        values = list(asdict(one).items())
        return {(a, b) for i, a in enumerate(values) for b in values[i + 1 :]}

    missing = set().union(*map(pairs, combinations))
    chosen = []
    while missing:
        best = max(combinations, key=lambda one: len(pairs(one) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
