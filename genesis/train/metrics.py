"""Token-weighted metrics: sums over all ranks first, one division at the end.

A mean over ranks or micro-batches of their means is wrong wherever they hold different numbers of tokens. Torchmetrics'
own perplexity takes logits, which our loss never makes in full. `Objective.measure` divides the sums.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

from genesis.objectives.objective import HeadResult


class SumsOverRanks(Metric):
    """The sums of an objective over a validation set. They stay on the device; only `compute` communicates."""

    full_state_update = False
    counts_validation_alone = True  # so that a resume does not report what it counted as lost
    terms: Tensor
    figures: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._names: tuple[list[str], list[str], list[str]] = ([], [], [])
        # float64: a float32 sum over millions of tokens would lose the last digits of each addend. The states are empty
        # until the first batch, because an objective names its sums only with their values.
        for name, dtype in (("terms", torch.float64), ("figures", torch.float64), ("counts", torch.int64)):
            self.add_state(name, torch.zeros(0, dtype=dtype), dist_reduce_fx="sum")

    def update(self, sums: HeadResult, counts: Mapping[str, int]) -> None:
        """Adds the sums of a batch."""
        self._names = (list(sums.terms), list(sums.figures), list(counts))
        if sums.terms:
            self.terms = _add(self.terms, torch.stack([value.double() for value in sums.terms.values()]))
        if sums.figures:
            self.figures = _add(self.figures, torch.stack([value.double() for value in sums.figures.values()]))
        # Filled on the device: a copy of host memory would be a wait.
        filled = [torch.full((), count, dtype=torch.int64, device=self.counts.device) for count in counts.values()]
        self.counts = _add(self.counts, torch.stack(filled))

    def compute(self) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
        """Returns the fields of `ObjectiveSums` over all ranks; torchmetrics accepts no frozen dataclass here."""
        terms, figures, counts = (
            dict(zip(names, values.tolist(), strict=True))
            for names, values in zip(self._names, (self.terms, self.figures, self.counts), strict=True)
        )
        return terms, figures, counts


def _add(total: Tensor, added: Tensor) -> Tensor:
    return total + added.detach() if total.numel() else added.detach()
