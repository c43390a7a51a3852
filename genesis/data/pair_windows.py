"""The windows of a step on pairs of answers.

P  pairs of one micro-batch     S  tokens of a padded row (`seq_len`)     N  tokens of all answers of a micro-batch

A position of the order is a pair. A micro-batch holds 2P documents, chosen and rejected in turn, and attention never
crosses a document:

    joined    one row of N tokens without padding
    padded    2P rows of S tokens, for compiled blocks, which would compile again for each other shape

`MicroBatch.extra` then has `answers`, the number of each token's document in the micro-batch, and `pairs`, the number
of each pair among all pairs of the corpus, those of the validation set last; -1 where a validation set has none left.

The last token of an answer is a label alone, except for an objective that scores whole answers: `extra` then also has
`ends`, the place of each answer's last token in the flattened micro-batch (0 without an answer), and the values of the
pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray
from torch import Tensor

from genesis.data.loader import VALUES, Ranks, SequenceFormat
from genesis.data.order import SequenceOrder
from genesis.data.pairs import Answer, Pair, PairSet
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch

PAIRS: Final = "pairs"
"""The unit of pairs in `AccumulationWindow.num_units`, and the tensor of their numbers in `MicroBatch.extra`."""
CHOSEN_TOKENS: Final = "chosen_tokens"
"""The unit of valid labels in chosen answers."""
ANSWERS: Final = "answers"
"""The tensor of each token's answer in `MicroBatch.extra`."""
ENDS: Final = "ends"
"""The tensor of the place of each answer's last token in `MicroBatch.extra`."""
MISMATCHED: Final = "mismatched."
"""Begins the names of the tensors of mismatched answers in `MicroBatch.extra`."""


