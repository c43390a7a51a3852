"""The embedding, the blocks and the head of a decoder, each with what its forward and backward hold in memory.

The model's own code is measured, on tensors without memory (torch's FakeTensorMode): one forward and one backward run
through the embedding, a block of each kind, and the head, and what begins and ends to exist is cut into sections.
Nothing is computed.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from genesis.base.device import CPU, Measurement, measured_as
from genesis.base.errors import UserError
from genesis.model.attend.kernel import CUDA
from genesis.model.attend.table import MASK, TORCH_KERNEL
from genesis.model.decoder import BlockInputs, Decoder
from genesis.model.experts import Experts
from genesis.model.loss import sum_cross_entropy, token_losses
from genesis.model.mixture import Mixture
from genesis.model.part import Part, Statistics
from genesis.model.precision import FULL
from genesis.model.scores import compute_scores
from genesis.model.shares import share_context, share_matrices
from genesis.model.stages import NumberedBlocks
from genesis.model.statistics import list_auxiliary_losses
from genesis.objectives.distillation_loss import TeacherClasses, read_classes, sum_distillation
from genesis.objectives.policy_gradient import score_tokens
from genesis.objectives.reverse_kl import sum_reverse_kl
from genesis.objectives.vocabulary import WHOLE
from genesis.operations.plan.layout import Layout, Workload, forward_weight_bytes, product_bytes
from genesis.operations.plan.record import ACTIVATIONS, GRADIENTS, LOSS, Course, Event, Record
from genesis.operations.plan.stand_ins import EvenContext, EvenExchange, EvenMatrices, EvenRows, stand_in
from genesis.operations.plan.state import build_model
from genesis.optim import AdamW

_CPU_ROUNDING, _GPU_ROUNDING = 64, 512
"""The units of torch's allocators."""
IDS_BYTES: Final = 8 + 8 + 4
"""Bytes of a token of the batch: id, label, and number of its document."""


@dataclass(frozen=True)
class Setting:
    """What decides the size of activations, beside the model.

    Args:
        batch_size: Sequences of a micro-batch.
        seq_len: Tokens of a sequence.
        product_dtype: The dtype of matrix products.
        weight_dtype: The dtype of trained weights as the forward sees them, where they are not narrower.
        is_autocast: Whether products cast what they get.
        kind: The kind of device.
        attention: The kernel of attention, by its name in `genesis.model.attend.table`.
        has_documents: Whether a sequence has several documents.
        expert_ranks: Ranks that share the experts; rows travel between them.
        context_ranks: Ranks that share the tokens of a sequence.
        tensor_ranks: Ranks that share the matrices of each layer.
        rounded_to: The allocator's unit.
        is_trained: Whether there is a backward.
    """

    batch_size: int
    seq_len: int
    product_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    is_autocast: bool = False
    kind: str = CPU
    attention: str = "flash"
    has_documents: bool = True
    expert_ranks: int = 1
    context_ranks: int = 1
    tensor_ranks: int = 1
    rounded_to: int = 512
    is_trained: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True)
class Section:
    """A part of the decoder that runs in one piece.

    Args:
        forward: The course of a forward that keeps what its backward needs.
        forward_without: That of one that keeps nothing.
        recompute: That of a second forward, in the backward of a block whose first one has kept nothing. It stops where
            everything is kept.
        backward: The course of the backward, whose gradients of weights stay.
        backward_added: That of one whose gradients are added to existing ones.
        gradient_bytes: Bytes of the gradients of its weights.
        input_bytes: Bytes of its input.
        cached_casts: Bytes of the copies of its weights that autocast keeps.
        weight_gradient_bytes: Bytes of the gradient of the output weight, which the timeline holds.
        has_late_gradient: Whether the backward computes that gradient, not the forward.
    """

    forward: Course
    forward_without: Course
    recompute: Course
    backward: Course
    backward_added: Course
    gradient_bytes: int
    input_bytes: int
    cached_casts: int
    weight_gradient_bytes: int = 0
    has_late_gradient: bool = False


@dataclass(frozen=True)
class Sections:
    """All sections of a decoder.

    Args:
        embedding: The embedding.
        blocks: The blocks in order; equal ones are one object.
        head: The last norm and the loss.
        tables_bytes: Bytes of the metadata that all blocks share, such as rotary tables and masks.
        notes: What is only estimated.
    """

    embedding: Section
    blocks: tuple[Section, ...]
    head: Section
    tables_bytes: int
    notes: tuple[str, ...] = ()


