"""Policy gradients on the model's own answers: one family of losses, whose members differ in four choices.

For an answer y of |y| tokens to a prompt x, with the reward R of the answer among the G answers to x:

    advantage A      group_std      (R - mean(group)) / std(group)
                     group_mean     R - mean(group)
                     leave_one_out  R - mean(the other answers of the group)
                     batch_std      (R - mean(batch)) / std(batch), over the global batch
    ratio r          token          p(token) / p_old(token), for each token; p_old: the weights that wrote the answer
                     sequence       (p(y|x) / p_old(y|x))^(1 / |y|), for each answer
                     product        p(y|x) / p_old(y|x), for each answer, which is one action
    loss l           ppo            -min(r A, clip(r, 1 - low, 1 + high) A)
                     cispo          -stop_gradient(clip(r, 1 - low, 1 + high)) A log p(token)
                     none           -r A
    normalisation    sequence       mean over the answers of the mean over the answer's tokens
                     token          mean over all tokens of the answers
                     constant       sum over all tokens / (number of answers * longest answer)

A ratio of an answer is that of each of its tokens; the loss of a `product` is that of the answer. Means are those of
the global batch, over all ranks and micro-batches. The loss of a token has a further addend, kl * (q - log q - 1) with
q = p_reference(token) / p(token), an estimate of the KL to the reference; that of a `product` has the mean of them.

    logged                   unit and meaning
    train/loss               the mean above, which is near 0 and says little: watch the reward
    train/reward             mean reward of the answers
    train/reward_spread      mean standard deviation of the rewards of the answers to one prompt
    train/no_signal          share of answers to prompts whose answers all got the same reward
    train/reward_NAME        mean of one of several rewards, before its weight; also reward_NAME_spread and _no_signal
    train/clipped            share of answers, or of their tokens, whose ratio the clip has stopped
    train/ratio              mean ratio r
    train/first_ratio_error  mean |r - 1| in the first steps of rollouts: 0 unless something differs that should not
    train/answer_tokens      mean number of tokens of an answer
    train/finished           share of answers that ended before the longest length; the others are cut
    train/masked             share of answers that are not learned because they are cut, with `cut_answers: mask`
    train/asked              mean number of prompts that were answered for a trained one, with `max_resamples`
    train/turns              mean number of the model's turns, with an environment
    train/calls              mean number of calls of tools; train/unread_calls: of calls that cannot be read
    train/entropy            nats per token, estimated as -log p of the sampled tokens
    train/server_error       mean |log p - log p_server| of tokens, where a server has written the answers
    train/server_ratio       mean p / p_server of the tokens, or of the answers where the ratio is theirs
    train/truncated          share of these ratios above `max_ratio`, which bounds the factor of the loss
    train/lag                mean number of updates by which the weights that wrote the answers are behind the step
    train/kl                 mean KL to the reference, in nats per token, if `kl` is above 0

A validation has one greedy answer to each held-out prompt, and logs validation/reward, validation/reward_NAME,
validation/finished and validation/answer_tokens.

References:
    Shao et al., DeepSeekMath, arXiv:2402.03300, equations 3 and 4 (GRPO, and the estimate of the KL). Liu et al.,
    Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2 (Dr. GRPO). Yu et al., DAPO, arXiv:2503.14476,
    equations 8 to 13. MiniMax, MiniMax-M1, arXiv:2506.13585, equations 4 and 5 (CISPO). Zheng et al., Group Sequence
    Policy Optimization, arXiv:2507.18071, equations 5 to 7 (GSPO). Ahmadian et al., Back to Basics, arXiv:2402.14740,
    section 2.2 (RLOO). Hu et al., REINFORCE++, arXiv:2501.03262 (advantages normalised over the global batch).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, get_args

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
    TOKENS,
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
"""The unit of losses that are means over answers."""
LEARNED_ANSWERS, LEARNED_TOKENS = "learned_answers", "learned_tokens"
"""The units where cut answers are masked: those of the other answers."""
ADVANTAGE, OLD_LOG_PROB, REWARD = "advantage", "old_log_prob", "reward"
SPREAD, IS_FINISHED, TEMPERATURE = "spread", "is_finished", "temperature"
SERVER_LOG_PROB, MAX_RATIO, LAG = "server_log_prob", "max_ratio", "lag"
"""What a server that wrote the answers gives for their tokens, the bound of the correction, and the weights' age."""
OLD_TOKEN_LOG_PROB, LONGEST, IS_FIRST, NUM_ASKED = "old_token_log_prob", "longest", "is_first", "num_asked"
REWARD_OF, SPREAD_OF = "reward_of.", "spread_of."
"""What the names of single rewards begin with."""
COUNT_OF: Final = "count_of."
"""What the names of counts of episodes begin with, whose means are logged."""
_MORE_ASKED: Final = "more_asked"
REFERENCE: Final = "reference_log_prob"
VALIDATION_FIGURES: Final = ("reward", "finished", "answer_tokens")
"""What a validation logs: means over greedy answers to the held-out prompts."""
_TINY_SPREAD: Final = 1e-4
"""Added to a standard deviation, so that rewards that differ by rounding make no large advantages."""
_MAX_LOG_RATIO: Final = 80.0
"""Beyond it the exponential is infinite in float32, and its gradient no number where the clip gives none."""
_OF_SERVERS: Final = ("server_error", "server_ratio", "truncated", "lag")
_NO_SIGNAL_OF: Final = "no_signal_of."

