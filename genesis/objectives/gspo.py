"""GSPO: a policy gradient whose importance ratios and clipping are those of whole sequences.

For an answer y of |y| tokens to a prompt x, with the advantage A of the answer within the answers to x:

    s = exp((log p(y|x) - log p_old(y|x)) / |y|)            p_old: the weights that wrote the answer
    loss = mean over answers of -min(s A, clip(s, 1 - low, 1 + high) A) + kl * KL
    KL   = mean over the answer's tokens of r - log r - 1, with r = p_reference(token) / p(token)

    logged               unit and meaning
    train/loss           the mean above, which is near 0 and says little: watch the reward
    train/reward         mean reward of the answers
    train/reward_spread  mean standard deviation of the rewards of the answers to one prompt
    train/no_signal      share of answers to prompts whose answers all got the same reward, so that none is learned
    train/clipped        share of answers whose ratio the clip has stopped, so that they are not learned further
    train/ratio          mean ratio s
    train/answer_tokens  mean number of tokens of an answer
    train/finished       share of answers that ended before the longest length
    train/entropy        nats per token, estimated as -log p of the sampled tokens
    train/kl             mean KL to the reference, in nats per token, if `kl` is above 0

A validation has one greedy answer to each held-out prompt, and logs validation/reward, validation/finished and
validation/answer_tokens.

References:
    Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 to 7. Shao et al., DeepSeekMath,
    arXiv:2402.03300, equation 4 (the estimate of the KL).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from numpy import ndarray
from torch import Tensor

from genesis.base.errors import UserError
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
    ScorePairs,
)
from genesis.objectives.vocabulary import Vocabulary

ANSWERS: Final = "answers"
"""The unit of the loss."""
ADVANTAGE, OLD_LOG_PROB, REWARD = "advantage", "old_log_prob", "reward"
SPREAD, IS_FINISHED, TEMPERATURE = "spread", "is_finished", "temperature"
REFERENCE: Final = "reference_log_prob"
VALIDATION_FIGURES: Final = ("reward", "finished", "answer_tokens")
"""What a validation logs: means over greedy answers to the held-out prompts."""
_TINY_SPREAD: Final = 1e-4
"""Added to a group's standard deviation, so that rewards that differ by rounding make no large advantages."""


