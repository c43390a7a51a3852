"""Direct preference optimisation: learns from pairs of answers which of them is preferred.

P  pairs of a micro-batch     N  tokens of a micro-batch     2P  its answers, chosen and rejected in turn

    log p(answer)   the sum of the log-probabilities of the answer's tokens, or their mean (`length_normalisation`)
    reward          beta * (log p(answer) - log p_reference(answer))
    margin          reward of the chosen answer - reward of the rejected one
    loss of a pair  -(1 - s) log sigmoid(margin) - s log sigmoid(-margin), with s = `label_smoothing`

The loss of a window is the sum over its pairs divided by their number, over all ranks and micro-batches, plus
`sft_weight` times the cross-entropy of the chosen answers, divided by the number of their tokens.

    logged                    unit and meaning
    train/loss                nats per pair: what training minimises; log 2 at the start, without dropout
    train/rewards_chosen      mean reward of the chosen answers, train/rewards_rejected that of the rejected ones
    train/reward_margin       mean margin
    train/reward_accuracy     share of pairs whose margin is above 0
    train/log_probs_chosen    mean log p of the chosen answers, train/log_probs_rejected that of the rejected ones
    train/preference_loss     with `sft_weight`: the loss of the pairs alone
    train/sft_loss            with `sft_weight`: the cross-entropy of the chosen answers, nats per token

References:
    Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290, equation 7. Mitchell, "A note on DPO with noisy
    preferences", 2023 (label smoothing). Pang et al., "Iterative Reasoning Preference Optimization", arXiv:2404.19733,
    equation 1 (the cross-entropy beside it). Lambert et al., "Tulu 3", arXiv:2411.15124, section 5 (means over tokens).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Bool, Float32
from torch import Tensor
from torch.nn.functional import logsigmoid

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


class DPO(Objective):
    """Direct preference optimisation on a corpus of pairs.

    The reference of a run with adapters is its base: the same model with its adapters switched off. Otherwise, and
    where `reference` names a checkpoint, a pass over all pairs computes the reference's log-probabilities before
    training, and the run keeps them.

    Args:
        beta: How strongly the policy is held to the reference, above 0.
        label_smoothing: The share of pairs whose preference is assumed to be wrong: 0 to less than 0.5.
        length_normalisation: Whether rewards are means over an answer's tokens instead of sums, so that long answers do
            not count more; beta is then larger, such as 5.
        sft_weight: Factor of the cross-entropy of the chosen answers beside the loss of the pairs; 0 for none.
        reference: The run or checkpoint whose weights are the reference. None for the base of the adapters; without
            adapters for the checkpoint that the run starts from.

    Attributes:
        log_probs: The reference's log-probabilities of all pairs; None where adapters are switched off instead.
        directory: Where a run keeps them; None to keep them in memory alone.

    Raises:
        UserError: A value is out of its range.
    """

    learns_from = "pairs"
    compares_forwards = True
    runs_model = True
    bounds_logits = True
    trains_under = frozenset({"tensor", "context", "pipeline"})
    initial_loss = math.log(2)
    memory_note = "the reference of preferences is a forward without adapters, or stored: no second model is in memory"

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        length_normalisation: bool = False,
        sft_weight: float = 0.0,
        reference: str | None = None,
    ) -> None:
        if not (beta > 0.0 and math.isfinite(beta)):
            raise UserError(f"beta is {beta:g}: it must be a number above 0, such as 0.1")
        if not 0.0 <= label_smoothing < 0.5:
            raise UserError(f"label_smoothing is {label_smoothing:g}: it must be at least 0 and below 0.5")
        if not (sft_weight >= 0.0 and math.isfinite(sft_weight)):
            raise UserError(f"sft_weight is {sft_weight:g}: it must be a number of at least 0")
        check_is_named(reference, "model.objective.reference")
        self.beta, self.label_smoothing = float(beta), float(label_smoothing)
        self.length_normalisation, self.sft_weight = length_normalisation, float(sft_weight)
        self.reference = reference
        self.log_probs: ReferenceLogProbs | None = None
        self.directory: Path | None = None

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
        self.log_probs = ReferenceLogProbs(score_pairs(Path(self.reference), self.directory, sum_answers))

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of pairs and of the chosen answers' tokens, beside those of tokens and bytes."""
        return {**super().count(window), **window.num_units}

    def prepare(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch with the reference's log-probabilities: stored ones, or those without adapters."""
        if self.log_probs is not None:
            found = self.log_probs.read(micro_batch.extra[PAIRS])
        else:
            with adapters_off(decoder):
                found = sum_answers(decoder, micro_batch, vocabulary)
        return replace(micro_batch, extra={**micro_batch.extra, REFERENCE: found})

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head with the sum over pairs and, with `sft_weight`, that over the chosen answers' tokens."""
        reference, is_present = micro_batch.extra[REFERENCE], micro_batch.extra[PAIRS] >= 0
        is_answer = _mask_answers(micro_batch)

        def sum_pairs(hidden: Tensor, weight: Tensor) -> HeadResult:
            losses = vocabulary.token_losses(hidden, weight, micro_batch.labels)
            log_probs = vocabulary.sum_over_rows(_sum_by_answer(-losses, is_answer))
            num_tokens = is_answer.sum(1).clamp_min(1) if self.length_normalisation else 1
            policy, given = (sums / num_tokens for sums in (log_probs, reference))
            terms, figures = self._compare(policy.view(-1, 2), given.view(-1, 2), is_present)
            if self.sft_weight:
                terms[CHOSEN_TOKENS] = -self.sft_weight * log_probs.view(-1, 2)[:, 0].sum()
            return HeadResult(terms, figures)

        return sum_pairs

    def _compare(
        self, policy: Float32[Tensor, "P 2"], reference: Float32[Tensor, "P 2"], is_present: Bool[Tensor, " P"]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the terms and the figures of pairs; a pair that is not present counts nowhere."""
        rewards = self.beta * (policy - reference)
        margins = rewards[:, 0] - rewards[:, 1]
        losses = -(1.0 - self.label_smoothing) * logsigmoid(margins) - self.label_smoothing * logsigmoid(-margins)
        values = (*rewards.unbind(1), margins, (margins > 0).float(), *policy.unbind(1))
        figures = {
            name: value.detach().masked_fill(~is_present, 0.0).sum()
            for name, value in zip(_FIGURES, values, strict=True)
        }
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


def sum_answers(decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Float32[Tensor, " 2P"]:
    """Returns the sum of the log-probabilities of each answer's tokens, without dropout and without a graph."""
    is_answer = _mask_answers(micro_batch)

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        losses = vocabulary.token_losses(hidden, weight, micro_batch.labels)
        return vocabulary.sum_over_rows(_sum_by_answer(-losses, is_answer))

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


def _mask_answers(micro_batch: MicroBatch) -> Bool[Tensor, "2P N"]:
    """Returns which tokens have a label of each answer."""
    labels, answers = micro_batch.labels.flatten(), micro_batch.extra[ANSWERS].flatten()
    numbers = torch.arange(2 * len(micro_batch.extra[PAIRS]), device=answers.device)
    return (answers == numbers[:, None]) & (labels != IGNORE_INDEX)


def _sum_by_answer(values: Float32[Tensor, " N"], is_answer: Bool[Tensor, "2P N"]) -> Float32[Tensor, " 2P"]:
    # A sum of masked rows has a fixed order on every device; adding by index on a GPU has not.
    return torch.where(is_answer, values, 0.0).sum(1)
