"""On-policy distillation: the student writes answers to prompts, and learns its teacher's probabilities of them.

For a token y of an answer by the student, with the probabilities q of the student and p of the teacher after the tokens
before it, at the temperature of `data.prompts`:

    exact    sum_v q(v) (log q(v) - log p(v)), the reverse KL over the whole vocabulary
    sampled  r A with A = stop_gradient(log q(y) - log p(y)) and r = q(y) / q_old(y); q_old: the weights that wrote y

    loss = teacher_weight * mean over all tokens of the answers [+ the loss of the rewards, by a preset of GRPO]

Both have the same gradient in expectation over y, up to the tokens before y, which are the student's own and are not
differentiated. The exact form needs the teacher here, and has less noise; the sampled one needs the probability of one
token, which a server gives. The tokens of the prompt count in neither. Means are those of the global batch, over all
ranks and micro-batches. Rewards are learned only with `rewards`; else they are logged.

    logged               unit and meaning
    train/loss           the mean above, in nats per token without rewards
    train/reverse_kl     nats per token: KL(student || teacher), in the sampled form its estimate r A
    train/entropy        nats per token: the student's, in the sampled form estimated as -log q of the sampled tokens
    train/answer_tokens  mean number of tokens of an answer
    train/finished       share of answers that ended before the longest length
    train/turns          mean number of turns, with train/calls and train/unread_calls, in an environment
    train/asked          mean number of prompts that were answered for a trained one, with `max_resamples`
    train/reward         mean reward of the answers, and train/reward_NAME of several, if there are rewards

With `rewards` all of `genesis.objectives.policy_gradient` is logged, too. A validation logs what is logged there; the
teacher does not run in it.

References:
    Agarwal et al., "On-Policy Distillation of Language Models", arXiv:2306.13649, section 3 (lambda 1, reverse KL).
    Gu et al., "MiniLLM", arXiv:2306.08543, section 2.2 (the part of a single step). Lu and Thinking Machines Lab,
    "On-Policy Distillation", 2025 (the sampled form, as an advantage). Qwen Team, arXiv:2505.09388, section 4.5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from genesis.base.errors import UserError, check_is_named, numbered
from genesis.data.window import MicroBatch
from genesis.model.language_model import LanguageModel
from genesis.objectives.distillation import TEACHER, find_fitting
from genesis.objectives.grpo import GRPO, Preset
from genesis.objectives.objective import (
    TOKENS,
    FitContext,
    Head,
    HeadResult,
    ObjectiveSums,
    Prepared,
    SumOverRanks,
)
from genesis.objectives.policy_gradient import (
    ANSWERS,
    IS_FINISHED,
    OLD_TOKEN_LOG_PROB,
    REWARD,
    REWARD_OF,
    TEMPERATURE,
    count_labels,
    list_counts,
    measure_counts,
    score_tokens,
)
from genesis.objectives.reverse_kl import sum_reverse_kl
from genesis.objectives.teacher import RunningTeacher, Teacher, TeacherDtype
from genesis.objectives.teacher_server import TeacherServer
from genesis.objectives.vocabulary import WHOLE, Vocabulary

HIDDEN: Final = "teacher_hidden"
TEACHER_LOG_PROB: Final = "teacher_log_prob"
_REVERSE_KL, _ENTROPY, _TOKENS, _FINISHED = "reverse_kl", "token_entropy", "num_tokens", "finished"

Divergence = Literal["exact", "sampled"]


class OnPolicyDistillation(GRPO):
    """The reverse KL of the student from a teacher, on answers that the student writes (`data.prompts`).

    The teacher runs before each forward of the student, whole on each rank, or behind a server.

    Args:
        teacher: A run, a checkpoint or an export with the student's tokenizer.
        url: The address of an OpenAI-compatible server instead, such as http://127.0.0.1:8000/v1, which gives the
            log-probabilities of a prompt's tokens (`echo` of `/v1/completions`). Its key is in the environment variable
            GENESIS_TEACHER_KEY.
        model: The teacher's name at the server.
        divergence: exact, or sampled; None for exact with `teacher`, and sampled with `url`.
        teacher_dtype: The dtype in which the teacher runs; None for that of its weights.
        rewards: The preset of GRPO by which rewards are learned beside the teacher; None to log them alone.
        teacher_weight: The factor of the divergence in the loss, above 0.
        request_seconds: How long the server may take for a request.
        num_requests: Requests of one rank at a time.

    Attributes:
        loaded_teacher: The teacher; set it before a fit without `url`.

    Raises:
        UserError: A value is out of its range, or two of them do not fit.
    """

    has_teacher = True
    runs_model = False
    head_memory = "reverse_kl"
    memory_note = ""
    trains_under = frozenset()

    def __init__(
        self,
        teacher: str | None = None,
        url: str | None = None,
        model: str | None = None,
        divergence: Divergence | None = None,
        teacher_dtype: TeacherDtype | None = None,
        rewards: Preset | None = None,
        teacher_weight: float = 1.0,
        request_seconds: float = 120.0,
        num_requests: int = 8,
    ) -> None:
        for name, value in (("teacher", teacher), ("url", url), ("model", model)):
            check_is_named(value, f"model.objective.{name}")
        if (teacher is None) == (url is None):
            number = "neither" if teacher is None else "both"
            raise UserError(f"{number} of model.objective.teacher and model.objective.url is given; give one of them")
        if (url is None) != (model is None):
            raise UserError(
                f"model.objective.url is {url} and model is {model}; a server needs the teacher's name, one of those "
                "that GET /v1/models lists, and a teacher that is loaded here has none"
            )
        if url is not None and (divergence == "exact" or teacher_dtype is not None):
            what = "divergence is exact" if divergence == "exact" else f"teacher_dtype is {teacher_dtype}"
            raise UserError(
                f"model.objective.{what}, but a server gives the probabilities of the sampled tokens alone, in its own "
                "dtype; leave it out, or give teacher"
            )
        if not 0.0 < teacher_weight < float("inf"):
            raise UserError(f"model.objective.teacher_weight is {teacher_weight}; it must be a number above 0")
        super().__init__(rewards or "grpo")
        self.learns_rewards = rewards is not None
        self.is_exact = (divergence or ("exact" if url is None else "sampled")) == "exact"
        self.needs_old_log_probs = self.learns_rewards or not self.is_exact
        self.needs_token_log_probs = not self.is_exact or (self.learns_rewards and self.needs_token_log_probs)
        self.teacher, self.teacher_dtype, self.teacher_weight = teacher, teacher_dtype, float(teacher_weight)
        self.loaded_teacher: Teacher | None = None
        self._server = (
            None if url is None or model is None else TeacherServer(url, model, request_seconds, num_requests)
        )

    @classmethod
    def find_running_teacher(cls, options: Mapping[str, Any]) -> RunningTeacher | None:
        """Returns the teacher; None if a server has it."""
        if options.get("url") is not None:
            return None
        return RunningTeacher(str(options.get("teacher")), options.get("teacher_dtype"), 1)

    def prepare_fit(self, fit: FitContext) -> Prepared:
        """Loads the teacher, or compares the server's tokens with the student's."""
        if not fit.is_training:
            return Prepared()
        if self._server is not None:
            if fit.data.kind == "prompts":
                assert fit.tokenizer is not None, "prompts have a tokenizer"
                self._server.check(fit.tokenizer, fit.data.options.seq_len)
            self._server.note = fit.note  # not for the check, which comes before the Trainer
            return Prepared({TEACHER: f"{self._server.model} at a server"})
        assert self.teacher is not None, "the objective has a teacher or a server"
        found = find_fitting(fit, self.teacher)
        self.teacher = str(found.path)
        self.loaded_teacher, _ = fit.load_teacher(
            found,
            tokenizer=fit.tokenizer,
            vocab_size=fit.data.vocab_size,
            seq_len=fit.data.options.seq_len,
            top_k=1,
            temperature=1.0,
            dtype=self.teacher_dtype,
        )
        return Prepared({TEACHER: found.hash}, {"teacher": self.teacher})

    def prepare_window(
        self,
        decoder: LanguageModel,
        micro_batches: Sequence[MicroBatch],
        vocabulary: Vocabulary,
        sum_over_ranks: SumOverRanks,
    ) -> Sequence[MicroBatch]:
        """Returns the micro-batches with the server's log-probabilities of the answers."""
        if self._server is None:
            return micro_batches
        found = self._server.score(micro_batches, sum_over_ranks)
        return [
            replace(one, extra={**one.extra, TEACHER_LOG_PROB: log_probs})
            for one, log_probs in zip(micro_batches, found, strict=True)
        ]

    def prepare(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch with what the teacher that is loaded here gives."""
        if self._server is not None:
            return micro_batch
        teacher = self.loaded_teacher
        assert teacher is not None, "set before a fit without a server"
        num_rows = len(decoder.output_weight)
        if teacher.num_rows < num_rows:
            raise UserError(
                f"the teacher has {numbered(teacher.num_rows, 'rows')} in its vocabulary, fewer than the student's "
                f"{num_rows:,}, which may write all of its own: give a teacher with at least as many"
            )
        if self.is_exact:
            found = {HIDDEN: teacher.run(micro_batch, lambda hidden, _: hidden)}
        else:
            score = partial(
                score_tokens,
                labels=micro_batch.labels,
                temperature=micro_batch.extra[TEMPERATURE],
                vocabulary=WHOLE,
            )
            found = {
                TEACHER_LOG_PROB: teacher.run(micro_batch, lambda hidden, weight: score(hidden, weight[:num_rows]))
            }
        return replace(micro_batch, extra={**micro_batch.extra, **found})

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head that sums the divergence over the answers' tokens, and the losses of rewards."""
        labels, extra = micro_batch.labels, micro_batch.extra
        of_rewards = super().head(micro_batch, vocabulary) if self.learns_rewards else None

        def compute(hidden: Tensor, weight: Tensor) -> HeadResult:
            if self.is_exact:
                assert self.loaded_teacher is not None, "set before a fit without a server"
                divergence, entropy = sum_reverse_kl(
                    *(hidden, weight, labels, extra[HIDDEN]),
                    self.loaded_teacher.output_weight[: len(weight)],
                    extra[TEMPERATURE],
                )
            else:
                log_probs = score_tokens(hidden, weight, labels, extra[TEMPERATURE], vocabulary)
                old = extra.get(OLD_TOKEN_LOG_PROB, log_probs.detach())
                losses = lose_sampled(log_probs, old, extra[TEACHER_LOG_PROB])
                divergence, entropy = losses.sum(), -log_probs.detach().sum()
            terms = {TOKENS: self.teacher_weight * divergence}
            figures = {
                _REVERSE_KL: divergence.detach(),
                _ENTROPY: entropy,
                _TOKENS: count_labels(labels).sum().float(),
                _FINISHED: extra[IS_FINISHED].sum(),
            }
            names = [name for name in extra if name == REWARD or name.startswith(REWARD_OF)]
            figures |= {name: extra[name].sum() for name in names}
            figures |= {name: counts.sum() for name, counts in list_counts(extra).items()}
            if of_rewards is not None:
                more = of_rewards(hidden, weight)
                terms = {**terms, **{unit: terms.get(unit, 0.0) + term for unit, term in more.terms.items()}}
                figures = {**more.figures, **figures}
            return HeadResult(terms, figures)

        return compute

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss and the figures of the answers; see the module's docstring. A validation has no loss."""
        if not sums.terms:
            return super().measure(sums)
        figures, num_answers = sums.figures, sums.counts[ANSWERS]
        measured = super().measure(sums) if self.learns_rewards else measure_counts(figures, num_answers)
        if REWARD in figures:
            measured[REWARD] = figures[REWARD] / num_answers
        for name in (name for name in figures if name.startswith(REWARD_OF)):
            measured[f"reward_{name.removeprefix(REWARD_OF)}"] = figures[name] / num_answers
        return {
            **measured,
            "loss": sum(term / max(sums.counts[unit], 1) for unit, term in sums.terms.items()),
            "reverse_kl": figures[_REVERSE_KL] / figures[_TOKENS],
            "entropy": figures[_ENTROPY] / figures[_TOKENS],
            "answer_tokens": figures[_TOKENS] / num_answers,
            "finished": figures[_FINISHED] / num_answers,
        }


def lose_sampled(log_probs: Tensor, old_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """Returns r A of each token, by the log-probabilities of the tokens; 0 where all of them are 0. Pure.

    Args:
        log_probs: Those of the student.
        old_log_probs: Those of the weights that wrote the answers.
        teacher_log_probs: Those of the teacher.
    """
    return torch.exp(log_probs - old_log_probs) * (log_probs - teacher_log_probs).detach()