def build_setting(workload: Workload, layout: Layout) -> Setting:
    """Returns what decides the size of activations."""
    product, weight = product_bytes(workload, layout), forward_weight_bytes(workload, layout)
    narrow = torch.float16 if workload.precision.startswith("16") else torch.bfloat16
    return Setting(
        batch_size=workload.micro_batch_size * workload.rows_per_sequence,
        seq_len=workload.seq_len,
        product_dtype=narrow if product == narrow.itemsize else torch.float32,
        weight_dtype=narrow if weight == narrow.itemsize else torch.float32,
        # Where FSDP2 gathers in the products' type there is no autocast.
        is_autocast=workload.precision.endswith("mixed") and weight != product,
        kind=CPU if workload.is_cpu else CUDA,
        # A CPU has no other kernel than these two.
        attention=workload.attention if workload.attention == MASK.name or not workload.is_cpu else TORCH_KERNEL,
        has_documents=workload.has_documents,
        expert_ranks=layout.expert_parallel,
        context_ranks=layout.context_parallel,
        tensor_ranks=layout.tensor_parallel,
        rounded_to=_CPU_ROUNDING if workload.is_cpu else _GPU_ROUNDING,
    )


Head = Callable[[Tensor, Tensor, Tensor], Any]
"""Of hidden states, an output weight and labels."""


def build_sections(workload: Workload, setting: Setting) -> Sections:
    """Returns the sections of a workload's decoder.

    Raises:
        UserError: A part of the model decides by values what it computes.
    """
    # What decides neither the model nor the loss is left out, so that layouts share what was measured.
    same = replace(workload, seq_len=1, micro_batch_size=1, global_batch_size=1)
    same = replace(same, teacher=None, reward_models=(), num_answer_rows=0)
    return _measure(replace(same, precision=FULL, optimizer=AdamW()), setting)


@lru_cache(maxsize=256)
def _measure(workload: Workload, setting: Setting) -> Sections:
    decoder = build_model(workload).decoder
    try:
        sections = Walk(decoder, setting, _choose_head(workload, setting)).measure()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"a part of the model reads values of tensors in its forward ({error}), so that no plan can measure it "
            "without data: compute the same without them, or train a few steps to see the memory"
        ) from None
    notes = []
    if setting.kind != CPU and setting.product_dtype != torch.float32:
        found = (part.measured_note for part in decoder.modules() if isinstance(part, Part))
        notes = [note for note in dict.fromkeys(found) if note is not None]
    return replace(sections, notes=tuple(notes))


def _choose_head(workload: Workload, setting: Setting) -> Head:
    """Returns the loss of an objective, or what a teacher computes."""
    if setting.tensor_ranks > 1:  # as `genesis.strategies.cut_vocabulary` has it, on whole rows
        share = EvenRows(setting.tensor_ranks)
        return lambda hidden, weight, labels: token_losses(share.gather(hidden), weight, labels).sum()
    if not setting.is_trained and workload.objective.head_memory == "reverse_kl":
        return lambda hidden, *_: hidden
    if not setting.is_trained and workload.decoder.num_scores is None:
        return lambda hidden, weight, _: read_classes(
            hidden, weight, vocab_size=len(weight), top_k=workload.teacher_top_k, temperature=1.0
        )
    by_memory: dict[str, Head] = {
        "reverse_kl": _compare,
        "distributions": partial(_distill, top_k=workload.teacher_top_k),
        "fused": sum_cross_entropy,
        "scores": lambda hidden, weight, labels: compute_scores(hidden, weight, labels.new_zeros(1)).sum(),
    }
    if workload.objective.head_memory in by_memory:
        return by_memory[workload.objective.head_memory]
    if workload.objective.learns_from == "prompts":
        return lambda hidden, weight, labels: score_tokens(hidden, weight, labels, hidden.new_empty(1), WHOLE).sum()
    return lambda hidden, weight, labels: token_losses(hidden, weight, labels).sum()


