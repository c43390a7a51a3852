"""Pairs of answers in a corpus, and single answers with a value, such as whether they are good.

The documents 2i and 2i + 1 of a source of pairs are the chosen and the rejected answer of its pair i, each after the
same prompt; both lie in one shard. A single answer is read together with a mismatched one: its prompt, and the answer
of the next document of its source that has another prompt. So what is mismatched follows from the corpus alone,
whatever the order, the batch and the number of ranks.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import ClassVar, Final, NamedTuple

import numpy as np
from blake3 import blake3
from jaxtyping import Bool, Int64
from numpy import ndarray

from genesis.base.errors import UserError, numbered
from genesis.data.corpus import TokenSource

_REMEDY: Final = "fetch the corpus again or prepare it again with --restart"


class Answer(NamedTuple):
    """An answer after its prompt.

    Args:
        tokens: All tokens of the document.
        has_label: Whether each token is learned; those of the prompt are not.
    """

    tokens: Int64[ndarray, " tokens"]
    has_label: Bool[ndarray, " tokens"]


class Pair(NamedTuple):
    """A pair and its number among all pairs of the corpus.

    Args:
        number: The number.
        chosen: The chosen answer; of a single answer, that itself.
        rejected: The rejected answer; of a single answer, the mismatched one.
        value: The value of a single answer, or the margin of a pair: 0 where the corpus has none.
    """

    number: int
    chosen: Answer
    rejected: Answer
    value: int = 0


class AnswerSource(ABC):
    """The pairs, or the single answers, of one source. Deterministic and thread-safe; no communication.

    Args:
        source: The documents.

    Raises:
        UserError: The documents cannot be what the class reads.
    """

    documents_each: ClassVar[int]

    def __init__(self, source: TokenSource) -> None:
        self.name = source.name
        self._source = source
        self._ends = np.concatenate([np.zeros(1, np.int64), *source.document_ends()])
        self.num_sequences, rest = divmod(len(self._ends) - 1, self.documents_each)
        if rest:
            raise UserError(
                f"source {source.name} has {numbered(len(self._ends) - 1, 'documents')}, which are no pairs of a "
                f"chosen and a rejected answer; {_REMEDY}"
            )

    @property
    def tokens_per_sequence(self) -> Fraction:
        """Returns the mean number of tokens of a pair, or of an answer."""
        return Fraction(self._source.num_tokens, max(1, self.num_sequences))

    @property
    def hash(self) -> str:
        """Returns a hash of where the answers lie."""
        return blake3(self._ends.astype("<i8").tobytes()).hexdigest()

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest answer with its prompt."""
        return int(np.diff(self._ends).max(initial=0))

    def num_tokens(self, numbers: Int64[ndarray, " count"]) -> int:
        """Returns the number of tokens of these pairs or answers."""
        firsts = self.documents_each * numbers
        return int((self._ends[firsts + self.documents_each] - self._ends[firsts]).sum())

    @abstractmethod
    def read(self, number: int) -> tuple[Answer, Answer, int]:
        """Returns the chosen answer, the rejected one, and the value, as a `Pair` has them.

        Raises:
            UserError: The documents cannot be used.
        """

    def _read_document(self, number: int) -> tuple[Answer, int]:
        """Returns an answer and its value: its largest label less 1, as `mark_labels` writes it."""
        start, end = self._ends[number : number + 2].tolist()
        tokens, labels = np.empty(end - start, np.int64), np.empty(end - start, np.uint8)
        self._source.read(start, tokens)
        self._source.read_labels(start, labels)
        labels[:1] = 0  # nothing comes before the first token
        return Answer(tokens, labels > 0), int(labels.max(initial=0)) - 1


class PairedSource(AnswerSource):
    """Pairs: two documents each."""

    documents_each = 2

    def read(self, number: int) -> tuple[Answer, Answer, int]:
        """Returns the chosen and the rejected answer of a pair.

        Raises:
            UserError: The documents are not two answers to one prompt.
        """
        (chosen, margin), (rejected, _) = (self._read_document(2 * number + side) for side in (0, 1))
        fault = find_pair_fault(chosen, rejected)
        if fault is not None:
            raise UserError(f"pair {number:,} of source {self.name} {fault}; {_REMEDY}")
        return chosen, rejected, margin


