"""KTO: learns from single answers to prompts, each of which is marked as good or bad.

N  tokens of a micro-batch     D  its documents, padding included

    r       log p(answer) - log p_reference(answer), a sum over the tokens of an answer
    z       the mean of r over answers to other prompts of the micro-batch, at least 0, without a gradient
    loss    w_good (1 - sigmoid(beta (r - z))) of a good answer, w_bad (1 - sigmoid(beta (z - r))) of a bad one

The reference is the base of the adapters: the same model with its adapters switched off.

References:
    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, section 4.1.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.loader import DOCUMENTS, VALUES
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.adapter import adapters_off
from genesis.model.decoder import Decoder
from genesis.objectives.objective import (
    FitContext,
    Head,
    HeadResult,
    Objective,
    ObjectiveSums,
    Prepared,
)
from genesis.objectives.vocabulary import Vocabulary

_REFERENCE, _BASELINE = "reference_log_probs", "baseline"


class KTO(Objective):
    """Kahneman-Tversky optimisation. The value of a conversation says whether its answer is good: 0 is bad.

    Args:
        beta: How strongly the policy is held to the reference.
        good_weight: Weight of good answers.
        bad_weight: Weight of bad answers.
    """

    needs_values = True
    least_micro_batch = 2  # the baseline is the mean over answers to other prompts
    compares_forwards = True
    memory_note = "the reference of KTO is a forward without adapters: no second model is in memory"

    def __init__(self, beta: float = 0.1, good_weight: float = 1.0, bad_weight: float = 1.0) -> None:
        if not beta > 0:
            raise UserError(f"beta is {beta:g}: it must be a number above 0, such as 0.1")
        self.beta, self.good_weight, self.bad_weight = beta, good_weight, bad_weight

    def prepare_fit(self, fit: FitContext) -> Prepared:
        """Refuses a run without a reference."""
        if not fit.has_adapters:
            raise UserError("KTO compares with the base of adapters, and the run has none: give model.adapter")
        return Prepared()

    def count(self, window: AccumulationWindow) -> dict[str, int]:
        """Returns the number of answers, beside those of tokens and bytes."""
        return {**super().count(window), DOCUMENTS: window.num_units.get(DOCUMENTS, 0)}

    def prepare(self, decoder: Decoder, micro_batch: MicroBatch, vocabulary: Vocabulary) -> MicroBatch:
        """Returns the micro-batch with the reference's log-probabilities and the baseline z."""
        mismatched = _mismatch(micro_batch)
        policy = _score(decoder, mismatched, vocabulary)
        with adapters_off(decoder):
            reference, base = (_score(decoder, one, vocabulary) for one in (mismatched, micro_batch))
        is_answer = _Documents.of(mismatched).is_answer
        baseline = torch.where(is_answer, policy - reference, 0.0).sum() / is_answer.sum().clamp_min(1)
        extra = {_REFERENCE: base, _BASELINE: baseline.clamp_min(0.0)}
        return replace(micro_batch, extra={**micro_batch.extra, **extra})

    def head(self, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Head:
        """Returns the head that sums the loss of the answers."""
        documents, extra = _Documents.of(micro_batch), micro_batch.extra
        is_answer, is_good = documents.is_answer, documents.first_of(extra[VALUES]) > 0

        def compute(hidden: Tensor, weight: Tensor) -> HeadResult:
            rewards = documents.sum(-vocabulary.token_losses(hidden, weight, micro_batch.labels)) - extra[_REFERENCE]
            margins = torch.where(is_good, rewards - extra[_BASELINE], extra[_BASELINE] - rewards)
            weights = torch.where(is_good, self.good_weight, self.bad_weight)
            losses = torch.where(is_answer, weights * (1.0 - torch.sigmoid(self.beta * margins)), 0.0)
            figures = {
                "good": is_good & is_answer,
                "right": (margins > 0) & is_answer,
                "baseline": extra[_BASELINE] * is_answer,
            }
            return HeadResult(
                {DOCUMENTS: losses.sum()}, {name: one.detach().float().sum() for name, one in figures.items()}
            )

        return compute

    def measure(self, sums: ObjectiveSums) -> dict[str, float]:
        """Returns the loss for each answer, the shares of good and of rightly judged answers, and the mean baseline."""
        number = sums.counts[DOCUMENTS]
        return {
            "loss": sums.terms[DOCUMENTS] / number,
            **{name: total / number for name, total in sums.figures.items()},
        }


class _Documents(NamedTuple):
    """Where the documents of a micro-batch lie in its flattened rows; all tensors are on its device.

    Args:
        number: The document of each token.
        starts: The first token of each document.
        ends: The token after each document.
        first: The first token with a label; the end of a document without one.
    """

    number: Tensor
    starts: Tensor
    ends: Tensor
    first: Tensor

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> "_Documents":
        offsets, labels = micro_batch.document_offsets, micro_batch.labels.flatten()
        assert offsets is not None, "loaders give the offsets"
        starts, ends = offsets[:-1].long(), offsets[1:].long()
        places = torch.arange(len(labels), device=labels.device)
        number = torch.searchsorted(ends, places, right=True)
        labelled = torch.where(labels != IGNORE_INDEX, places, len(labels))
        return cls(number, starts, ends, ends.scatter_reduce(0, number, labelled, "amin"))

    @property
    def is_answer(self) -> Tensor:
        return self.first < self.ends

    def first_of(self, values: Tensor) -> Tensor:
        """Returns the value at each document's first label."""
        return values.flatten()[self.first.clamp_max(values.numel() - 1)]

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over each document's tokens."""
        return values.new_zeros(len(self.starts)).index_add(0, self.number, values.flatten())


def _score(decoder: Decoder, micro_batch: MicroBatch, vocabulary: Vocabulary) -> Tensor:
    """Returns log p of each document's labels, without dropout."""
    documents, was_training = _Documents.of(micro_batch), decoder.training
    decoder.eval()
    try:
        found: Tensor = decoder(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            document_offsets=micro_batch.document_offsets,
            head=lambda hidden, weight: documents.sum(-vocabulary.token_losses(hidden, weight, micro_batch.labels)),
        )
    finally:
        decoder.train(was_training)
    return found


def _mismatch(micro_batch: MicroBatch) -> MicroBatch:
    """Returns one row with each prompt and the answer to the next one: as many tokens as the micro-batch has."""
    documents = _Documents.of(micro_batch)
    ids, labels = micro_batch.input_ids.flatten(), micro_batch.labels.flatten()
    is_answer, heads, tails = documents.is_answer, documents.first - documents.starts, documents.ends - documents.first
    with_answer = torch.argsort((~is_answer).int(), stable=True)
    rank = torch.where(is_answer, is_answer.cumsum(0), 0)  # of the next answer; the last document has the first one
    following = torch.where(
        is_answer, with_answer[rank % is_answer.sum().clamp_min(1)], torch.arange(len(rank), device=rank.device)
    )
    offsets = torch.cat([rank.new_zeros(1), (heads + tails[following]).cumsum(0)])
    places = torch.arange(len(ids), device=ids.device)
    number = torch.searchsorted(offsets[1:], places, right=True)
    behind = places - offsets[number] - heads[number]  # the first label has 0
    of_prompt = documents.first[number] + behind
    of_answer = documents.first[following[number]] + behind
    most = len(ids) - 1
    return MicroBatch(
        torch.where(behind <= 0, ids[of_prompt.clamp(0, most)], ids[of_answer.clamp(0, most)])[None],
        torch.where(behind < 0, IGNORE_INDEX, labels[of_answer.clamp(0, most)])[None],
        number[None].to(micro_batch.document_ids.dtype),
        offsets.to(torch.int32),
    )
