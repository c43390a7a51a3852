"""Distillation: a student learns a teacher's probabilities beside the labels.

logged                     unit and meaning
train/loss                 (1 - a) cross-entropy + a T^2 divergence, per valid token (`distillation_loss` defines it)
train/cross_entropy        nats per valid token; train/perplexity and train/bits_per_byte follow from it
train/teacher_divergence   nats per valid token: KL of the student from the teacher at temperature T
train/teacher_rest         the teacher's mean probability of all ids that are not among its top_k
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from genesis.base.errors import UserError, check_is_named
from genesis.data.corpus_data import CorpusData
from genesis.data.training_data import TrainingData
from genesis.data.window import MicroBatch
from genesis.model.language_model import LanguageModel
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import (
    TOKENS,
    FitContext,
    Head,
    HeadResult,
    Objective,
    ObjectiveSums,
    Prepared,
)
from genesis.objectives.teacher import (
    FoundTeacher,
    RunningTeacher,
    Teacher,
    TeacherDtype,
    find_classes,
    name_classes,
)
from genesis.objectives.teacher_cache import CacheIdentity, TeacherCache, open_cache
from genesis.objectives.vocabulary import Vocabulary

_LOWEST_TEMPERATURE: Final = 0.01
_TOP_K: Final = 64
_CROSS_ENTROPY, _DIVERGENCE, _REST = "cross_entropy", "teacher_divergence", "teacher_rest"


TEACHER: Final = "teacher"
TEACHER_CACHE: Final = "teacher_cache"
"""Entries of a checkpoint's identity: the hash of the teacher, and that of the cache."""
NO_CACHE: Final = "none"