@dataclass(frozen=True)
class PairWindows:
    """One rank's windows of the training order. Deterministic and thread-safe; no communication.

    Args:
        order: Maps each position to a pair.
        pairs: The pairs; the sources of the training set are in the order's order.
        sequence_format: Padding, and the length of padded rows.
        global_batch_size: Pairs per step, over all ranks.
        micro_batch_size: Pairs per micro-batch.
        ranks: The number of this rank.
        is_padded: Whether each answer has a row of `seq_len` tokens.
    """

    order: SequenceOrder
    pairs: PairSet
    sequence_format: SequenceFormat
    global_batch_size: int
    micro_batch_size: int
    ranks: Ranks
    is_padded: bool

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`."""
        num_pairs = self.global_batch_size // self.ranks.world_size
        source_ids, pair_ids = self.order.sequences(position + self.ranks.rank * num_pairs, num_pairs)
        numbers = map(self.pairs.number_of, source_ids.tolist(), pair_ids.tolist())
        return build_pair_window(
            [self.pairs.read(number) for number in numbers],
            self.sequence_format,
            self.micro_batch_size,
            position + self.global_batch_size,
            is_padded=self.is_padded,
            is_valued=self.pairs.is_valued,
            has_ends=self.pairs.has_ends,
        )


@dataclass(frozen=True)
class SomePairWindows:
    """One rank's windows, of one micro-batch each, of consecutive pairs, each of which is in one window of one rank.

    The last windows may have fewer pairs or none, so that all ranks have the same number of windows. Deterministic and
    thread-safe; no communication.

    Args:
        pairs: The pairs.
        numbers: The numbers of the pairs to read, in their order.
        sequence_format: Padding, and the length of padded rows.
        micro_batch_size: Pairs per window.
        ranks: The number of this rank.
        is_padded: Whether each answer has a row of `seq_len` tokens.
    """

    pairs: PairSet
    numbers: Sequence[int]
    sequence_format: SequenceFormat
    micro_batch_size: int
    ranks: Ranks
    is_padded: bool

    @property
    def _num_per_window(self) -> int:
        return self.micro_batch_size * self.ranks.world_size

    def __len__(self) -> int:
        return -(-len(self.numbers) // self._num_per_window)

    def window(self, index: int) -> AccumulationWindow:
        """Returns this rank's window `index`."""
        begin = index * self._num_per_window
        first = begin + self.ranks.rank * self.micro_batch_size
        own = self.numbers[first : first + self.micro_batch_size]
        missing = [None] * (self.micro_batch_size - len(own))
        end = min(begin + self._num_per_window, len(self.numbers))
        read = [self.pairs.read(number) for number in own]
        return build_pair_window(
            [*read, *missing],
            self.sequence_format,
            self.micro_batch_size,
            end,
            is_padded=self.is_padded,
            is_valued=self.pairs.is_valued,
            has_ends=self.pairs.has_ends,
        )


def build_pair_window(
    pairs: Sequence[Pair | None],
    sequence_format: SequenceFormat,
    micro_batch_size: int,
    data_position: int,
    *,
    is_padded: bool,
    is_valued: bool = False,
    has_ends: bool = False,
) -> AccumulationWindow:
    """Returns the window of some pairs, in their order; None is a pair that a validation set lacks.

    With `is_valued` they are single answers: their mismatched answers are what `read_mismatched` returns. With
    `has_ends`, the last token of each answer is an input, too.
    """
    micro_batches = []
    num_valid_tokens, num_bytes, num_chosen = 0, 0, 0
    for first in range(0, len(pairs), micro_batch_size):
        run = pairs[first : first + micro_batch_size]
        sides = [(None, None) if pair is None else (pair.chosen, pair.rejected) for pair in run]
        own = [chosen for chosen, _ in sides] if is_valued else [answer for pair in sides for answer in pair]
        micro_batch = _build_micro_batch(own, sequence_format, is_padded=is_padded, has_ends=has_ends)
        labels, owners = micro_batch.labels.numpy(), micro_batch.extra[ANSWERS].numpy()
        is_valid = labels != IGNORE_INDEX
        num_valid_tokens += int(np.count_nonzero(is_valid))
        num_chosen += int(np.count_nonzero(is_valid & (owners % 2 == 0)))
        num_bytes += int(sequence_format.token_num_bytes[labels[is_valid]].sum(dtype=np.int64))
        extra = {**micro_batch.extra, PAIRS: torch.tensor([-1 if pair is None else pair.number for pair in run])}
        if has_ends:
            extra[ENDS] = _find_ends(own, sequence_format.seq_len if is_padded else None)
        if is_valued or has_ends:
            extra[VALUES] = torch.tensor([-1 if pair is None else pair.value for pair in run])
        if is_valued:
            other = [_cut(mismatched, sequence_format.seq_len) for _, mismatched in sides]
            tensors = _build_micro_batch(other, sequence_format, is_padded=is_padded).tensors
            extra |= {MISMATCHED + name: tensor for name, tensor in tensors.items()}
        micro_batches.append(replace(micro_batch, extra=extra))
    num_pairs = sum(pair is not None for pair in pairs)
    return AccumulationWindow(
        micro_batches=tuple(micro_batches),
        num_valid_tokens=num_valid_tokens,
        num_bytes=num_bytes,
        data_position=data_position,
        num_units={PAIRS: num_pairs} if is_valued else {PAIRS: num_pairs, CHOSEN_TOKENS: num_chosen},
    )


def read_mismatched(micro_batch: MicroBatch) -> MicroBatch:
    """Returns the mismatched answers of a micro-batch of single answers, in the same order."""
    tensors = {
        name.removeprefix(MISMATCHED): tensor
        for name, tensor in micro_batch.extra.items()
        if name.startswith(MISMATCHED)
    }
    return micro_batch.with_tensors(tensors | {f"extra.{PAIRS}": micro_batch.extra[PAIRS]})


def _cut(answer: Answer | None, seq_len: int) -> Answer | None:
    """Returns an answer without the tokens that its prompt leaves no place for."""
    return None if answer is None else Answer(answer.tokens[:seq_len], answer.has_label[:seq_len])


Arrays = tuple[ndarray, ndarray, ndarray, ndarray, ndarray]
"""Inputs, labels, documents, offsets of documents, and the answer of each token."""
Shifted = tuple[Int64[ndarray, " n"], Int64[ndarray, " n"]]
"""The inputs and the labels of an answer."""


def _find_ends(answers: Sequence[Answer | None], seq_len: int | None) -> Int64[Tensor, " A"]:
    """Returns the place of each answer's last token: in rows of `seq_len`, or one answer behind the other."""
    lengths = np.array([0 if answer is None else len(answer.tokens) for answer in answers], np.int64)
    ends = np.cumsum(lengths) if seq_len is None else np.arange(len(answers)) * seq_len + lengths
    return torch.from_numpy(np.where(lengths, ends - 1, 0))


def _build_micro_batch(
    answers: Sequence[Answer | None], sequence_format: SequenceFormat, *, is_padded: bool, has_ends: bool = False
) -> MicroBatch:
    shifted = [None if answer is None else _shift(answer, has_end=has_ends) for answer in answers]
    arrays = _pad_answers(shifted, sequence_format) if is_padded else _join_answers(shifted, sequence_format)
    inputs, labels, documents, offsets, owners = map(torch.from_numpy, arrays)
    return MicroBatch(inputs, labels, documents, offsets, {ANSWERS: owners})


def _join_answers(answers: Sequence[Shifted | None], sequence_format: SequenceFormat) -> Arrays:
    """Returns one row with all answers, or with one token of padding if there is none."""
    present = [(owner, *answer) for owner, answer in enumerate(answers) if answer is not None]
    if not present:
        empty = np.array([sequence_format.padding_id])
        present = [(0, empty, np.full(1, IGNORE_INDEX))]
    lengths = [len(inputs) for _, inputs, _ in present]
    return (
        np.concatenate([inputs for _, inputs, _ in present])[None],
        np.concatenate([labels for _, _, labels in present])[None],
        np.repeat(np.arange(len(present), dtype=np.int32), lengths)[None],
        np.cumsum([0, *lengths]).astype(np.int32),
        np.repeat(np.array([owner for owner, _, _ in present]), lengths)[None],
    )


def _pad_answers(answers: Sequence[Shifted | None], sequence_format: SequenceFormat) -> Arrays:
    """Returns a row for each answer; the padding after it is one more document of the row."""
    shape = len(answers), sequence_format.seq_len
    inputs, labels = np.full(shape, sequence_format.padding_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    documents, offsets = np.zeros(shape, np.int32), [0]
    for row, answer in enumerate(answers):
        start, length = row * shape[1], 0
        if answer is not None:
            own_inputs, own_labels = answer
            length = len(own_inputs)
            inputs[row, :length], labels[row, :length], documents[row, length:] = own_inputs, own_labels, 1
            offsets.append(start + length)
        if length < shape[1]:
            offsets.append(start + shape[1])
    owners = np.broadcast_to(np.arange(shape[0])[:, None], shape).copy()
    return inputs, labels, documents, np.array(offsets, np.int32), owners


def _shift(answer: Answer, *, has_end: bool) -> Shifted:
    """Returns the inputs and the labels of an answer; its last token is a label alone, or with `has_end` an input."""
    labels = np.where(answer.has_label[1:], answer.tokens[1:], IGNORE_INDEX)
    return (answer.tokens, np.append(labels, IGNORE_INDEX)) if has_end else (answer.tokens[:-1], labels)
