"""Checks of a recipe's model and batch, before the first step: they compute, compare, and change nothing.

Each takes a `Scene` and returns a `Check`; `CHECKS` is the list.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from genesis.base.errors import numbered
from genesis.data.loader import VALUES
from genesis.data.pair_windows import ANSWERS, CHOSEN_TOKENS, ENDS, MISMATCHED, PAIRS
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.decoder import Decoder, Scales, refuse_body
from genesis.model.initial import INIT_STD
from genesis.objectives.objective import TOKENS, Objective
from genesis.operations.doctor.checks import Check, judge
from genesis.strategies.layout import layout_strategy
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule

_IMPORTED_SHARE: Final = 0.7
"""An imported model's loss is below this share of ln(vocabulary)."""
_NUM_WINDOWS: Final = 8
_CHANGE: Final = 7
_NO_LABELS: Final = "this objective is no sum over labels"


@dataclass(frozen=True)
class Scene:
    """The recipe in front of its first step.

    Args:
        trainer: In its fit.
        module: Its decoder is built and has its weights.
        data: The data of the fit.
        window: The first window, on the device.
        tokenizer: The tokenizer of the data; None if it is unknown.
        is_new: Whether the weights are initial ones; else they are imported.
    """

    trainer: pl.Trainer
    module: GenesisModule
    data: CorpusDataModule
    window: AccumulationWindow
    tokenizer: Tokenizer | None
    is_new: bool

    @property
    def decoder(self) -> Decoder:
        """The model."""
        refuse_body(self.module.decoder_config)
        assert isinstance(self.module.decoder, Decoder), "built before the first step"
        return self.module.decoder

    @property
    def objective(self) -> Objective:
        """What training minimises."""
        return self.module.objective

    @property
    def is_paired(self) -> bool:
        """Whether the data are answers: pairs of them, or single ones."""
        return self.objective.learns_from in ("pairs", "answers")

    @property
    def tolerance(self) -> float:
        """How far two ways to compute the same may be apart, relative to its size."""
        return 2e-4 if "32" in str(self.trainer.precision) else 3e-2

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switches dropout and gradients off, under the precision of the recipe."""
        was_training = self.decoder.training
        self.decoder.eval()
        try:
            with torch.no_grad(), self.trainer.precision_plugin.val_step_context():
                yield
        finally:
            self.decoder.train(was_training)

    def hidden(self, micro_batch: MicroBatch, input_ids: Tensor) -> Tensor:
        """Returns the final hidden states of a micro-batch with other tokens, in float32."""
        with self.evaluating():
            found: Tensor = self.decoder(
                input_ids,
                document_ids=micro_batch.document_ids,
                document_offsets=micro_batch.document_offsets,
                head=lambda hidden, weight: hidden,
            )
        return found.float()

    def windows(self) -> Iterator[AccumulationWindow]:
        """Yields the first window and those after it, on the device."""
        yield self.window
        position, device = self.window.data_position, self.window.micro_batches[0].input_ids.device
        for _ in range(_NUM_WINDOWS - 1):
            window = self.data.training.window(position)
            yield window.to(device)
            position = window.data_position


# ---- the loss


def check_initial_loss(scene: Scene) -> Check:
    """Compares the first loss with what an untrained, or an imported, model must have."""
    if not scene.window.num_valid_tokens:
        return Check("initial loss", "does not apply", "no label of the first window is learned")
    with scene.evaluating():
        sums = layout_strategy(scene.trainer.strategy).sum_losses(
            scene.decoder, scene.window.micro_batches, scene.objective
        )
    if (due := scene.objective.initial_loss) is not None:
        unit = next(iter(sums.terms))
        loss = float(sums.terms[unit]) / scene.objective.count(scene.window)[unit]
        return judge(
            "initial loss",
            abs(loss - due) < 0.02,
            f"{loss:.4f} for each of the {unit}; policy and reference are equal, so it must be {due:.4f}",
            "the reference is not the model that training starts from: check model.objective.reference and ckpt_path",
        )
    if scene.objective.label_options is None:
        return Check("initial loss", "does not apply", _NO_LABELS)
    loss = float(sums.terms[TOKENS]) / scene.window.num_valid_tokens
    uniform = math.log(scene.decoder.config.vocab_size)
    if not scene.is_new:
        limit = _IMPORTED_SHARE * uniform
        return judge(
            "initial loss",
            loss < limit,
            f"{loss:.3f} nats a token; an imported model's must be below {limit:.2f} (ln vocabulary is {uniform:.2f})",
            "the weights do not belong to the tokenizer or the shape: check `genesis import`, the corpus's tokenizer "
            "and the chat template",
        )
    # Logits of a normed state of `dim` numbers and weights of deviation s have the variance dim s^2, whose mean
    # log-sum-exp lies half of it above ln(vocabulary).
    scales = scene.decoder.config.scales or Scales()
    rise = scene.decoder.config.dim * (scales.logits * INIT_STD) ** 2 / 2
    low, high = uniform - 0.1, uniform + 1.6 * rise + 0.1
    return judge(
        "initial loss",
        low < loss < high,
        f"{loss:.3f} nats a token; a new model's must be from {low:.2f} to {high:.2f} (ln vocabulary is {uniform:.2f})",
        "below: labels or later tokens leak into the inputs; above: the initial weights are too large",
    )


def check_loss(scene: Scene) -> Check:
    """Compares the loss with the plain definition: the sum of -log p over the learned labels, from whole logits."""
    if scene.objective.label_options is None:
        return Check("loss", "does not apply", _NO_LABELS)
    micro = _take_row(scene.window.micro_batches[0], 0)
    with scene.evaluating():
        sums = layout_strategy(scene.trainer.strategy).sum_losses(scene.decoder, [micro], scene.objective)
        logits = scene.decoder(micro.input_ids, document_ids=micro.document_ids)
    expected = cross_entropy(
        logits.float().flatten(0, 1), micro.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    found, due = float(sums.terms[TOKENS]), float(expected)
    return judge(
        "loss",
        abs(found - due) <= scene.tolerance * max(abs(due), 1.0),
        f"{found:.3f} by the recipe's loss, {due:.3f} by the definition, summed over the learned labels of a row",
        "the loss shifts or weights the labels again: the labels of a batch are already those of the next token",
    )


# ---- the batch


def check_labels(scene: Scene) -> Check:
    """Compares each learned label with the token after its input, and looks for labels beyond the end of a document."""
    shifts = dict.fromkeys((0, 1, 2, 3), 0)
    num_learned = num_beyond = num_all = 0
    for micro in scene.window.micro_batches:
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        is_learned = labels != IGNORE_INDEX
        num_all += int(is_learned.sum())
        # Only inputs with three more of their document after them can tell the shifts apart.
        inner = is_learned[:, :-3] & (documents[:, :-3] == documents[:, 3:])
        num_learned += int(inner.sum())
        for shift in shifts:
            after = ids[:, shift : ids.shape[1] - 3 + shift]
            shifts[shift] += int((inner & (labels[:, :-3] == after)).sum())
        if not scene.is_paired:  # the last token of an answer is a label alone
            num_beyond += int((is_learned[:, :-1] & (documents[:, :-1] != documents[:, 1:])).sum())
    best = max(shifts, key=lambda shift: (shifts[shift], shift == 1))
    is_right = num_all > 0 and shifts[1] == num_learned and not num_beyond
    found = (
        f"{shifts[1]:,} of {numbered(num_learned, 'compared labels')} are the next token of the input; learned: "
        f"{numbered(num_all, 'labels')}"
    )
    if shifts[1] < num_learned:
        found += f"; {shifts[best]} equal the input {best} tokens later"
    if num_beyond:
        found += f"; beyond the end of their document: {numbered(num_beyond, 'labels')}"
    remedy = "labels are shifted by one, once: input_ids = row[:-1], labels = row[1:], and none across a document's end"
    if not num_all:
        remedy = "no label of the first window is learned: check the masks of the chat template, and data.seq_len"
    return judge("labels", is_right, found, remedy)


def check_documents(scene: Scene) -> Check:
    """Changes the tokens of one document, and compares the hidden states of all others."""
    if (fault := _find_joined(scene)) is not None:
        return fault
    micro, row, note = _find_documents(scene)
    documents = micro.document_ids[row]
    worst, own = 0.0, math.inf
    for document in {int(documents[0]), int(documents.max())}:
        is_changed = torch.zeros_like(micro.document_ids, dtype=torch.bool)
        is_changed[row] = documents == document
        others, within = _compare_changed(scene, micro, is_changed, ~is_changed)
        worst, own = max(worst, others), min(own, within)
    number = int(documents.max()) + 1
    found = f"with one of {numbered(number, 'documents')} of a row changed, the others differ by {worst:.1e}{note}"
    if own <= scene.tolerance:
        return Check(
            "documents", "failed", f"changed tokens change nothing ({own:.1e})", "the model ignores its inputs"
        )
    return judge(
        "documents",
        worst <= scene.tolerance,
        found,
        "attention crosses documents: the mask, or the offsets of the documents, are wrong",
    )


def check_later_tokens(scene: Scene) -> Check:
    """Changes the second half of a document, and compares the hidden states of the first half."""
    micro = scene.window.micro_batches[0]
    documents = micro.document_ids[0]
    longest = documents.long().bincount().argmax()
    places = (documents == longest).nonzero().flatten()
    half = len(places) // 2
    is_changed, is_before = (torch.zeros_like(micro.document_ids, dtype=torch.bool) for _ in range(2))
    is_changed[0, places[half:]], is_before[0, places[:half]] = True, True
    if not half:
        return Check("later tokens", "does not apply", "the first row has no document of two tokens")
    before, _ = _compare_changed(scene, micro, is_changed, is_before)
    return judge(
        "later tokens",
        before <= scene.tolerance,
        f"with the last {numbered(len(places) - half, 'tokens')} of a document changed, the {half} before differ by "
        f"{before:.1e}",
        "attention sees later tokens: it must be causal, or every loss is too low",
    )


def _compare_changed(scene: Scene, micro: MicroBatch, is_changed: Tensor, is_compared: Tensor) -> tuple[float, float]:
    """Returns the largest difference of hidden states, relative to their size, at the compared and changed places."""
    vocab_size = scene.decoder.config.vocab_size
    other = torch.where(is_changed, (micro.input_ids + _CHANGE) % vocab_size, micro.input_ids)
    one, two = scene.hidden(micro, micro.input_ids), scene.hidden(micro, other)
    difference = (one - two).abs() / one.abs().mean().clamp_min(1e-30)
    return float(difference[is_compared].max()), float(difference[is_changed].max())


def _find_documents(scene: Scene) -> tuple[MicroBatch, int, str]:
    """Returns a micro-batch, a row of it with several documents, and a note where such a row had to be made."""
    for window in scene.windows():
        for micro in window.micro_batches:
            rows = (micro.document_ids.amax(1) > 0).nonzero().flatten()
            if len(rows):
                return micro, int(rows[0]), ""
    micro = scene.window.micro_batches[0]
    halves = torch.arange(micro.document_ids.shape[1], device=micro.document_ids.device) * 2
    made = (halves >= micro.document_ids.shape[1]).to(torch.int32).expand_as(micro.document_ids).contiguous()
    note = f"; no row of the first {_NUM_WINDOWS} windows has two documents, so rows were split in two"
    return replace(micro, document_ids=made, document_offsets=None), 0, note


def _find_joined(scene: Scene) -> Check | None:
    """Returns a failure if a document begins, by the tokenizer's bos, within what the batch calls one document."""
    bos = None if scene.tokenizer is None or scene.is_paired else scene.tokenizer.bos_id
    if bos is None:
        return None
    num_joined = num_starts = 0
    for window in islice(scene.windows(), _NUM_WINDOWS):
        for micro in window.micro_batches:
            is_start = micro.input_ids[:, 1:] == bos
            num_starts += int(is_start.sum())
            num_joined += int((is_start & (micro.document_ids[:, 1:] == micro.document_ids[:, :-1])).sum())
    if not num_joined:
        return None
    return Check(
        "documents",
        "failed",
        f"{num_joined:,} of {numbered(num_starts, 'documents')} that begin within a row are joined with the one before",
        "the batch's document_ids do not follow the ends of documents, so attention crosses them",
    )