class Distillation(Objective):
    """The cross-entropy of the labels and the divergence from a teacher: (1 - a) CE + a T^2 KL for each valid token.

    Probabilities are those at temperature T of the teacher's `top_k` most probable ids, and of all other ids together.
    The teacher runs before each forward of the student, on whole rows, replicated on each rank or, in a pipeline, on
    each that has the last stage; or its probabilities come from a cache that `genesis data distill` made. Validation
    computes the cross-entropy alone.

    Args:
        teacher: A run, a checkpoint or an export with the student's tokenizer; may be left out beside a cache.
        cache: The directory of a cache; None runs the teacher.
        top_k: Number of ids for each position whose probabilities the student learns one by one.
        temperature: T, from 0.01 to 100: higher ones give small probabilities more weight.
        teacher_share: a, the share of the divergence in the loss, from 0 to 1.
        teacher_dtype: The dtype in which the teacher runs; None for that of its weights.

    Attributes:
        loaded_teacher: The teacher; set it before a fit without a cache.
    """

    label_options = MappingProxyType[str, Any]({"teacher_share": 0.0})
    head_memory = "distributions"
    has_teacher = True
    trains_under = frozenset({"tensor", "context", "pipeline"})

    def __init__(
        self,
        teacher: str | None = None,
        cache: str | None = None,
        top_k: int = _TOP_K,
        temperature: float = 1.0,
        teacher_share: float = 0.5,
        teacher_dtype: TeacherDtype | None = None,
    ) -> None:
        for name, value in (("teacher", teacher), ("cache", cache)):
            check_is_named(value, f"model.objective.{name}")
        if teacher is None and cache is None:
            raise UserError(
                "model.objective has no teacher: give teacher, or the cache that `genesis data distill` made"
            )
        check_options(top_k, temperature)
        if not 0.0 <= teacher_share <= 1.0:
            raise UserError(f"teacher_share is {teacher_share}: it must be from 0 to 1")
        self.teacher, self.cache, self.teacher_dtype = teacher, cache, teacher_dtype
        self.top_k, self.temperature, self.teacher_share = top_k, float(temperature), teacher_share
        self.loaded_teacher: Teacher | None = None

    @classmethod
    def find_running_teacher(cls, options: Mapping[str, Any]) -> RunningTeacher | None:
        """Returns the teacher; None if its probabilities come from a cache."""
        if options.get("cache") is not None:
            return None
        return RunningTeacher(str(options.get("teacher")), options.get("teacher_dtype"), options.get("top_k", _TOP_K))

    def prepare_fit(self, fit: FitContext) -> Prepared:
        """Loads the teacher, or lets the windows of training have its probabilities from the cache."""
        if not fit.is_training:  # a validation computes the cross-entropy alone
            return Prepared()
        if fit.data.kind == "prompts":
            raise UserError(
                "model.objective is a distillation, but data.prompts has no text to learn: give data.corpus or "
                "data.stream"
            )
        found = None if self.teacher is None else find_fitting(fit, self.teacher)
        if found is not None:
            self.teacher = str(found.path)
        if self.cache is not None:
            cache = self._open_cache(Path(self.cache).resolve(), fit.data, found)
            identity = {TEACHER: cache.identity.teacher, TEACHER_CACHE: cache.hash}
        else:
            assert found is not None, "the objective has a teacher or a cache"
            self.loaded_teacher, _ = fit.load_teacher(
                found,
                tokenizer=fit.tokenizer if fit.data.identity["tokenizer_hash"] else None,
                vocab_size=fit.data.vocab_size,
                seq_len=fit.data.options.seq_len,
                top_k=self.top_k,
                temperature=self.temperature,
                dtype=self.teacher_dtype,
            )
            identity = {TEACHER: found.hash, TEACHER_CACHE: NO_CACHE}
        return Prepared(identity, {"teacher": self.teacher, "cache": self.cache})

    def _open_cache(self, path: Path, data: TrainingData, found: FoundTeacher | None) -> TeacherCache:
        if not isinstance(data, CorpusData):
            raise UserError(
                f"model.objective.init_args.cache is {self.cache}, but a stream has no fixed sequences that a cache "
                "could hold: leave it out and give the teacher, or train on a corpus"
            )
        cache = open_cache(path)
        cache.check(
            CacheIdentity(
                teacher=cache.identity.teacher if found is None else found.hash,
                teacher_dtype=self.teacher_dtype or cache.identity.teacher_dtype,
                vocab_size=data.vocab_size,
                top_k=self.top_k,
                temperature=self.temperature,
                log_probs=cache.identity.log_probs,
                sequences=data.identify_sequences(),
            )
        )
        self.cache, data.columns = str(path), cache
        return cache

    def prepare(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch with the teacher's classes; in validation, or where a cache gave them, unchanged."""
        if not decoder.training or find_classes(micro_batch) is not None:
            return micro_batch
        assert self.loaded_teacher is not None, "set before a fit without a cache"
        return replace(micro_batch, extra={**micro_batch.extra, **name_classes(self.loaded_teacher.read(micro_batch))})

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head of both losses; in validation, that of the cross-entropy."""
        classes = find_classes(micro_batch)
        if classes is None:
            return CrossEntropy().head(micro_batch, vocabulary)

        def sum_both(hidden: Tensor, weight: Tensor) -> HeadResult:
            sums = vocabulary.sum_distillation(
                *(hidden, weight, micro_batch.labels, classes),
                temperature=self.temperature,
                share=self.teacher_share,
            )
            figures = {_CROSS_ENTROPY: sums.cross_entropy, _DIVERGENCE: sums.divergence, _REST: sums.rest}
            return HeadResult({TOKENS: sums.loss}, figures)

        return sum_both

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss and its parts in nats per token, and the mean probability of the rest.

        Perplexity and bits per byte follow from the cross-entropy, as without a teacher.
        """
        if _CROSS_ENTROPY not in sums.figures:
            return CrossEntropy().measure(sums)
        num_tokens = sums.counts[TOKENS]
        of_labels = ObjectiveSums({TOKENS: sums.figures[_CROSS_ENTROPY]}, {}, sums.counts)
        return {
            **CrossEntropy().measure(of_labels),
            "loss": sums.terms[TOKENS] / num_tokens,
            **{name: sums.figures[name] / num_tokens for name in (_CROSS_ENTROPY, _DIVERGENCE, _REST)},
        }


def find_fitting(fit: FitContext, teacher: str) -> FoundTeacher:
    """Returns the teacher that a value names; of a run that continues, the one that its checkpoint records.

    Raises:
        UserError: There is no such teacher, or it has another tokenizer than the data.
    """
    found = fit.find_teacher(teacher, fit.recorded.get(TEACHER))
    tokenizer_hash = fit.data.identity["tokenizer_hash"]
    found.check_tokenizer(tokenizer_hash, fit.data.vocabulary_owner, fit.tokenizer if tokenizer_hash else None)
    return found


def check_options(top_k: int, temperature: float) -> None:
    """Checks the options that a recipe and `genesis data distill` have in common.

    Raises:
        UserError: One of them is out of its range.
    """
    if top_k < 1:
        raise UserError(f"top_k is {top_k}: it must be at least 1")
    if not _LOWEST_TEMPERATURE <= temperature <= 1 / _LOWEST_TEMPERATURE:  # beyond, float32 has no such probabilities
        raise UserError(
            f"temperature is {temperature}: it must be from {_LOWEST_TEMPERATURE} to {1 / _LOWEST_TEMPERATURE:g}"
        )