AdvantageForm = Literal["group_std", "group_mean", "leave_one_out", "batch_std"]
Ratio = Literal["token", "sequence", "product"]
Clip = Literal["ppo", "cispo", "none"]
Normalisation = Literal["sequence", "token", "constant"]
CutAnswers = Literal["learn", "mask"]


@dataclass(frozen=True)
class PolicyOptions:
    """The choices of a policy gradient; see the module's docstring.

    Args:
        advantage: How rewards become advantages.
        ratio: The ratio of probabilities: of tokens, sequences, or the product over an answer.
        clip: What the clip of the ratio does.
        clip_low: How far below 1 a ratio counts; 1 for no bound.
        clip_high: How far above 1 a ratio counts.
        normalisation: What the loss is divided by.

    Raises:
        UserError: A value is out of its range, or two choices do not fit.
    """

    advantage: AdvantageForm = "group_std"
    ratio: Ratio = "token"
    clip: Clip = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalisation: Normalisation = "sequence"

    def __post_init__(self) -> None:
        forms = {"advantage": AdvantageForm, "ratio": Ratio, "clip": Clip, "normalisation": Normalisation}
        for name, form in forms.items():
            if getattr(self, name) not in get_args(form):
                raise UserError(
                    f"model.objective.{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(form))}"
                )
        if not 0.0 < self.clip_low <= 1.0 or (self.clip_low == 1.0 and self.clip != "cispo"):
            most = "at most" if self.clip == "cispo" else "below"
            raise UserError(f"model.objective.clip_low is {self.clip_low}; it must be above 0 and {most} 1")
        if not 0.0 < self.clip_high < float("inf"):
            raise UserError(f"model.objective.clip_high is {self.clip_high}; it must be a number above 0")
        if self.ratio == "product" and (self.normalisation != "sequence" or self.clip == "cispo"):
            raise UserError(
                f"model.objective.ratio is product, by which an answer has one loss, and normalisation is "
                f"{self.normalisation} with clip {self.clip}; set normalisation: sequence and clip: ppo or none"
            )