# ---- accumulation


def check_accumulation(scene: Scene) -> Check:
    """Compares the gradient of an uneven window with that of the same rows in one micro-batch."""
    if scene.objective.label_options is None and not scene.is_paired:
        return Check("accumulation", "does not apply", _NO_LABELS)
    parts = _make_uneven(scene)
    if len(parts) < 2:
        return Check("accumulation", "does not apply", "the first windows have no two rows with labels")
    whole = _measure_gradient(scene, [_merge(parts)])
    window = _measure_gradient(scene, parts)
    alone = [_measure_gradient(scene, [part]) for part in parts]
    difference = _compare(window, whole)
    power = _compare([torch.stack(each).mean(0) for each in zip(*alone, strict=True)], whole)
    found = (
        f"{len(parts)} uneven micro-batches and one big batch give gradients that differ by {difference:.1e}; divided "
        f"by each micro-batch's own number of tokens, they would differ by {power:.1e}"
    )
    return judge(
        "accumulation",
        difference <= 10 * scene.tolerance,
        found,
        "the loss must be a sum, divided once by the valid tokens of the whole window, never by those of a micro-batch",
    )


def _measure_gradient(scene: Scene, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Returns the gradients of the recipe's own training step on some micro-batches."""
    num_valid = sum(int((micro.labels != IGNORE_INDEX).sum()) for micro in micro_batches)
    units = dict(scene.window.num_units)
    if scene.is_paired:
        units[PAIRS] = sum(int((micro.extra[PAIRS] >= 0).sum()) for micro in micro_batches)
        units[CHOSEN_TOKENS] = sum(
            int(((micro.labels != IGNORE_INDEX) & (micro.extra[ANSWERS] % 2 == 0)).sum()) for micro in micro_batches
        )
    window = replace(
        scene.window,
        micro_batches=tuple(micro_batches),
        num_valid_tokens=num_valid,
        num_units=units,
        packed=None,
    )
    was_training = scene.decoder.training
    has_dropout = scene.decoder.config.dropout > 0 or any(
        part.draws_random_numbers for part in scene.decoder.parts.values()
    )
    scene.decoder.train(was_training and not has_dropout)
    try:
        with scene.trainer.precision_plugin.train_step_context():
            out = scene.module.training_step(window, 0)
        scene.trainer.strategy.backward(out["loss"], None)
        return [
            parameter.grad.detach().float().clone()
            for parameter in scene.module.parameters()
            if parameter.grad is not None
        ]
    finally:
        scene.decoder.train(was_training)
        for parameter in scene.module.parameters():
            parameter.grad = None


def _compare(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Returns the norm of a difference, relative to the norm of the second."""
    if len(one) != len(other):
        return math.inf
    difference = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return math.sqrt(difference / max(sum(float(b.square().sum()) for b in other), 1e-30))


def _make_uneven(scene: Scene) -> list[MicroBatch]:
    """Returns micro-batches with different numbers of what the loss counts."""
    found: list[MicroBatch] = []
    for window in scene.windows():
        for micro in window.micro_batches:
            rows = range(len(micro.input_ids)) if not scene.is_paired else ()
            parts = [_take_row(micro, row) for row in rows] or [micro]
            found += [part for part in parts if (part.labels != IGNORE_INDEX).any()]
        if len(found) > 2:
            break
    if scene.is_paired:
        return [_merge(found[:2]), found[2]] if len(found) > 2 else []
    if len(found) < 2:
        return []
    first, rest = found[0], _merge(found[1:3])
    places = (first.labels != IGNORE_INDEX).nonzero()
    labels = first.labels.clone()
    for row, column in places[max(1, len(places) // 4) :].tolist():
        labels[row, column] = IGNORE_INDEX
    return [replace(first, labels=labels), rest]


def _take_row(micro: MicroBatch, row: int) -> MicroBatch:
    """Returns a row of a micro-batch; the offsets of its documents are computed again."""
    size = len(micro.input_ids)
    taken = {
        name: tensor[row : row + 1] if tensor.ndim and len(tensor) == size else tensor
        for name, tensor in micro.tensors.items()
        if name != "document_offsets"
    }
    return replace(micro, document_offsets=None).with_tensors(taken)


_PARTS: Final = ("", f"extra.{MISMATCHED}")


def _merge(micro_batches: Sequence[MicroBatch]) -> MicroBatch:
    """Returns one micro-batch with all rows; answers that share one row stay in one row."""
    first = micro_batches[0]
    is_joined = ANSWERS in first.extra and len(first.input_ids) == 1
    num_answers = num_tokens = 0
    num_documents = dict.fromkeys(_PARTS, 0)
    shifted = []
    for micro in micro_batches:
        tensors = {name: one for name, one in micro.tensors.items() if not name.endswith("document_offsets")}
        for part in _PARTS:
            ids, owners = f"{part}document_ids", f"{part}extra.{ANSWERS}"
            if is_joined and ids in tensors:
                tensors[ids] = tensors[ids] + num_documents[part]
                num_documents[part] += int(micro.tensors[ids].max()) + 1
            if owners in tensors:
                tensors[owners] = tensors[owners] + num_answers
        if ENDS in micro.extra:
            tensors[f"extra.{ENDS}"] = tensors[f"extra.{ENDS}"] + num_tokens
        num_tokens += micro.input_ids.numel()
        if ANSWERS in micro.extra:
            is_single = VALUES in micro.extra and ENDS not in micro.extra
            num_answers += (1 if is_single else 2) * len(micro.extra[PAIRS])
        shifted.append(tensors)
    merged = {
        name: torch.cat([tensors[name] for tensors in shifted], 1 if is_joined and shifted[0][name].ndim > 1 else 0)
        for name in shifted[0]
    }
    return replace(first, document_offsets=None).with_tensors(merged)


ModelCheck = Callable[[Scene], Check]
CHECKS: Final[dict[str, ModelCheck]] = {
    "initial loss": check_initial_loss,
    "loss": check_loss,
    "labels": check_labels,
    "documents": check_documents,
    "later tokens": check_later_tokens,
    "accumulation": check_accumulation,
}
"""The checks by name, in the order of the table."""
