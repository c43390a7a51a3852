"""What a fit on the fake device may be run with. Imports no torch."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

NUM_MICRO_BATCHES: Final = 3
"""Of each step."""

STRATEGIES: Final = ("replicated", "zero1", "full", "grad_op", "hybrid")
PRECISIONS: Final = ("bf16-mixed", "32-true", "16-mixed", "bf16-true", "16-true")
OBJECTIVES: Final = ("cross-entropy", "dpo", "gspo", "distillation")
ADAPTERS: Final = ("none", "lora", "dora", "lora beside bfloat16", "dora beside bfloat16")


@dataclass(frozen=True)
class Combination:
    """What a fit is run with."""

    strategy: str = "replicated"
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    num_ranks: int = 1
    has_offload: bool = False
    objective: str = "cross-entropy"
    adapter: str = "none"

    def __str__(self) -> str:
        offload = ", offload" if self.has_offload else ""
        tuning = ", ".join((self.objective, "all weights" if self.adapter == "none" else self.adapter))
        tuning = "" if tuning == "cross-entropy, all weights" else f"{tuning}, "
        return f"{tuning}{self.strategy}, {self.precision}, {self.optimizer}, {self.num_ranks} ranks{offload}"


def all_combinations() -> list[Combination]:
    """Returns every combination that has a meaning: nothing but a sharded model can be offloaded."""
    every = (
        Combination(*values) for values in product(STRATEGIES, PRECISIONS, ("adamw", "muon"), (1, 2), (False, True))
    )
    return [one for one in every if not one.has_offload or one.strategy not in ("replicated", "zero1")]


def tuned_combinations() -> list[Combination]:
    """Returns every combination that fine-tunes: with adapters, or with another objective than cross-entropy."""
    kinds = [kind for kind in product(OBJECTIVES, ADAPTERS) if kind != ("cross-entropy", "none")]
    trained = [one for one in all_combinations() if one.precision != "16-true"]  # always refused
    return [replace(one, objective=objective, adapter=adapter) for one in trained for objective, adapter in kinds]


def choose_pairwise(combinations: list[Combination]) -> list[Combination]:
    """Returns a few of them in which every two values that occur together do so: greedily, always the same."""

    def pairs(one: Combination) -> set[tuple[Any, Any]]:
        values = list(vars(one).items())
        return {(a, b) for i, a in enumerate(values) for b in values[i + 1 :]}

    pairs_of = {one: pairs(one) for one in combinations}
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        best = max(combinations, key=lambda one: len(pairs_of[one] & missing))
        chosen.append(best)
        missing -= pairs_of[best]
    return chosen