class ValuedSource(AnswerSource):
    """Single answers with a value: one document each."""

    documents_each = 1

    def read(self, number: int) -> tuple[Answer, Answer, int]:
        """Returns an answer, its prompt with the answer to the next other prompt, and its value.

        Raises:
            UserError: A document has no token to learn, or all have one prompt.
        """
        answer, value = self._read_document(number)
        first = self._find_first(answer, number)
        prompt = answer.tokens[:first]
        for distance in range(1, self.num_sequences):
            other_number = (number + distance) % self.num_sequences
            other, _ = self._read_document(other_number)
            begin = self._find_first(other, other_number)
            if not np.array_equal(other.tokens[:begin], prompt):
                parts = zip((answer.tokens[:first], answer.has_label[:first]), other, strict=True)
                return answer, Answer(*(np.concatenate([one, two[begin:]]) for one, two in parts)), value
        raise UserError(
            f"source {self.name!r} has answers to one prompt alone, and an answer is compared with those to other "
            "prompts: add some to its training and its validation set"
        )

    def _find_first(self, answer: Answer, number: int) -> int:
        """Returns the place of the first token of an answer behind its prompt."""
        if not answer.has_label.any():
            raise UserError(
                f"document {number:,} of source {self.name!r} has no token to learn: prepare the corpus with "
                "chat.on_long drop"
            )
        return int(answer.has_label.argmax())


def find_pair_fault(chosen: Answer, rejected: Answer) -> str | None:
    """Returns what is wrong with the documents of a pair; None if they are two answers to one prompt."""
    firsts = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        labels = np.flatnonzero(answer.has_label)
        if not len(labels):
            return f"has no token to learn in its {name} answer"
        firsts.append(int(labels[0]))
    if not np.array_equal(chosen.tokens[: firsts[0]], rejected.tokens[: firsts[1]]):
        return "has two prompts: the tokens before the two answers differ"
    if np.array_equal(chosen.tokens, rejected.tokens):
        return "has the same tokens twice"
    return None


class PairSet:
    """All pairs of a corpus, numbered through its sources: those of the training set, then those of the validation set.

    Single answers are numbered alike. Deterministic and thread-safe; no communication.

    Args:
        train: The sources of the training set.
        validation: The sources of the validation set.
        corpus_hash: The identity of the tokens.
        is_valued: Whether the sources have single answers.
        has_ends: Whether windows have the last token of each answer as an input.
    """

    def __init__(
        self,
        train: Sequence[AnswerSource],
        validation: Sequence[AnswerSource],
        corpus_hash: str = "",
        *,
        is_valued: bool = False,
        has_ends: bool = False,
    ) -> None:
        self.corpus_hash, self.is_valued, self.has_ends = corpus_hash, is_valued, has_ends
        self.train, self.validation = tuple(train), tuple(validation)
        self._sources = (*self.train, *self.validation)
        self._starts = [0, *accumulate(source.num_sequences for source in self._sources)]
        self.num_pairs = self._starts[-1]
        self.first_of_validation = self._starts[len(self.train)]

    def __len__(self) -> int:
        return self.num_pairs

    def read(self, number: int) -> Pair:
        """Returns the pair of a number.

        Raises:
            UserError: Its documents are damaged.
        """
        source = bisect_right(self._starts, number) - 1
        return Pair(number, *self._sources[source].read(number - self._starts[source]))

    def number_of(self, source: int, pair: int) -> int:
        """Returns the number of a pair of a source of the training set."""
        return self._starts[source] + pair

    def check_lengths(self, seq_len: int) -> None:
        """Refuses answers that are longer than a sequence.

        Raises:
            UserError: An answer with its prompt is longer than `seq_len`.
        """
        for source in self._sources:
            if source.longest > seq_len:
                raise UserError(
                    f"source {source.name!r} has an answer of {numbered(source.longest, 'tokens')} with its prompt, "
                    f"and data.seq_len is {seq_len:,}: raise it to {source.longest}, or prepare the corpus with "
                    f"chat.max_tokens {seq_len} and chat.on_long cut or drop"
                )
            if source.num_sequences:
                source.read(0)  # whether it can be compared with others does not wait for the first validation


def spread_validation(pairs: PairSet, limit: int | None) -> list[int]:
    """Returns the numbers of the validation pairs to use, evenly spread if there is a limit."""
    num_in_set = len(pairs) - pairs.first_of_validation
    count = num_in_set if limit is None else min(limit, num_in_set)
    return [pairs.first_of_validation + index * num_in_set // count for index in range(count)]


def find_source_fault(source: TokenSource) -> str | None:
    """Returns a line about the first document of a source that is not in a pair; None if all are."""
    try:
        paired = PairedSource(source)
        for _ in _read_all(paired):
            pass
    except UserError as error:
        return str(error)
    return None


def _read_all(source: PairedSource) -> Iterator[tuple[Answer, Answer, int]]:
    return (source.read(pair) for pair in range(source.num_sequences))