class GSPO(Objective):
    """Group sequence policy optimization, on answers that the model has written during training (`data.prompts`).

    Args:
        clip_low: How far the ratio of a sequence may fall below 1 before an answer worse than its group is no longer
            pushed down.
        clip_high: How far the ratio may rise above 1 before a better answer is no longer pushed up.
        kl: Factor of the KL to the reference, which is the model without its adapters; 0 for none.

    Raises:
        UserError: A value is out of its range.
    """

    learns_from = "prompts"
    compares_forwards = True
    runs_model = True
    reports_loss = False
    trains_under = frozenset({"tensor", "context", "pipeline"})
    memory_note = "the reference of GSPO's KL is a forward without adapters: no second model is in memory"

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, kl: float = 0.0) -> None:
        if not 0.0 < clip_low < 1.0:
            raise UserError(f"model.objective.clip_low is {clip_low}; it must be above 0 and below 1")
        if not 0.0 < clip_high < float("inf"):
            raise UserError(f"model.objective.clip_high is {clip_high}; it must be a number above 0")
        if not 0.0 <= kl < float("inf"):
            raise UserError(f"model.objective.kl is {kl}; it must be a number of at least 0")
        self.clip_low, self.clip_high, self.kl = clip_low, clip_high, kl

    @classmethod
    def scores_without_adapters(cls, options: Mapping[str, Any]) -> bool:
        """Returns whether there is a KL, whose reference is the model without adapters."""
        return bool(options.get("kl"))

    def prepare_fit(self, fit: FitContext) -> Prepared:
        """Refuses a KL without a reference, before the model is built."""
        self._check_reference(has_adapters=fit.has_adapters)
        return Prepared()

    def start(self, *, has_adapters: bool, score_pairs: ScorePairs) -> None:
        """Refuses a KL without a reference."""
        self._check_reference(has_adapters=has_adapters)

    def _check_reference(self, *, has_adapters: bool) -> None:
        if self.kl and not has_adapters:
            raise UserError(
                f"model.objective.kl is {self.kl}, but the model has no adapters, and without them the weights that "
                "training starts from are not kept as a reference; set kl to 0, or train adapters by model.adapter"
            )

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of answers, valid tokens and bytes in this rank's window."""
        num_answers = sum(len(m.input_ids) for m in window.micro_batches)
        return {ANSWERS: num_answers, **super().count(window), **window.num_units}

    def prepare(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch with the reference's log-probabilities of the tokens, if there is a KL."""
        if not self.kl:
            return micro_batch
        # With dropout, the reference of a token would be another one each time, and the KL above 0 at the first step.
        was_training = decoder.training
        decoder.eval()
        try:
            with adapters_off(decoder):
                found = decoder(
                    micro_batch.input_ids,
                    document_ids=micro_batch.document_ids,
                    document_offsets=micro_batch.document_offsets,
                    head=partial(
                        score_tokens,
                        labels=micro_batch.labels,
                        temperature=micro_batch.extra[TEMPERATURE],
                        vocabulary=vocabulary,
                    ),
                )
        finally:
            decoder.train(was_training)
        return replace(micro_batch, extra={**micro_batch.extra, REFERENCE: found})

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head that sums the clipped loss of the answers."""
        labels, extra = micro_batch.labels, micro_batch.extra

        def compute(hidden: Tensor, weight: Tensor) -> HeadResult:
            of_tokens = score_tokens(hidden, weight, labels, extra[TEMPERATURE], vocabulary)
            log_probs = vocabulary.sum_over_rows(of_tokens.sum(1))
            losses, ratios, is_clipped = gspo_losses(
                log_probs, extra[OLD_LOG_PROB], count_labels(labels), extra[ADVANTAGE], self.clip_low, self.clip_high
            )
            figures = {
                "reward": extra[REWARD],
                "reward_spread": extra[SPREAD],
                "no_signal": extra[SPREAD] == 0,
                "clipped": is_clipped,
                "ratio": ratios,
                "finished": extra[IS_FINISHED],
                "negative_log_prob": -log_probs,
                "num_tokens": count_labels(labels),
            }
            if self.kl:
                kl = vocabulary.sum_over_rows(estimate_kl(of_tokens, extra[REFERENCE], count_labels(labels)))
                losses, figures["kl"] = losses + self.kl * kl, kl
            sums = {name: values.detach().float().sum() for name, values in figures.items()}
            return HeadResult({ANSWERS: losses.sum()}, sums)

        return compute

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss and the figures of the answers; see the module's docstring. A validation has no loss."""
        num_answers, figures = sums.counts[ANSWERS], sums.figures
        if not sums.terms:
            return {name: figures[name] / num_answers for name in VALIDATION_FIGURES}
        names = ("reward", "reward_spread", "no_signal", "clipped", "ratio", "finished", *(["kl"] if self.kl else []))
        return {
            "loss": sums.terms[ANSWERS] / num_answers,
            **{name: figures[name] / num_answers for name in names},
            "answer_tokens": figures["num_tokens"] / num_answers,
            "entropy": figures["negative_log_prob"] / figures["num_tokens"],
        }


def count_labels(labels: Int64[Tensor, "B S"]) -> Int64[Tensor, " B"]:
    """Returns the number of tokens of each answer."""
    return (labels != IGNORE_INDEX).sum(1)


def score_tokens(
    hidden: Float[Tensor, "B S D"],
    weight: Float[Tensor, "V D"],
    labels: Int64[Tensor, "B S"],
    temperature: Float32[Tensor, "1"],
    vocabulary: Vocabulary,
) -> Float32[Tensor, "B S"]:
    """Returns log p of the labels under the distribution that the temperature gives, and 0 where there is no label.

    Args:
        hidden: The final hidden states.
        weight: The output weight.
        labels: The tokens to score; others are `IGNORE_INDEX`.
        temperature: The divisor of the logits.
        vocabulary: The strategy's.
    """
    return -vocabulary.token_losses(hidden / temperature.to(hidden.dtype), weight, labels).view(labels.shape)


def estimate_kl(
    log_probs: Float32[Tensor, "B S"], reference: Float32[Tensor, "B S"], lengths: Int64[Tensor, " B"]
) -> Float32[Tensor, " B"]:
    """Returns the mean over each answer's tokens of an estimate of the KL that is never below 0. Pure.

    Args:
        log_probs: Log-probabilities of the tokens; 0 where there is no label.
        reference: The same by the reference.
        lengths: The number of tokens of each answer.
    """
    log_ratios = reference - log_probs
    return (log_ratios.exp() - log_ratios - 1).sum(1) / lengths.clamp(min=1)


def gspo_losses(
    log_probs: Float32[Tensor, " B"],
    old_log_probs: Float32[Tensor, " B"],
    lengths: Int64[Tensor, " B"],
    advantages: Float32[Tensor, " B"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float32[Tensor, " B"], Float32[Tensor, " B"], Tensor]:
    """Returns the loss of each answer, its ratio, and whether the clip has stopped it. Pure.

    Args:
        log_probs: The sum of the log-probabilities of each answer's tokens.
        old_log_probs: The same by the weights that wrote the answers.
        lengths: The number of tokens of each answer.
        advantages: The advantage of each answer.
        clip_low: How far below 1 the ratio counts.
        clip_high: How far above 1 the ratio counts.
    """
    ratios = torch.exp((log_probs - old_log_probs) / lengths.clamp(min=1))
    free, held = ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, held), ratios, held < free


def compare_rewards(rewards: Float64[ndarray, " G"]) -> tuple[Float64[ndarray, " G"], float]:
    """Returns the advantage of each answer within its group, and the standard deviation of the group's rewards.

    A group with equal rewards has the advantages 0: there is nothing to prefer.
    """
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards), 0.0
    spread = float(rewards.std(ddof=1))
    return (rewards - rewards.mean()) / (spread + _TINY_SPREAD), spread
