"""KTO: learns from single answers to prompts, each of which is marked as good or bad.

P  answers of a micro-batch     N  its tokens

    r       log p(answer) - log p_reference(answer), sums over the tokens of an answer
    z       the mean of r over the mismatched answers of the window, over all ranks and micro-batches, at least 0
    loss    desirable_weight * (1 - sigmoid(beta * (r - z))) of a good answer,
            undesirable_weight * (1 - sigmoid(beta * (z - r))) of a bad one

z estimates the KL between the policy and the reference, and has no gradient. The mismatched answer of a prompt is that
to the next other prompt of its source (`genesis.data.pairs`), cut where prompt and answer are longer than a sequence.
The loss of a window is the sum over its answers divided by their number. In a validation, z is the mean over the
answers of a micro-batch, whatever the number of ranks.

    logged                    unit and meaning
    train/loss                what training minimises, for each answer; between 0 and the largest weight
    train/kl                  z, in nats
    train/rewards_desirable   mean of beta * r over the good answers, train/rewards_undesirable over the bad ones
    train/reward_margin       the difference of the two
    train/desirable           share of good answers

References:
    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, section 4.1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float32
from torch import Tensor

from genesis.base.errors import UserError, check_is_named
from genesis.data.loader import VALUES
from genesis.data.pair_windows import PAIRS, read_mismatched
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.language_model import LanguageModel
from genesis.objectives.objective import Head, HeadResult, ObjectiveSums, SumOverRanks
from genesis.objectives.preference import (
    REFERENCE,
    ReferenceObjective,
    check_positive,
    mask_answers,
    sum_answers,
    sum_by_answer,
)
from genesis.objectives.vocabulary import Vocabulary

_KL: Final = "kl"
"""The tensor of `MicroBatch.extra` with z."""
_ANSWERS: Final = "answers"
"""The unit of the loss."""
_GOOD: Final = "desirable"
_REWARDS: Final = {"rewards_desirable": True, "rewards_undesirable": False}


class KTO(ReferenceObjective):
    """Kahneman-Tversky optimisation on single answers, whose value is 0 or false where they are bad.

    Args:
        beta: How strongly the policy is held to the reference, above 0.
        desirable_weight: Weight of good answers, at least 0; with few of them, such that weight times number is 1 to
            4/3 of that of the bad ones.
        undesirable_weight: Weight of bad answers, at least 0.
        reference: The run or checkpoint whose weights are the reference. None for the base of the adapters; without
            adapters for the checkpoint that the run starts from.

    Raises:
        UserError: A value is out of its range.
    """

    learns_from = "answers"
    bounds_logits = True
    trains_under = frozenset({"tensor", "context", "pipeline"})

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: str | None = None,
    ) -> None:
        check_positive("beta", beta, 0.1)
        weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        for name, value in weights.items():
            if not (value >= 0.0 and math.isfinite(value)):
                raise UserError(f"{name} is {value:g}: it must be a number of at least 0, such as 1")
        if not any(weights.values()):
            raise UserError("desirable_weight and undesirable_weight are 0: give at least one of them, such as 1")
        check_is_named(reference, "model.objective.reference")
        self.beta, self.reference = float(beta), reference
        self.desirable_weight, self.undesirable_weight = float(desirable_weight), float(undesirable_weight)
        if desirable_weight == undesirable_weight:  # else it depends on the share of good answers
            self.initial_loss = 0.5 * self.desirable_weight

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of answers, beside those of tokens and bytes."""
        return {**super().count(window), _ANSWERS: window.num_units[PAIRS]}

    def score(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Float32[Tensor, " 2P"]:
        """Returns the log-probabilities of each answer and of its mismatched one, in turn."""
        both = (sum_answers(decoder, one, vocabulary, 1) for one in (micro_batch, read_mismatched(micro_batch)))
        return torch.stack(tuple(both), dim=1).flatten()

    def prepare_window(
        self,
        decoder: LanguageModel,
        micro_batches: Sequence[MicroBatch],
        vocabulary: Vocabulary,
        sum_over_ranks: SumOverRanks,
    ) -> Sequence[MicroBatch]:
        """Returns the micro-batches with the reference's log-probabilities, and z of the window."""
        total, number, references = 0.0, 0.0, []
        # Without dropout: the step's seed is not set yet, and a resumed run would have other masks.
        was_training = decoder.training
        decoder.eval()
        for one in micro_batches:
            own, mismatched = self.score_reference(decoder, one, vocabulary).view(-1, 2).unbind(1)
            policy = sum_answers(decoder, read_mismatched(one), vocabulary, 1)
            is_present = one.extra[PAIRS] >= 0
            total += float((policy - mismatched).masked_fill(~is_present, 0.0).double().sum())
            number += float(is_present.sum())
            references.append(own)
        decoder.train(was_training)
        total, number = sum_over_ranks((total, number))
        kl = references[0].new_tensor(max(0.0, total / max(number, 1.0)))
        return [
            replace(one, extra={**one.extra, REFERENCE: own, _KL: kl})
            for one, own in zip(micro_batches, references, strict=True)
        ]

    def prepare(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch as `prepare_window` has; one without it, as in a validation, is a window alone."""
        if _KL in micro_batch.extra:
            return micro_batch
        return self.prepare_window(decoder, [micro_batch], vocabulary, lambda values: values)[0]

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head with the sum over answers."""
        extra, is_answer = micro_batch.extra, mask_answers(micro_batch, 1)
        is_present, is_good = extra[PAIRS] >= 0, extra[VALUES] > 0

        def sum_losses(hidden: Tensor, weight: Tensor) -> HeadResult:
            losses = vocabulary.token_losses(hidden, weight, micro_batch.labels)
            ratios = vocabulary.sum_over_rows(sum_by_answer(-losses, is_answer)) - extra[REFERENCE]
            margins = torch.where(is_good, ratios - extra[_KL], extra[_KL] - ratios)
            weights = torch.where(is_good, self.desirable_weight, self.undesirable_weight)
            found = weights * torch.sigmoid(-self.beta * margins)  # 1 - sigmoid(x), without its rounding
            rewards = self.beta * ratios.detach()
            figures = {name: rewards * (is_good == of_good) for name, of_good in _REWARDS.items()}
            figures |= {_GOOD: is_good.float(), _KL: extra[_KL].expand(len(is_good))}
            return HeadResult(
                {_ANSWERS: found.masked_fill(~is_present, 0.0).sum()},
                {name: value.masked_fill(~is_present, 0.0).sum() for name, value in figures.items()},
            )

        return sum_losses

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss for each answer, z, the rewards of good and bad answers, and the share of good ones."""
        number, num_good = sums.counts[_ANSWERS], sums.figures[_GOOD]
        of_good, of_bad = (sums.figures[name] for name in _REWARDS)
        means = (of_good / max(num_good, 1), of_bad / max(number - num_good, 1))
        return {
            "loss": sums.terms[_ANSWERS] / number,
            _KL: sums.figures[_KL] / number,
            **dict(zip(_REWARDS, means, strict=True)),
            "reward_margin": means[0] - means[1],
            _GOOD: num_good / number,
        }
