"""The protocol between the training step and what it minimises.

An objective turns the final hidden states of a micro-batch into *terms*, sums over one kind of *unit* each: tokens, or
pairs. The step divides the gradient of a term by the number of its units in the whole window, over all ranks and
micro-batches, so that an objective never divides by a number of its own micro-batch. What an objective also wants in
the log, it returns as *figures*.

What it needs before the first step it gets at three moments: `resolve` completes the recipe, before anything is built;
`prepare_fit` has the data and may load other models; `start` has the weights. The class answers what a plan, the doctor
and the supervisor ask about a recipe, of which nothing is built.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Float64
from numpy import ndarray
from torch import Tensor

from genesis.base.errors import UserError, numbered
from genesis.data.training_data import DataKind, TrainingData
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model.language_model import LanguageModel
from genesis.objectives.teacher import FoundTeacher, RunningTeacher, Teacher
from genesis.objectives.vocabulary import Vocabulary
from genesis.recipe.resolved import ResolvedRecipe

TOKENS: Final = "tokens"
"""The unit of valid labels, which every objective counts."""
BYTES: Final = "bytes"
"""The bytes of text behind the valid labels, which every objective counts; no term is divided by them."""


class HeadResult(NamedTuple):
    """The sums of one forward.

    Args:
        terms: By unit, the float32 sum whose gradient is divided by the window's number of this unit. The first one is
            the main term. Every forward of an objective returns the same units, also where a sum is empty.
        figures: Further sums for the log by name, without a graph.
    """

    terms: dict[str, Tensor]
    figures: dict[str, Tensor]


Number = TypeVar("Number", int, float)
SumOverRanks = Callable[[Sequence[float]], Sequence[float]]

Head = Callable[[Tensor, Tensor], HeadResult]
"""A function of the final hidden states and the output weight."""


@dataclass(frozen=True)
class ObjectiveSums:
    """Sums over windows, over all ranks.

    Args:
        terms: By unit, as in `HeadResult`.
        figures: By name, as in `HeadResult`.
        counts: Number of each unit, as `Objective.count` names them.
    """

    terms: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "ObjectiveSums") -> "ObjectiveSums":
        return ObjectiveSums(
            _add(self.terms, other.terms), _add(self.figures, other.figures), _add(self.counts, other.counts)
        )


def _add(one: Mapping[str, Number], other: Mapping[str, Number]) -> dict[str, Number]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@dataclass(frozen=True)
class RecipeContext:
    """What an objective may use to complete a recipe.

    Args:
        find_continued: Returns the checkpoint that `ckpt_path` names; None for a new run.
        run_dir: The directory in which the run saves.
        find_recorded: Finds the checkpoint that a value names; of a run that was trained further, the one with the
            hash that a checkpoint recorded.
    """

    find_continued: Callable[[], Path | None]
    run_dir: Path
    find_recorded: Callable[[str, str | None], Path]


@dataclass(frozen=True)
class FitContext:
    """What an objective may use of a run before its first step. All ranks have the same.

    Args:
        data: The training data, not yet open.
        tokenizer: Where the files of the data's tokenizer lie; None without one.
        has_adapters: Whether the run trains adapters on a frozen base.
        is_training: Whether it trains; False for a validation alone.
        recorded: The identity in the checkpoint that the run continues from; empty for a new run.
        directory: Where the run keeps what an objective computes before training.
        find_teacher: `genesis.generate.teacher.find_teacher`.
        load_teacher: `genesis.generate.teacher.load_teacher`.
        note: Notes that a part of a phase's work is done, as `genesis_callbacks.phases.note_progress` does.
    """

    data: TrainingData
    tokenizer: Path | None
    has_adapters: bool
    is_training: bool
    recorded: Mapping[str, Any]
    directory: Path
    find_teacher: Callable[[str, str | None], FoundTeacher]
    load_teacher: Callable[..., tuple[Teacher, str]]
    note: Callable[[], None] = lambda: None


class Prepared(NamedTuple):
    """What an objective has prepared.

    Args:
        identity: Entries of the checkpoints' identity, by which a resume with another teacher, say, is refused.
        options: Options of the objective that are complete now, as the run's recipe keeps them.
    """

    identity: Mapping[str, str] = {}
    options: Mapping[str, Any] = {}


ScorePairs = Callable[[Path, Path | None, Callable[[LanguageModel, MicroBatch, Vocabulary], Tensor]], Tensor]
"""Returns the scores that a checkpoint gives to the two answers of each pair, from a directory if they are there."""


class Objective(ABC):
    """What training minimises. An instance is shared by training and validation, and keeps no state between windows.

    Attributes:
        learns_from: The kind of data: sequences of text, pairs of answers or single answers with values
            (`genesis.data.pairs`), or prompts, to which the model writes answers in training.
        needs_values: Whether it needs the value of each document, in `MicroBatch.extra` (`genesis.data.loader.VALUES`):
            the corpus was then prepared of sources with `value_field`.
        least_micro_batch: The least number of sequences, or of pairs, from which it learns in a micro-batch.
        compares_forwards: Whether it compares the probabilities of a token in two forwards, so that both must compute a
            token alike beside any other tokens. `genesis fit` then trains without dropout (`model.keeps_dropout`).
        needs_token_log_probs: Of prompts: whether it needs the log-probability of each token by the weights that wrote
            the answer, beside their sum.
        needs_old_log_probs: Of prompts: whether it needs the log-probability of an answer by those weights.
        learns_rewards: Of prompts: whether it learns rewards, and needs some; else they are logged alone.
        masks_cut_answers: Of prompts: whether it does not learn answers that the longest length has cut.
        reports_loss: Whether its loss shows how well training goes, so that telemetry watches it.
        label_options: The options under which it minimises the cross-entropy of its labels alone; None without such.
        scores_texts: Whether it trains a model that scores texts (`DecoderConfig.num_scores`), and not one that writes
            them; of pairs, it then gets the last token of each answer, too (`genesis.data.pair_windows.ENDS`).
        initial_loss: The loss for each unit of the first term while model and reference are equal; None without a
            reference.
        head_memory: What its head keeps, for a plan: `fused` makes the gradient of a cross-entropy in the forward,
            `tokens` keeps losses of tokens (`genesis.model.loss.token_losses`), `distributions` whole distributions,
            `reverse_kl` makes the gradient of one by the teacher's hidden states, `scores` one number for each text.
        memory_note: A line for a plan about a reference that is no second model; empty without one.
        has_teacher: Whether it may run another model beside the trained one.
        runs_model: Whether `prepare` runs the trained model: in a pipeline all ranks then call it before a window, else
            the rank with the last stage alone before each forward.
        bounds_logits: Whether it trains a model that bounds its logits: by `Vocabulary.sum_cross_entropy` and
            `Vocabulary.token_losses` alone.
        trains_under: The kinds of parallelism beside those of data and experts under which it trains. `tensor`: its
            losses are those of a `Vocabulary`. `context`: its terms are sums over tokens, of which a rank has some.
            `pipeline`: it runs the trained model as `runs_model` says, and by heads that return one tensor.
    """

    learns_from: ClassVar[DataKind] = "text"
    needs_values: ClassVar[bool] = False
    least_micro_batch: ClassVar[int] = 1
    compares_forwards: ClassVar[bool] = False
    needs_token_log_probs: bool = False
    needs_old_log_probs: bool = True
    learns_rewards: bool = True
    masks_cut_answers: bool = False
    reports_loss: ClassVar[bool] = True
    label_options: ClassVar[Mapping[str, Any] | None] = None
    initial_loss: float | None = None
    scores_texts: ClassVar[bool] = False
    head_memory: ClassVar[Literal["fused", "tokens", "distributions", "reverse_kl", "scores"]] = "tokens"
    memory_note: ClassVar[str] = ""
    has_teacher: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False
    bounds_logits: ClassVar[bool] = False
    trains_under: ClassVar[frozenset[Literal["tensor", "context", "pipeline"]]] = frozenset()

    # ---- before a fit

    @classmethod
    def check_micro_batch(cls, size: int) -> None:
        """Refuses micro-batches of too few sequences.

        Raises:
            UserError: `size` is below `least_micro_batch`.
        """
        if size < cls.least_micro_batch:
            what = numbered(cls.least_micro_batch, cls.name_rows())
            raise UserError(
                f"data.micro_batch_size is {size}, and {cls.__name__} learns from at least {what}: raise it"
            )

    @classmethod
    def name_rows(cls) -> str:
        """Returns the plural of what a batch has: sequences, pairs, or answers."""
        return cls.learns_from if cls.learns_from in ("pairs", "answers") else "sequences"

    @classmethod
    def find_running_teacher(cls, options: Mapping[str, Any]) -> RunningTeacher | None:
        """Returns the other model that a run keeps in memory, by the options in a recipe; None if none runs."""
        return None

    @classmethod
    def scores_without_adapters(cls, options: Mapping[str, Any]) -> bool:
        """Returns whether each micro-batch also has a forward without adapters, by the options in a recipe."""
        return False

    @classmethod
    def resolve(cls, recipe: ResolvedRecipe, start: RecipeContext) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Returns entries of the checkpoints' identity, and values of options that follow. Nothing is built yet.

        Args:
            recipe: The recipe, with the base of its adapters.
            start: What the run continues with.

        Raises:
            UserError: Something that the objective needs is not there, or not what the run continues with.
        """
        return {}, {}

    def prepare_fit(self, fit: FitContext) -> Prepared:
        """Checks what the objective needs, and loads it. Called once, before the model is built.

        Raises:
            UserError: Something is missing, or does not fit the data.
        """
        return Prepared()

    def start(self, *, has_adapters: bool, score_pairs: ScorePairs) -> None:  # noqa: B027  # most need nothing
        """Computes what needs the weights. All ranks call it together before a fit and before each validation.

        Args:
            has_adapters: Whether the model has adapters, whose base may be a reference.
            score_pairs: Scores the pairs of the corpus by the weights of a checkpoint.
        """

    # ---- a window

    def compare_rewards(self, rewards: Float64[ndarray, "P G"]) -> Float64[ndarray, "P G"]:
        """Returns the advantages of the answers to the prompts of a global batch; by default their rewards. Pure."""
        return rewards

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of each unit in this rank's window, with `TOKENS` and `BYTES` among them."""
        return {TOKENS: window.num_valid_tokens, BYTES: window.num_bytes}

    def prepare_window(
        self,
        decoder: LanguageModel,
        micro_batches: Sequence[MicroBatch],
        vocabulary: Vocabulary,
        sum_over_ranks: SumOverRanks,
    ) -> Sequence[MicroBatch]:
        """Returns a window's micro-batches with what follows from all of them, over all ranks, in `MicroBatch.extra`.

        Called before a window is trained, under `torch.no_grad`, on all ranks alike: it may run further forwards. A
        validation has no such call: there each micro-batch is its own window.

        Args:
            decoder: The model.
            micro_batches: This rank's.
            vocabulary: The strategy's.
            sum_over_ranks: Returns the sums of numbers over the ranks that have different micro-batches.
        """
        return micro_batches

    def prepare(self, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch with what the head needs beside the labels, in `MicroBatch.extra`.

        Called before each forward, under `torch.no_grad`, on all ranks alike: it may run further forwards.
        """
        return micro_batch

    @abstractmethod
    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head of one forward.

        Args:
            micro_batch: The result of `prepare`.
            vocabulary: The strategy's, which computes whatever needs the output weight.
        """

    @abstractmethod
    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the values of a log line by name; `loss` among them. `sums.counts` has at least one valid token."""


@torch.no_grad()
def prepare(
    objective: Objective, decoder: LanguageModel, micro_batch: MicroBatch, vocabulary: Vocabulary
) -> MicroBatch:
    """Returns the micro-batch as the objective's head needs it. Nothing that `Objective.prepare` does has a graph."""
    return objective.prepare(decoder, micro_batch, vocabulary)