class PolicyGradient(Objective):
    """What objectives on answers share, which the model has written during training (`data.prompts`).

    Args:
        options: The choices of the loss.
        kl: Factor of the KL to the reference, which is the model without its adapters; 0 for none.
        cut_answers: Whether answers that the longest length has cut are learned, or masked: without a loss, and not
            counted where the loss is normalised.

    Raises:
        UserError: A value is out of its range.
    """

    learns_from = "prompts"
    compares_forwards = True
    runs_model = True
    reports_loss = False
    trains_under = frozenset({"tensor", "context", "pipeline"})
    memory_note = "the reference of the KL is a forward without adapters: no second model is in memory"

    @abstractmethod
    def __init__(self, options: PolicyOptions, kl: float = 0.0, cut_answers: CutAnswers = "learn") -> None:
        if not 0.0 <= kl < float("inf"):
            raise UserError(f"model.objective.kl is {kl}; it must be a number of at least 0")
        self.options, self.kl = options, kl
        self.masks_cut_answers = cut_answers == "mask"
        self.needs_token_log_probs = options.ratio == "token"
        over_tokens = options.normalisation == "token"
        if self.masks_cut_answers:
            self._unit = LEARNED_TOKENS if over_tokens else LEARNED_ANSWERS
        else:
            self._unit = TOKENS if over_tokens else ANSWERS

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

    def compare_rewards(self, rewards: Float64[ndarray, "P G"]) -> Float64[ndarray, "P G"]:
        """Returns the advantages of the answers of a global batch."""
        return compare_rewards(rewards, self.options.advantage)

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
        """Returns the head that sums the losses of the answers."""
        labels, extra = micro_batch.labels, micro_batch.extra

        def compute(hidden: Tensor, weight: Tensor) -> HeadResult:
            lengths = count_labels(labels)
            of_tokens = score_tokens(hidden, weight, labels, extra[TEMPERATURE], vocabulary)
            correction: Tensor | float = 1.0
            mismatch: dict[str, Tensor] = {LAG: extra[LAG]} if LAG in extra else {}
            if SERVER_LOG_PROB in extra:
                correction, differences = correct_server(
                    *(extra[OLD_TOKEN_LOG_PROB], extra[SERVER_LOG_PROB], labels), self.options.ratio, extra[MAX_RATIO]
                )
                mismatch |= differences
            if self.options.ratio == "token":
                whole = vocabulary.sum_over_rows(of_tokens.flatten()).view_as(of_tokens)
                log_probs, old = whole.sum(1), extra.get(OLD_TOKEN_LOG_PROB, whole.detach())
                losses, ratios, is_clipped = lose_tokens(
                    whole, old, labels != IGNORE_INDEX, extra[ADVANTAGE], self.options
                )
                errors = _mean_over_tokens((ratios - 1).abs(), labels)
                ratios, is_clipped = _mean_over_tokens(ratios, labels), _mean_over_tokens(is_clipped, labels)
                losses = (losses * correction).sum(1) / lengths.clamp(min=1)
            else:
                log_probs = vocabulary.sum_over_rows(of_tokens.sum(1))
                old = extra.get(OLD_LOG_PROB, log_probs.detach())
                losses, ratios, is_clipped = lose_answers(log_probs, old, lengths, extra[ADVANTAGE], self.options)
                losses, errors = losses * correction, (ratios - 1).abs()
            figures = {
                **mismatch,
                "reward": extra[REWARD],
                "reward_spread": extra[SPREAD],
                "no_signal": extra[SPREAD] == 0,
                "clipped": is_clipped,
                "ratio": ratios,
                "finished": extra[IS_FINISHED],
                "negative_log_prob": -log_probs,
                "num_tokens": lengths,
                "first_ratio_error": errors * extra[IS_FIRST],
                "num_first": extra[IS_FIRST],
            }
            figures |= list_counts(extra)
            for name in (name.removeprefix(REWARD_OF) for name in extra if name.startswith(REWARD_OF)):
                spread = extra[SPREAD_OF + name]
                figures |= {
                    REWARD_OF + name: extra[REWARD_OF + name],
                    SPREAD_OF + name: spread,
                    f"{_NO_SIGNAL_OF}{name}": spread == 0,
                }
            if self.kl:
                kl = vocabulary.sum_over_rows(estimate_kl(of_tokens, extra[REFERENCE], lengths))
                losses, figures["kl"] = losses + self.kl * kl, kl
            if self.options.normalisation != "sequence":  # the sum over the answer's tokens, instead of their mean
                losses = losses * lengths
            if self.options.normalisation == "constant":
                losses = losses / extra[LONGEST]
            if self.masks_cut_answers:
                losses = losses * extra[IS_FINISHED]
            sums = {name: values.detach().float().sum() for name, values in figures.items()}
            return HeadResult({self._unit: losses.sum()}, sums)

        return compute

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss and the figures of the answers; see the module's docstring. A validation has no loss."""
        num_answers, figures = sums.counts[ANSWERS], sums.figures
        single = {
            f"reward_{name.removeprefix(start)}{end}": value / num_answers
            for start, end in ((REWARD_OF, ""), (SPREAD_OF, "_spread"), (_NO_SIGNAL_OF, "_no_signal"))
            for name, value in figures.items()
            if name.startswith(start)
        }
        if not sums.terms:
            known = (name for name in VALIDATION_FIGURES if name in figures)
            return {name: figures[name] / num_answers for name in known} | single
        names = ["reward", "reward_spread", "no_signal", "clipped", "ratio", "finished"]
        names += ["kl"] * bool(self.kl) + [name for name in _OF_SERVERS if name in figures]
        measured = {
            "loss": sums.terms[self._unit] / max(sums.counts[self._unit], 1),
            **{name: figures[name] / num_answers for name in names},
            **single,
            **measure_counts(figures, num_answers),
            "answer_tokens": figures["num_tokens"] / num_answers,
            "entropy": figures["negative_log_prob"] / figures["num_tokens"],
        }
        if self.masks_cut_answers:
            measured["masked"] = 1 - sums.counts[LEARNED_ANSWERS] / num_answers
        if figures.get("num_first"):
            measured["first_ratio_error"] = figures["first_ratio_error"] / figures["num_first"]
        return measured