def _distill(hidden: Tensor, weight: Tensor, labels: Tensor, *, top_k: int) -> Tensor:
    shape = (*labels.shape, top_k)
    classes = TeacherClasses(
        labels.new_empty(shape, dtype=torch.int32),
        labels.new_empty(shape, dtype=torch.float32),
        labels.new_empty(labels.shape, dtype=torch.float32),
    )
    return sum_distillation(hidden, weight, labels, classes, temperature=1.0, share=0.5).loss


def _compare(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    teacher = (hidden.new_empty(hidden.shape), weight.new_empty(weight.shape))
    return sum_reverse_kl(hidden, weight, labels, *teacher, hidden.new_empty(1)).divergence


# ---- one forward and one backward


class Walk:
    """Runs a decoder once and cuts the events into sections: the embedding, a block of each kind, and the head.

    Args:
        decoder: The decoder, on the meta device.
        setting: What decides the sizes.
        head: The loss.
    """

    def __init__(self, decoder: Decoder, setting: Setting, head: Head) -> None:
        self._decoder, self._setting, self._head = decoder, setting, head
        self._record = Record(setting.rounded_to)
        self._chosen, self._section_of_block = _choose_blocks(decoder)
        self._starts: list[int] = []
        """The first event of each section of the forward: the chosen blocks, the head, and the backward."""
        self._reached: dict[int, int] = {}
        """The event at which the backward has the gradient of a section's input."""
        self._inputs: list[Event] = []
        self._kept: list[set[int]] = []
        self._last_kept: list[int] = []
        self._without: list[list[Event]] = []
        self._gradients: list[tuple[int, int, Tensor]] = []
        self._sizes: dict[int, int] = {}
        self._cached: set[int] = set()
        self._of_output = 0
        self._tables: dict[int, int] = {}

    def measure(self) -> Sections:
        """Returns the sections."""
        setting, record = self._setting, self._record
        shape = (setting.batch_size, setting.seq_len)
        # torch warns that a norm with a weight of another dtype is not fused on a CPU, as in every fit there.
        with (
            warnings.catch_warnings(),
            FakeTensorMode(),
            measured_as(Measurement(setting.kind, record.run_kernel)),
            stand_in(setting.kind),
        ):
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            decoder, output = self._make_twin()
            ids = torch.empty(shape, dtype=torch.int64)
            documents = offsets = None
            if setting.has_documents:
                documents = torch.empty(shape, dtype=torch.int32)
                offsets = torch.empty(2 * setting.batch_size + 1, dtype=torch.int32)
            counted = torch.empty(shape, dtype=torch.bool)
            labels = ids if decoder.context is None else decoder.context.cut(ids)
            inputs = [one for one in (ids, documents, offsets, counted, output) if one is not None]
            record.leave_out([*inputs, *(one for one in decoder.parameters() if one.device.type != "meta")])
            with record, torch.autocast("cpu", setting.product_dtype, enabled=setting.is_autocast):
                loss, statistics = decoder(
                    ids,
                    document_ids=documents,
                    document_offsets=offsets,
                    head=lambda hidden, _: self._head(hidden, output, labels),
                    has_statistics=True,
                    counted=counted,
                )
                if setting.is_trained:
                    for auxiliary in list_auxiliary_losses(statistics):
                        loss = loss + auxiliary
                del statistics
                self._starts.append(len(record.events))
                if setting.is_trained:
                    loss.backward()
                num_events = len(record.events)
            del record.events[num_events:]
            return self._cut(output)

    # ---- the run

    def _make_twin(self) -> tuple[Decoder, nn.Parameter]:
        """Returns the decoder with fake parameters where they are needed, and an output weight of its own."""
        source = self._decoder
        twin = copy.copy(source)
        blocks = NumberedBlocks({index: self._fake(source.blocks[index]) for index in self._chosen})
        modules = {name: self._fake(module) for name, module in source._modules.items() if module and name != "blocks"}
        twin.__dict__ = {**source.__dict__, "_modules": {**modules, "blocks": blocks}}
        vars(twin)["run_blocks"] = partial(self._run_blocks, twin)
        twin.attention_kernel = self._setting.attention
        if self._setting.tensor_ranks > 1:
            share = EvenRows(self._setting.tensor_ranks)
            share_matrices(twin, share, EvenMatrices(share.size))
        if self._setting.context_ranks > 1:
            share_context(twin, EvenContext(self._setting.context_ranks))
        is_trained = twin.output_weight.requires_grad
        output = nn.Parameter(torch.empty_like(twin.output_weight), requires_grad=is_trained)
        for one in (*twin.parameters(), output):
            if one.requires_grad and one.device.type != "meta":
                one.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]  # torch's
        return twin, output

    def _fake(self, module: nn.Module) -> nn.Module:
        ranks = self._setting.expert_ranks
        shared = {id(one) for part in module.modules() if isinstance(part, Experts) for one in part.parameters()}
        copies: dict[int, Any] = {}
        for old in module.parameters():
            size = (old.shape[0] // ranks, *old.shape[1:]) if id(old) in shared else old.shape
            dtype = min(old.dtype, self._setting.weight_dtype, key=lambda one: one.itemsize)
            copies[id(old)] = nn.Parameter(
                torch.empty(size, dtype=dtype), requires_grad=old.requires_grad and self._setting.is_trained
            )
        twin = copy.deepcopy(module, copies)
        for part in twin.modules():
            if isinstance(part, Experts):
                part.products = "grouped"
            if isinstance(part, Mixture) and ranks > 1:
                part.exchange = EvenExchange(ranks)
        return twin

    def _run_blocks(self, decoder: Decoder, _: range, x: Tensor, inputs: BlockInputs) -> tuple[Tensor, Any]:
        record = self._record
        tables = [one for one in tree_leaves(list(inputs.metadata)) if isinstance(one, Tensor)]
        self._tables = {record.find(one): record.size(one) for one in tables}
        statistics: dict[str, Statistics] = {}
        for index in self._chosen:
            self._begin(x)
            with saved_tensors_hooks(self._pack, lambda packed: packed):
                x, reported = Decoder.run_blocks(decoder, range(index, index + 1), x, inputs)
            statistics |= reported
        stop = len(record.events)
        with torch.no_grad():
            for index in self._chosen:
                start = len(record.events)
                found = Decoder.run_blocks(decoder, range(index, index + 1), x, inputs)
                self._without.append(record.events[start:])
                del found
        del record.events[stop:]
        self._begin(x)
        return x, statistics

    def _begin(self, x: Tensor) -> None:
        """Begins a section of the forward that gets `x`."""
        if x.requires_grad:
            x.register_hook(partial(self._reach, len(self._starts)))  # type: ignore[no-untyped-call]  # torch's
        self._starts.append(len(self._record.events))
        self._inputs.append((self._record.find(x), self._record.size(x)))
        self._kept.append(set())
        self._last_kept.append(0)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._last_kept[-1] = len(self._record.events)
        self._kept[-1].add(self._record.find(tensor))
        # A result that an operation keeps would keep the operation, and that again the result.
        return tensor if tensor.is_leaf else tensor.detach()

    def _reach(self, section: int, gradient: Tensor) -> None:
        self._reached[section] = len(self._record.events)
        self._record.terms[self._record.find(gradient)] = ACTIVATIONS

    def _note_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._gradients.append((len(self._record.events), self._record.find(parameter.grad), parameter))

    # ---- the sections

    def _cut(self, output: nn.Parameter) -> Sections:
        self._release_first_input()
        record, starts, head = self._record, self._starts, len(self._chosen)
        events, stop = record.events, len(record.events)
        self._sizes = {number: size for number, size in events if size > 0}
        self._of_output = next((number for _, number, parameter in self._gradients if parameter is output), 0)
        # Tables are counted once. Copies of trained weights that autocast keeps after the backward are the timeline's;
        # others are kept by what reads them.
        ended = {number for number, size in events if size < 0}
        self._cached = (record.casts.keys() & self._sizes.keys()) - ended
        reached = [self._reached.get(section, stop) for section in range(head + 1)]
        for number in self._list_begun(starts[head], reached[head]):
            record.terms.setdefault(number, LOSS)
        for _, number, _ in self._gradients:
            record.terms[number] = LOSS if number == self._of_output else GRADIENTS
        embedding = self._finish(None, (0, starts[0]), (reached[0], stop))
        sections = [
            self._finish(one, (starts[one], starts[one + 1]), (reached[one + 1], reached[one])) for one in range(head)
        ]
        last = self._finish(head, (starts[head], starts[-1]), (starts[-1], reached[head]))
        return Sections(
            embedding, tuple(sections[one] for one in self._section_of_block), last, sum(self._tables.values())
        )

    def _finish(self, section: int | None, span: tuple[int, int], backward_span: tuple[int, int]) -> Section:
        record = self._record
        without: list[Event] = []
        second: list[Event] = []
        if section is not None and section < len(self._chosen):
            without = self._choose(self._without[section])
            second = self._end_at_last_kept(section, span[0])
        forward = self._choose(record.events[slice(*span)])
        backward = self._choose(record.events[slice(*backward_span)])
        added = self._add_gradients(*backward_span)
        gradient, is_late = 0, False
        if section == len(self._chosen):
            gradient = self._sizes.get(self._of_output, 0)
            is_late = gradient > 0 and self._of_output not in dict(forward)
            # The timeline holds this gradient: from the beginning of the forward, or from the end of the backward.
            if is_late:
                backward, added = ([*some, (self._of_output, -gradient)] for some in (backward, added))
            elif gradient:
                forward.insert(0, (self._of_output, -gradient))
        stays = record.course(backward)
        return Section(
            forward=record.course(forward),
            forward_without=record.course(without),
            recompute=record.course(second),
            backward=stays,
            backward_added=record.course(added),
            gradient_bytes=stays.end[GRADIENTS],
            input_bytes=0 if section is None else self._inputs[section][1],
            cached_casts=sum(self._sizes[number] for number in self._list_begun(*span) & self._cached),
            weight_gradient_bytes=gradient,
            has_late_gradient=is_late,
        )

    def _choose(self, events: list[Event]) -> list[Event]:
        return [event for event in events if event[0] not in self._cached and event[0] not in self._tables]

    def _list_begun(self, start: int, stop: int) -> set[int]:
        return {number for number, size in self._record.events[start:stop] if size > 0}

    def _add_gradients(self, start: int, stop: int) -> list[Event]:
        """Returns the events of a backward where each gradient of a weight ends as soon as it was added to another."""
        events, at = [], start
        begun = self._list_begun(start, stop) - {self._of_output}
        for added, number, _ in self._gradients:
            if number in begun:
                events += [*self._record.events[at:added], (number, -self._sizes[number])]
                at = added
        return self._choose([*events, *self._record.events[at:stop]])

    def _release_first_input(self) -> None:
        """Moves the end of the first block's input to the end of that block.

        The decoder holds it until the head begins. Where no backward reads it, another block stands for all later ones,
        so that the events of the head would have an end of an input that is not theirs.
        """
        number, size = self._inputs[0]
        events, end = self._record.events, (number, -size)
        if end in events[self._starts[-2] : self._starts[-1]]:
            events.remove(end)
            events.insert(self._starts[1], end)
            self._starts[1:-1] = [start + 1 for start in self._starts[1:-1]]
            self._last_kept[1:] = [last + 1 for last in self._last_kept[1:]]

    def _end_at_last_kept(self, section: int, start: int) -> list[Event]:
        """Returns the events of a second forward, at whose end only what is kept exists."""
        events = self._choose(self._record.events[start : self._last_kept[section]])
        live = dict([self._inputs[section]])
        for number, size in events:
            if size > 0:
                live[number] = size
            else:
                live.pop(number, None)
        return [*events, *((number, -size) for number, size in live.items() if number not in self._kept[section])]


def _choose_blocks(decoder: Decoder) -> tuple[list[int], list[int]]:
    """Returns the numbers of blocks that stand for all, and which of them stands for each block."""
    kinds: dict[object, int] = {}
    of_block = []
    # The input of the first block may need no gradient, as under adapters.
    needs_grad = decoder.embedding.weight.requires_grad
    chosen: list[int] = []
    for index, block in enumerate(decoder.blocks):
        kind = (needs_grad, _describe(block))
        if kind not in kinds:
            kinds[kind] = len(chosen)
            chosen.append(index)
        of_block.append(kinds[kind])
        needs_grad = needs_grad or any(one.requires_grad for one in block.parameters())
    return chosen, of_block


def _describe(block: nn.Module) -> object:
    """Returns what is equal for blocks that take the same memory."""
    return tuple(
        (
            type(part),
            tuple((name, value) for name, value in vars(part).items() if isinstance(value, int | float | str | None)),
            tuple(
                (name, one.shape, one.dtype, one.requires_grad) for name, one in part.named_parameters(recurse=False)
            ),
        )
        for part in block.modules()
    )
