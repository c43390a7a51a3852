"""Trains a reward model on pairs of answers: a model that gives the chosen answer a higher score than the rejected one.

P  pairs of a micro-batch

    score           of a prompt with an answer: the output of the last token, one number (`genesis.model.scores`)
    difference      score of the chosen answer - score of the rejected one
    margin          `margin_scale` times the value of the pair (`value_field` of its source), 0 without values
    loss            -log sigmoid(difference - margin) + `center_rewards_coefficient` * (the sum of the two scores)^2

The loss of a window is the sum over its pairs divided by their number, over all ranks and micro-batches. The second
addend keeps scores near 0; without it only differences are learned.

    logged                    unit and meaning
    train/loss                nats per pair: what training minimises; near log 2 at the start of a new head
    train/reward_accuracy     share of pairs whose chosen answer has the higher score
    train/reward_margin       mean difference
    train/rewards_chosen      mean score of the chosen answers, train/rewards_rejected that of the rejected ones

References:
    Bradley and Terry, "Rank Analysis of Incomplete Block Designs", 1952. Ouyang et al., "Training language models to
    follow instructions with human feedback", arXiv:2203.02155, equation 1. Touvron et al., "Llama 2",
    arXiv:2307.09288, equation 2 (the margin). Eisenstein et al., "Helping or Herding?", arXiv:2312.09244, section 2
    (the sum of the scores).
"""

import math
from typing import Final

from jaxtyping import Bool, Float32
from torch import Tensor
from torch.nn.functional import logsigmoid

from genesis.base.errors import UserError
from genesis.data.loader import VALUES
from genesis.data.pair_windows import ENDS, PAIRS
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.scores import compute_scores
from genesis.objectives.objective import Head, HeadResult, Objective, ObjectiveSums
from genesis.objectives.vocabulary import Vocabulary

_FIGURES: Final = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")


class RewardModel(Objective):
    """The loss of Bradley and Terry on pairs of answers, for a model with scores (`model.decoder.num_scores`).

    Args:
        center_rewards_coefficient: Factor of the square of a pair's sum of scores, at least 0, such as 0.01.
        margin_scale: Factor of the margins that pairs have as their values, at least 0; 0 to use none.

    Raises:
        UserError: A value is out of its range.
    """

    learns_from = "pairs"
    scores_texts = True
    head_memory = "scores"
    trains_under = frozenset({"pipeline"})

    def __init__(self, center_rewards_coefficient: float = 0.0, margin_scale: float = 1.0) -> None:
        given = {"center_rewards_coefficient": center_rewards_coefficient, "margin_scale": margin_scale}
        for name, value in given.items():
            if not (value >= 0.0 and math.isfinite(value)):
                raise UserError(f"{name} is {value:g}: it must be a number of at least 0")
        self.center_rewards_coefficient, self.margin_scale = float(center_rewards_coefficient), float(margin_scale)

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of pairs, beside those of tokens and bytes."""
        return {**super().count(window), PAIRS: window.num_units[PAIRS]}

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head with the sum over pairs; a pair that is not present counts nowhere."""
        extra, is_present = micro_batch.extra, micro_batch.extra[PAIRS] >= 0

        def sum_pairs(hidden: Tensor, weight: Tensor) -> HeadResult:
            scores = compute_scores(hidden, weight, extra[ENDS]).view(-1, 2)
            return self._sum(scores, self.margin_scale * extra[VALUES].float(), is_present)

        return sum_pairs

    def _sum(
        self, scores: Float32[Tensor, "P 2"], margins: Float32[Tensor, " P"], is_present: Bool[Tensor, " P"]
    ) -> HeadResult:
        differences = scores[:, 0] - scores[:, 1]
        losses = -logsigmoid(differences - margins)
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * scores.sum(1).square()
        values = (*scores.unbind(1), differences, (differences > 0).float())
        figures = {
            name: value.detach().masked_fill(~is_present, 0.0).sum()
            for name, value in zip(_FIGURES, values, strict=True)
        }
        return HeadResult({PAIRS: losses.masked_fill(~is_present, 0.0).sum()}, figures)

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss for each pair, the share of pairs that are in order, and the means of the scores."""
        num_pairs = sums.counts[PAIRS]
        return {"loss": sums.terms[PAIRS] / num_pairs, **{name: sums.figures[name] / num_pairs for name in _FIGURES}}