def _mean_over_tokens(values: Tensor, labels: Int64[Tensor, "B S"]) -> Float32[Tensor, " B"]:
    """Returns the mean over each answer's tokens."""
    return values.masked_fill(labels == IGNORE_INDEX, 0).sum(1) / count_labels(labels).clamp(min=1)


def list_counts(extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what is counted for each answer of a micro-batch, by names that `measure_counts` knows."""
    counts = {name: values for name, values in extra.items() if name.startswith(COUNT_OF)}
    return counts | ({_MORE_ASKED: extra[NUM_ASKED] - 1} if NUM_ASKED in extra else {})


def measure_counts(figures: Mapping[str, float], num_answers: float) -> dict[str, float]:
    """Returns the means of the counts among the sums over all answers, by the names in the log."""
    means = {n.removeprefix(COUNT_OF): sum_ / num_answers for n, sum_ in figures.items() if n.startswith(COUNT_OF)}
    return means | ({"asked": 1 + figures[_MORE_ASKED] / num_answers} if _MORE_ASKED in figures else {})


def choose(preset: PolicyOptions, **given: Any) -> PolicyOptions:
    """Returns a preset with the choices that are given; None leaves the preset's."""
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


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


def lose_answers(
    log_probs: Float32[Tensor, " B"],
    old_log_probs: Float32[Tensor, " B"],
    lengths: Int64[Tensor, " B"],
    advantages: Float32[Tensor, " B"],
    options: PolicyOptions,
) -> tuple[Float32[Tensor, " B"], Float32[Tensor, " B"], Tensor]:
    """Returns the loss of each answer by one ratio, this ratio, and whether the clip has stopped it. Pure.

    The loss is the mean over the answer's tokens; of a product, that of the answer.

    Args:
        log_probs: The sum of the log-probabilities of each answer's tokens.
        old_log_probs: The same by the weights that wrote the answers.
        lengths: The number of tokens of each answer.
        advantages: The advantage of each answer.
        options: The choices of the loss.
    """
    lengths = lengths.clamp(min=1)
    log_ratios = log_probs - old_log_probs
    ratios = torch.exp((log_ratios if options.ratio == "product" else log_ratios / lengths).clamp(max=_MAX_LOG_RATIO))
    losses, is_clipped = clip_losses(ratios, log_probs / lengths, advantages, options)
    return losses, ratios, is_clipped


def lose_tokens(
    log_probs: Float32[Tensor, "B S"],
    old_log_probs: Float32[Tensor, "B S"],
    is_label: Tensor,
    advantages: Float32[Tensor, " B"],
    options: PolicyOptions,
) -> tuple[Float32[Tensor, "B S"], Float32[Tensor, "B S"], Tensor]:
    """Returns the loss of each token, its ratio, and whether the clip has stopped it; 0 where there is no label. Pure.

    Args:
        log_probs: The log-probability of each token.
        old_log_probs: The same by the weights that wrote the answers.
        is_label: Which tokens are those of answers.
        advantages: The advantage of each answer.
        options: The choices of the loss.
    """
    ratios = torch.exp((log_probs - old_log_probs).masked_fill(~is_label, 0.0).clamp(max=_MAX_LOG_RATIO))
    losses, is_clipped = clip_losses(ratios, log_probs, advantages.unsqueeze(1), options)
    return losses.masked_fill(~is_label, 0.0), ratios, is_clipped


def clip_losses(
    ratios: Float32[Tensor, "*N"],
    log_probs: Float32[Tensor, "*N"],
    advantages: Float32[Tensor, "*N"],
    options: PolicyOptions,
) -> tuple[Float32[Tensor, "*N"], Tensor]:
    """Returns the losses by the ratios, and where the clip has stopped one. Pure.

    Args:
        ratios: The ratios.
        log_probs: The log-probabilities, by which `cispo` learns.
        advantages: The advantages.
        options: The choices of the loss.
    """
    free, clipped = ratios * advantages, ratios.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.clip == "none":
        return -free, torch.zeros_like(free, dtype=torch.bool)
    if options.clip == "cispo":
        return -clipped.detach() * advantages * log_probs, clipped != ratios
    held = clipped * advantages
    return -torch.minimum(free, held), held < free


def correct_server(
    log_probs: Float32[Tensor, "B S"],
    server: Float32[Tensor, "B S"],
    labels: Int64[Tensor, "B S"],
    ratio: Ratio,
    most: Float32[Tensor, "1"],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the factors of the losses of a server's tokens or answers, and how far it differs from the trainer. Pure.

    A factor is the ratio of the trainer's probability to the server's, up to a bound (truncated importance sampling).

    Args:
        log_probs: The log-probability of each token by the trainer, before the first step on the answers.
        server: The same by the server that wrote it.
        labels: The tokens; others are `IGNORE_INDEX`.
        ratio: Of what the ratios are.
        most: The bound.

    References:
        Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025.
    """
    of_tokens = (log_probs - server).masked_fill(labels == IGNORE_INDEX, 0.0)
    log_ratios = of_tokens if ratio == "token" else of_tokens.sum(1)
    if ratio == "sequence":
        log_ratios = log_ratios / count_labels(labels).clamp(min=1)
    ratios = log_ratios.clamp(max=_MAX_LOG_RATIO).exp()
    values = {"server_ratio": ratios, "truncated": ratios > most}
    if ratio == "token":
        values = {name: _mean_over_tokens(one, labels) for name, one in values.items()}
    return ratios.minimum(most), {"server_error": _mean_over_tokens(of_tokens.abs(), labels), **values}


def compare_rewards(rewards: Float64[ndarray, "P G"], form: AdvantageForm) -> Float64[ndarray, "P G"]:
    """Returns the advantages of the answers of a global batch. Pure.

    Rewards that are all equal, in a group or with `batch_std` in the batch, have the advantages 0: there is nothing to
    prefer.

    Args:
        rewards: The rewards of the answers to each prompt.
        form: How they are compared.
    """
    if form == "batch_std":
        return _standardise(rewards)
    if form == "group_std":
        return np.stack([_standardise(group) for group in rewards])
    advantages: Float64[ndarray, "P G"] = rewards - rewards.mean(1, keepdims=True)
    advantages[np.ptp(rewards, axis=1) == 0] = 0.0  # where the mean is rounded
    if form == "leave_one_out":  # R - mean(others) = (R - mean(all)) * G / (G - 1)
        advantages *= rewards.shape[1] / (rewards.shape[1] - 1)
    return advantages


def _standardise(rewards: Float64[ndarray, "*N"]) -> Float64[ndarray, "*N"]:
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    advantages: Float64[ndarray, "*N"] = (rewards - rewards.mean()) / (measure_spread(rewards) + _TINY_SPREAD)
    return advantages


def measure_spread(rewards: Float64[ndarray, " G"]) -> float:
    """Returns the standard deviation of rewards; exactly 0 if they are equal."""
    return 0.0 if np.ptp(rewards) == 0 else float(rewards.std(ddof=1))
