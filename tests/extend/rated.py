"""A cross-entropy that weighs conversations by a field of their records: this file is all that it needs."""

from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.loader import VALUES
from genesis.data.window import MicroBatch
from genesis.objectives.objective import TOKENS, Head, HeadResult, Objective, ObjectiveSums
from genesis.objectives.vocabulary import Vocabulary


class Rated(Objective):
    """A conversation counts by its rating: the best one fully, and one that is rated 0 not at all.

    Args:
        best: The best rating.
    """

    needs_values = True

    def __init__(self, best: int = 5) -> None:
        if best < 1:
            raise UserError(f"best is {best}: give the best rating, at least 1")
        self.best = best

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head that sums the weighted losses."""
        shares = micro_batch.extra[VALUES].flatten() / self.best

        def compute(hidden: Tensor, weight: Tensor) -> HeadResult:
            losses = vocabulary.token_losses(hidden, weight, micro_batch.labels)  # 0 where nothing is learned
            return HeadResult({TOKENS: (shares * losses).sum()}, {"plain": losses.detach().sum()})

        return compute

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the weighted loss for each learned token, and the loss without weights."""
        number = sums.counts[TOKENS]
        return {"loss": sums.terms[TOKENS] / number, "plain_loss": sums.figures["plain"] / number}
