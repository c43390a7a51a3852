"""Learns from pairs of answers which of them is preferred: with a reference (DPO) or without one (SimPO, CPO, ORPO).

P  pairs of a micro-batch     N  tokens of a micro-batch     2P  its answers, chosen and rejected in turn

    log p(answer)   the sum of the log-probabilities of the answer's tokens, or their mean (`length_normalisation`)
    reward          DPO: beta * (log p(answer) - log p_reference(answer)); the others: beta * log p(answer)
    margin          reward of the chosen answer - reward of the rejected one
    s               `label_smoothing`

The loss of a pair is one of these:

    DPO, sigmoid    -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)
    DPO, robust     (-(1 - s) log sigmoid(margin) + s log sigmoid(-margin)) / (1 - 2 s)
    DPO, hinge      max(0, 1 - margin)
    DPO, ipo        (margin / beta - 1 / (2 beta))^2
    SimPO           -log sigmoid(margin - gamma), of means over tokens
    CPO             -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)
    ORPO            -weight * log sigmoid(log odds(chosen) - log odds(rejected)), with odds = p / (1 - p), of means

The loss of a window is the sum over its pairs divided by their number, over all ranks and micro-batches, plus
`sft_weight` times the cross-entropy of the chosen answers, divided by the number of their tokens.

    logged                    unit and meaning
    train/loss                nats per pair: what training minimises; log 2 at the start of DPO
    train/rewards_chosen      mean reward of the chosen answers, train/rewards_rejected that of the rejected ones
    train/reward_margin       mean margin
    train/reward_accuracy     share of pairs whose margin is above 0
    train/log_probs_chosen    mean log p of the chosen answers, train/log_probs_rejected that of the rejected ones
    train/preference_loss     with `sft_weight`: the loss of the pairs alone
    train/sft_loss            with `sft_weight`: the cross-entropy of the chosen answers, nats per token

References:
    Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290, equation 7. Mitchell, "A note on DPO with
    noisy preferences", 2023 (label smoothing). Chowdhury et al., "Provably Robust DPO", arXiv:2403.00409, equation
    13. Zhao et al., "SLiC-HF", arXiv:2305.10425 (hinge). Azar et al., "A General Theoretical Paradigm to Understand
    Learning from Human Preferences", arXiv:2310.12036, equation 17 (IPO). Pang et al., "Iterative Reasoning
    Preference Optimization", arXiv:2404.19733, equation 1 (the cross-entropy beside it). Lambert et al., "Tulu 3",
    arXiv:2411.15124, section 5 (means over tokens). Meng et al., "SimPO", arXiv:2405.14734, equation 6. Xu et al.,
    "Contrastive Preference Optimization", arXiv:2401.08417, equations 3 to 5. Hong et al., "ORPO", arXiv:2403.07691,
    equations 3 to 7.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from jaxtyping import Bool, Float32
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from genesis.base.errors import UserError, check_is_named
from genesis.data.pair_windows import ANSWERS, CHOSEN_TOKENS, PAIRS
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.adapter import adapters_off
from genesis.model.language_model import LanguageModel
from genesis.objectives.objective import (
    FitContext,
    Head,
    HeadResult,
    Objective,
    ObjectiveSums,
    Prepared,
    RecipeContext,
    ScorePairs,
)
from genesis.objectives.reference import ReferenceLogProbs
from genesis.objectives.reference_recipe import resolve_reference
from genesis.objectives.vocabulary import Vocabulary
from genesis.recipe.resolved import ResolvedRecipe

REFERENCE: Final = "reference_log_probs"
"""The tensor of `MicroBatch.extra` with log p_reference of each answer, sums over tokens."""

_FIGURES: Final = (
    "rewards_chosen",
    "rewards_rejected",
    "reward_margin",
    "reward_accuracy",
    "log_probs_chosen",
    "log_probs_rejected",
)
_PREFERENCE, _SFT = "preference_loss", "sft_loss"
_HIGHEST_MEAN: Final = -1e-6
"""Above it, the odds of an answer have no finite logarithm in float32; a pair that is missing has 0."""


class PairObjective(Objective):
    """What objectives on a corpus of pairs share: log-probabilities of answers, their rewards, and what is logged.

    Args:
        beta: Factor of the rewards, above 0.
        length_normalisation: Whether log-probabilities are means over an answer's tokens instead of sums.
        sft_weight: Factor of the cross-entropy of the chosen answers beside the loss of the pairs; 0 for none.

    Raises:
        UserError: A value is out of its range.
    """

    learns_from = "pairs"
    bounds_logits = True
    trains_under = frozenset({"tensor", "context", "pipeline"})

    def __init__(self, beta: float, *, length_normalisation: bool, sft_weight: float) -> None:
        check_positive("beta", beta, 0.1)
        if not (sft_weight >= 0.0 and math.isfinite(sft_weight)):
            raise UserError(f"sft_weight is {sft_weight:g}: it must be a number of at least 0")
        self.beta, self.sft_weight = float(beta), float(sft_weight)
        self.length_normalisation = length_normalisation

    @abstractmethod
    def lose(self, rewards: Float32[Tensor, "P 2"], margins: Float32[Tensor, " P"]) -> Float32[Tensor, " P"]:
        """Returns the loss of each pair by the rewards of its chosen and its rejected answer. Pure."""

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of pairs and of the chosen answers' tokens, beside those of tokens and bytes."""
        return {**super().count(window), **window.num_units}

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head with the sum over pairs and, with `sft_weight`, that over the chosen answers' tokens."""
        reference, is_present = micro_batch.extra.get(REFERENCE), micro_batch.extra[PAIRS] >= 0
        is_answer = mask_answers(micro_batch)

        def sum_pairs(hidden: Tensor, weight: Tensor) -> HeadResult:
            losses = vocabulary.token_losses(hidden, weight, micro_batch.labels)
            log_probs = vocabulary.sum_over_rows(sum_by_answer(-losses, is_answer))
            num_tokens = is_answer.sum(1).clamp_min(1) if self.length_normalisation else 1
            policy = log_probs / num_tokens
            rewards = self.beta * (policy if reference is None else policy - reference / num_tokens)
            terms, figures = self._sum(rewards.view(-1, 2), policy.view(-1, 2), is_present)
            if self.sft_weight:
                terms[CHOSEN_TOKENS] = -self.sft_weight * log_probs.view(-1, 2)[:, 0].sum()
            return HeadResult(terms, figures)

        return sum_pairs

    def _sum(
        self, rewards: Float32[Tensor, "P 2"], policy: Float32[Tensor, "P 2"], is_present: Bool[Tensor, " P"]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the terms and the figures of pairs; a pair that is not present counts nowhere."""
        margins = rewards[:, 0] - rewards[:, 1]
        values = (*rewards.unbind(1), margins, (margins > 0).float(), *policy.unbind(1))
        figures = {
            name: value.detach().masked_fill(~is_present, 0.0).sum()
            for name, value in zip(_FIGURES, values, strict=True)
        }
        losses = self.lose(rewards, margins)
        return {PAIRS: losses.masked_fill(~is_present, 0.0).sum()}, figures

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss for each pair, and the means of rewards and log-probabilities.

        The loss is what training minimises. With `sft_weight` its two parts are returned as well.
        """
        num_pairs = sums.counts[PAIRS]
        preference = sums.terms[PAIRS] / num_pairs
        values = {name: sums.figures[name] / num_pairs for name in _FIGURES}
        if not self.sft_weight:
            return {"loss": preference, **values}
        weighted = sums.terms[CHOSEN_TOKENS] / sums.counts[CHOSEN_TOKENS]
        parts = {_PREFERENCE: preference, _SFT: weighted / self.sft_weight}
        return {"loss": preference + weighted, **parts, **values}


class ReferenceObjective(Objective):
    """What objectives with a reference share.

    The reference of a run with adapters is its base: the same model with its adapters switched off. Otherwise, and
    where `reference` names a checkpoint, a pass over all pairs computes the reference's log-probabilities before
    training, and the run keeps them.

    Attributes:
        reference: The run or checkpoint whose weights are the reference; None for the base of the adapters.
        log_probs: The reference's log-probabilities of all pairs; None where adapters are switched off instead.
        directory: Where a run keeps them; None to keep them in memory alone.
    """

    compares_forwards = True
    runs_model = True
    memory_note = "the reference of preferences is a forward without adapters, or stored: no second model is in memory"
    reference: str | None = None
    log_probs: ReferenceLogProbs | None = None
    directory: Path | None = None

    @classmethod
    def scores_without_adapters(cls, options: Mapping[str, Any]) -> bool:
        """Returns whether the reference is the model without adapters, and not a checkpoint."""
        return options.get("reference") is None

    @classmethod
    def resolve(cls, recipe: ResolvedRecipe, start: RecipeContext) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Finds the reference, from which a run of all weights starts unless it has a checkpoint."""
        return resolve_reference(recipe, start)

    def prepare_fit(self, fit: FitContext) -> Prepared:
        """Keeps the directory of the reference's log-probabilities."""
        self.directory = fit.directory
        return Prepared()

    def start(self, *, has_adapters: bool, score_pairs: ScorePairs) -> None:
        """Finds the reference's log-probabilities, unless adapters are switched off instead."""
        if self.log_probs is not None or (self.reference is None and has_adapters):
            return
        if self.reference is None:
            raise UserError(
                "model.objective has no reference: give a checkpoint by model.objective.init_args.reference, or train "
                "adapters"
            )
        self.log_probs = ReferenceLogProbs(score_pairs(Path(self.reference), self.directory, self.score))

    def score(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Float32[Tensor, " 2P"]:
        """Returns the log-probabilities of the two answers of each pair, in turn."""
        return sum_answers(decoder, micro_batch, vocabulary)

    def score_reference(
        self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary
    ) -> Float32[Tensor, " 2P"]:
        """Returns the reference's log-probabilities: stored ones, or those without adapters."""
        if self.log_probs is not None:
            return self.log_probs.read(micro_batch.extra[PAIRS])
        with adapters_off(decoder):
            return self.score(decoder, micro_batch, vocabulary)


class DPO(ReferenceObjective, PairObjective):
    """Direct preference optimisation on a corpus of pairs.

    Args:
        beta: How strongly the policy is held to the reference, above 0.
        loss: The loss of a pair: `sigmoid` is that of DPO, `robust` the same without its bias by wrong preferences,
            `hinge` that of SLiC, and `ipo` a square, which has a best margin of 1/2; it asks for means over tokens
            (`length_normalisation`).
        label_smoothing: The share of pairs whose preference is assumed to be wrong: 0 to less than 0.5. Of `sigmoid`
            and `robust`.
        length_normalisation: Whether rewards are means over an answer's tokens instead of sums, so that long answers do
            not count more; beta is then larger, such as 5.
        sft_weight: Factor of the cross-entropy of the chosen answers beside the loss of the pairs; 0 for none.
        reference: The run or checkpoint whose weights are the reference. None for the base of the adapters; without
            adapters for the checkpoint that the run starts from.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(
        self,
        beta: float = 0.1,
        loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalisation: bool = False,
        sft_weight: float = 0.0,
        reference: str | None = None,
    ) -> None:
        super().__init__(beta, length_normalisation=length_normalisation, sft_weight=sft_weight)
        _check_smoothing(label_smoothing)
        if label_smoothing and loss in ("hinge", "ipo"):
            raise UserError(f"label_smoothing is {label_smoothing:g}, and the loss {loss} has none: leave it out")
        if loss == "robust" and not label_smoothing:
            raise UserError(
                "loss is robust, and label_smoothing is 0: give the share of wrong preferences, such as 0.1"
            )
        if loss == "ipo" and not length_normalisation:
            raise UserError(
                "loss is ipo, whose square would grow with an answer's length: set length_normalisation true"
            )
        check_is_named(reference, "model.objective.reference")
        self.loss, self.label_smoothing = loss, float(label_smoothing)
        self.initial_loss = {"hinge": 1.0, "ipo": (0.5 / beta) ** 2}.get(loss, math.log(2))
        self.reference = reference

    def prepare(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch with the reference's log-probabilities."""
        found = self.score_reference(decoder, micro_batch, vocabulary)
        return replace(micro_batch, extra={**micro_batch.extra, REFERENCE: found})

    def lose(self, rewards: Float32[Tensor, "P 2"], margins: Float32[Tensor, " P"]) -> Float32[Tensor, " P"]:
        """Returns the loss of each pair."""
        if self.loss == "hinge":
            return relu(1.0 - margins)
        if self.loss == "ipo":
            return (margins / self.beta - 0.5 / self.beta).square()
        wrong = -self.label_smoothing if self.loss == "robust" else self.label_smoothing
        losses = _sigmoid_losses(margins, 1.0 - self.label_smoothing, wrong)
        return losses / (1.0 - 2.0 * self.label_smoothing) if self.loss == "robust" else losses


class SimPO(PairObjective):
    """Simple preference optimisation: the rewards are mean log-probabilities, without a reference.

    Args:
        beta: Factor of the rewards, above 0; larger than DPO's.
        gamma: The margin that a pair should have, at least 0.
        sft_weight: Factor of the cross-entropy of the chosen answers beside the loss of the pairs; 0 for none.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, sft_weight: float = 0.0) -> None:
        super().__init__(beta, length_normalisation=True, sft_weight=sft_weight)
        if not (gamma >= 0.0 and math.isfinite(gamma)):
            raise UserError(f"gamma is {gamma:g}: it must be a number of at least 0, such as 1")
        self.gamma = float(gamma)

    def lose(self, rewards: Float32[Tensor, "P 2"], margins: Float32[Tensor, " P"]) -> Float32[Tensor, " P"]:
        """Returns the loss of each pair."""
        return -logsigmoid(margins - self.gamma)


class CPO(PairObjective):
    """Contrastive preference optimisation: DPO's loss as if the reference gave all answers one probability.

    Args:
        beta: Factor of the rewards, above 0.
        label_smoothing: The share of pairs whose preference is assumed to be wrong: 0 to less than 0.5.
        sft_weight: Factor of the cross-entropy of the chosen answers beside the loss of the pairs; 0 for none.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, sft_weight: float = 1.0) -> None:
        super().__init__(beta, length_normalisation=False, sft_weight=sft_weight)
        _check_smoothing(label_smoothing)
        self.label_smoothing = float(label_smoothing)

    def lose(self, rewards: Float32[Tensor, "P 2"], margins: Float32[Tensor, " P"]) -> Float32[Tensor, " P"]:
        """Returns the loss of each pair."""
        return _sigmoid_losses(margins, 1.0 - self.label_smoothing, self.label_smoothing)


class ORPO(PairObjective):
    """Odds ratio preference optimisation: supervised fine-tuning on the chosen answers, with a penalty by odds.

    Its rewards, which are only logged, are mean log-probabilities.

    Args:
        weight: Factor of the odds ratio beside the cross-entropy of the chosen answers, above 0.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(self, weight: float = 0.1) -> None:
        check_positive("weight", weight, 0.1)
        super().__init__(1.0, length_normalisation=True, sft_weight=1.0)
        self.weight = float(weight)

    def lose(self, rewards: Float32[Tensor, "P 2"], margins: Float32[Tensor, " P"]) -> Float32[Tensor, " P"]:
        """Returns the loss of each pair."""
        log_rest = torch.log(-torch.expm1(rewards.clamp_max(_HIGHEST_MEAN)))  # log(1 - p)
        return -self.weight * logsigmoid(margins - (log_rest[:, 0] - log_rest[:, 1]))


def _sigmoid_losses(margins: Float32[Tensor, " P"], right: float, wrong: float) -> Float32[Tensor, " P"]:
    return -right * logsigmoid(margins) - wrong * logsigmoid(-margins)


def check_positive(name: str, value: float, example: float) -> None:
    """Refuses a value that is not above 0.

    Raises:
        UserError: It is not.
    """
    if not (value > 0.0 and math.isfinite(value)):
        raise UserError(f"{name} is {value:g}: it must be a number above 0, such as {example:g}")


def _check_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing < 0.5:
        raise UserError(f"label_smoothing is {label_smoothing:g}: it must be at least 0 and below 0.5")


def sum_answers(
    decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary, num_each: int = 2
) -> Float32[Tensor, " A"]:
    """Returns the sum of the log-probabilities of each answer's tokens, without dropout and without a graph.

    Args:
        decoder: The model.
        micro_batch: Its answers, `num_each` for each number in `PAIRS`.
        vocabulary: The strategy's.
        num_each: 2 for pairs, 1 for single answers.
    """
    is_answer = mask_answers(micro_batch, num_each)

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        losses = vocabulary.token_losses(hidden, weight, micro_batch.labels)
        return vocabulary.sum_over_rows(sum_by_answer(-losses, is_answer))

    was_training = decoder.training
    decoder.eval()
    try:
        with torch.no_grad():
            found: Tensor = decoder(
                micro_batch.input_ids,
                document_ids=micro_batch.document_ids,
                document_offsets=micro_batch.document_offsets,
                head=head,
            )
    finally:
        decoder.train(was_training)
    return found


def mask_answers(micro_batch: MicroBatch, num_each: int = 2) -> Bool[Tensor, "A N"]:
    """Returns which tokens have a label of each answer, `num_each` for each number in `PAIRS`."""
    labels, answers = micro_batch.labels.flatten(), micro_batch.extra[ANSWERS].flatten()
    numbers = torch.arange(num_each * len(micro_batch.extra[PAIRS]), device=answers.device)
    return (answers == numbers[:, None]) & (labels != IGNORE_INDEX)


def sum_by_answer(values: Float32[Tensor, " N"], is_answer: Bool[Tensor, "A N"]) -> Float32[Tensor, " A"]:
    """Returns the sum of the values of each answer's tokens."""
    # A sum of masked rows has a fixed order on every device; adding by index on a GPU has not.
    return torch.where(is_answer, values, 0.0).sum(1)
