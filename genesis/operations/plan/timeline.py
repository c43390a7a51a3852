"""Plays a training step on a rank: what is gathered, kept, reduced and updated, and when.

The order is that of `genesis.strategies.micro_batches.train_in_turn` and of FSDP2. Three micro-batches stand for any
larger number: the first creates gradients, those after it add to them, the last one reduces them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from genesis.operations.plan.axes import Place, list_places
from genesis.operations.plan.bill import (
    BATCH,
    CACHE,
    COMMUNICATION,
    DIGEST,
    FROZEN,
    OPTIMIZER,
    RECEIVED,
    REWARD_MODELS,
    TEACHER,
    UNREDUCED,
    UPDATE,
    WEIGHTS,
    Bill,
)
from genesis.operations.plan.gathers import Gathers, Unit
from genesis.operations.plan.layout import HALF_BYTES, Layout, Workload, check_layout, forward_weight_bytes
from genesis.operations.plan.other_models import count_answers, count_reward_models, count_teacher
from genesis.operations.plan.record import ACTIVATIONS, CASTS, GRADIENTS, LOSS, Bytes
from genesis.operations.plan.sections import IDS_BYTES, Section, Sections, Setting, build_sections, build_setting
from genesis.operations.plan.state import Model, Parameter, StateBytes, build_shared_model, count_on_host, count_state
from genesis.optim.offload import NUM_BUFFERS, PIECE_BYTES
from genesis.optim.whole_matrices import BATCH_BYTES

DIGEST_BYTES: Final = 3 * 8 * 2**20
"""The scratch in which a device digests tensors for a save (`genesis_callbacks.checkpoint`)."""
_MATRIX_COPIES: Final = 3
"""Tensors of a batch of matrices while Muon multiplies them: stacked, normalised, and the next iterate."""
_MOST_PLAYED: Final = 3


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank gets from others, or sends to them.

    Args:
        gathered: When the whole model is gathered once.
        reduced: When all gradients are reduced once.
    """

    gathered: float
    reduced: float


@dataclass(frozen=True)
class Timeline:
    """The memory of a rank's device over a step.

    Args:
        peaks: The bytes at the highest point of each phase, by term.
        state: What is held between steps, on the device and on the host.
        on_host: What `cpu_offload` puts into the host's memory of it.
        gathered_whole_bytes: Bytes of the whole model as it is gathered; 0 if it is not sharded.
        sent: What ranks exchange under sharding.
        moved_inputs_bytes: Bytes of the inputs of blocks that are in the host's memory between forward and backward.
        notes: What is only estimated.
        stage: The place in the pipeline of this rank, from 0.
        stage_peaks: The highest point of each place in the pipeline, of which this one's is the highest.
    """

    peaks: dict[str, Bytes]
    state: StateBytes
    on_host: StateBytes
    gathered_whole_bytes: int
    sent: Sent
    moved_inputs_bytes: int
    notes: tuple[str, ...]
    stage: int = 0
    stage_peaks: tuple[int, ...] = ()

    @property
    def peak_phase(self) -> str:
        """The phase with the highest point."""
        return max(self.peaks, key=lambda phase: sum(self.peaks[phase].values()))

    @property
    def peak_bytes(self) -> int:
        """The bytes at the highest point."""
        return sum(self.peaks[self.peak_phase].values())


@lru_cache(maxsize=4096)
def play_step(workload: Workload, layout: Layout) -> Timeline:
    """Returns the memory of a step in which everything exists that later steps have, such as optimizer states.

    Of the ranks of a pipeline it is the one that needs most.

    Raises:
        UserError: Micro-batches do not divide the global batch, or the model cannot be spread like this.
    """
    check_layout(workload, layout)
    num_micro_batches = workload.num_micro_batches(layout)
    places = list_places(workload, layout)
    played = [_play_place(workload, layout, place, num_micro_batches) for place in places]
    peaks = tuple(one.peak_bytes for one in played)
    most = peaks.index(max(peaks))
    return replace(played[most], stage=most, stage_peaks=peaks)


def _play_place(workload: Workload, layout: Layout, place: Place, num_micro_batches: int) -> Timeline:
    model = build_shared_model(workload, layout.tensor_parallel)
    if layout.pipeline_parallel > 1:
        # Ranks of a pipeline gather their stages once for a window.
        layout = replace(layout, keeps_gathered=True)
        model = replace(model, parameters=tuple(filter(place.has, model.parameters)))
    setting = build_setting(workload, layout)
    sections = build_sections(workload, setting)
    state = count_state(model, workload, layout, setting.rounded_to)
    on_host = count_on_host(model, workload, layout, setting.rounded_to)
    player = _Player(workload, layout, place, model, setting, sections, state, on_host)
    player.play(num_micro_batches)
    return Timeline(
        player.bill.peaks,
        state,
        on_host,
        player.gathered_whole,
        player.count_sent(),
        player.moved_inputs * place.count_in_flight(num_micro_batches),
        sections.notes,
    )


class _Player:
    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        place: Place,
        model: Model,
        setting: Setting,
        sections: Sections,
        state: StateBytes,
        on_host: StateBytes,
    ) -> None:
        self.workload, self.layout, self.place = workload, layout, place
        self.model, self.setting = model, setting
        self.sections, self.state, self.on_host = sections, state, on_host
        self.bill = Bill()
        self.teacher = count_teacher(workload)
        self.reward_weights, self.reward_forward = count_reward_models(workload)
        every_n = {"none": 0, "block": 1}.get(str(layout.activation_checkpointing), layout.activation_checkpointing)
        self.recomputed = {
            index for index in place.blocks if isinstance(every_n, int) and every_n and not index % every_n
        }
        per_group = layout.blocks_per_recomputation
        num_blocks = len(sections.blocks)
        self.group_of = {
            index: range(index // per_group * per_group, min((index // per_group + 1) * per_group, num_blocks))
            for index in self.recomputed
        }
        """The blocks that are recomputed with each recomputed block."""
        starts = {group.start for group in self.group_of.values()} if layout.activation_offload else set()
        self.moved_inputs = sum(sections.blocks[index].input_bytes for index in starts)
        self.has_buckets = layout.strategy in ("replicated", "zero1") and layout.num_ranks > 1
        per_unit = layout.blocks_per_unit
        self.units = [list(place.blocks[start : start + per_unit]) for start in range(0, len(place.blocks), per_unit)]
        by_block: dict[int | None, list[Parameter]] = {}
        for parameter in model.parameters:
            by_block.setdefault(parameter.block, []).append(parameter)
        offloaded = layout.list_offloaded(num_blocks)
        self.root_unit = self._measure_unit(by_block.get(None, []), is_on_host=None in offloaded)
        self.unit_sizes = [
            self._measure_unit(
                [parameter for block in blocks for parameter in by_block[block]], is_on_host=blocks[0] in offloaded
            )
            for blocks in self.units
        ]
        every = (self.root_unit, *self.unit_sizes)
        self.gathers = Gathers(self.bill, layout, self.root_unit, self.unit_sizes)
        self._held_reduction = self._reduced_gradients = 0
        self.gathered_whole = sum(unit.gathered for unit in every) if layout.is_sharded else 0

    def count_sent(self) -> Sent:
        """Returns what a rank exchanges with those that share its shards."""
        layout, gather = self.layout, forward_weight_bytes(self.workload, self.layout)
        gathered = reduced = 0.0
        for parameter in self.model.parameters:
            num_shards = parameter.num_shards(layout)
            elements = parameter.gathered_elements(layout) * (num_shards - 1) / num_shards
            gathered += elements * min(gather, parameter.element_bytes)
            reduced += elements * layout.reduce_bytes if parameter.is_trained else 0.0
        return Sent(gathered, reduced)

    def _measure_unit(self, parameters: Sequence[Parameter], *, is_on_host: bool) -> Unit:
        layout, gather = self.layout, forward_weight_bytes(self.workload, self.layout)

        def gathered(parameter: Parameter) -> int:
            return parameter.gathered_elements(layout) * min(gather, parameter.element_bytes)

        several = [parameter for parameter in parameters if parameter.num_shards(layout) > 1]
        trained = [parameter for parameter in parameters if parameter.is_trained]
        largest = max((one.local_elements(layout) * one.element_bytes for one in parameters), default=0)
        return Unit(
            gathered=sum(map(gathered, parameters)),
            results=sum(map(gathered, several)),
            copies=sum(gathered(one) // one.num_shards(layout) for one in several),
            reduced=sum(one.gathered_elements(layout) for one in trained) * layout.reduce_bytes,
            shard=sum(one.local_elements(layout) for one in trained) * layout.reduce_bytes,
            own_shard=sum(one.local_elements(layout) * one.element_bytes for one in trained),
            from_host=largest if is_on_host else None,
        )

    # ---- the step

    def play(self, num_micro_batches: int) -> None:
        bill, layout, state, on_host = self.bill, self.layout, self.state, self.on_host
        bill.change(WEIGHTS, state.weights - on_host.weights)
        bill.change(FROZEN, state.frozen - on_host.frozen)
        bill.change(OPTIMIZER, state.optimizer - on_host.optimizer - state.moved)
        bill.change(GRADIENTS, state.gradients - on_host.gradients)
        if self.teacher is not None:
            bill.change(TEACHER, self.teacher.weights)
        bill.change(REWARD_MODELS, self.reward_weights)
        bill.enter("rest")
        answers = count_answers(self.workload, layout, self.model, self.sections, self.setting)
        if answers:
            bill.enter("answers")
            bill.see(answers)
            # Answers are scored when the cache is gone.
            scored = Counter({term: count for term, count in answers.items() if term not in (CACHE, LOSS)})
            scored.update(self.reward_forward)
            bill.see(scored)
        bill.enter("forward")
        if not self.has_buckets:
            bill.change(GRADIENTS, on_host.gradients - state.gradients)
        tokens = num_micro_batches * self.setting.num_tokens
        bill.change(BATCH, tokens * IDS_BYTES)
        if layout.pipeline_parallel > 1:
            self._play_pipeline(num_micro_batches)
        else:
            num_played = min(num_micro_batches, _MOST_PLAYED)
            for number in range(num_played):
                self._play_micro_batch(is_first=number == 0, is_last=number == num_played - 1)
        bill.enter("step")
        self._play_update()
        bill.change(BATCH, -bill.now[BATCH])
        bill.enter("save")
        if not self.workload.is_cpu and layout.cpu_offload < 1.0:
            bill.change(DIGEST, DIGEST_BYTES)

    def _play_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        bill = self.bill
        bill.enter("forward")
        if self.teacher is not None:
            bill.see(self.teacher.forward)
            bill.change(TEACHER, self.teacher.classes)
        bill.change(ACTIVATIONS, self.sections.tables_bytes)
        if self.layout.is_sharded:
            self._play_sharded(is_first=is_first, is_last=is_last)
        else:
            self._play_whole(is_first=is_first, is_last=is_last)
        bill.change(ACTIVATIONS, -self.sections.tables_bytes)
        if self.teacher is not None:
            bill.change(TEACHER, -self.teacher.classes)

    # ---- whole parameters: one device, DDP, ZeRO-1

    def _play_whole(self, *, is_first: bool, is_last: bool) -> None:
        bill, blocks = self.bill, self.sections.blocks
        self._forward(self.sections.embedding, is_first=is_first)
        for index in range(len(blocks)):
            self._forward_block(index, is_first=is_first)
        self._forward_head(is_first=is_first)
        if is_last:
            # The copies of autocast live on in what the backward reads; those of recomputed blocks do not.
            bill.change(CASTS, -sum(blocks[index].cached_casts for index in self.recomputed))
        bill.enter("backward")
        term, is_added = self._choose_gradients(is_first=is_first, is_last=is_last)
        self._backward_head(term, is_added=is_added)
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            self._recompute_before(index, has_casts=is_last)
            self._backward(block, term, is_added=is_added)
            if is_last:
                bill.change(CASTS, -block.cached_casts)
            self._drop_local(block, is_last=is_last)
        self._backward_embedding(term, is_added=is_added)
        self._drop_local(self.sections.embedding, is_last=is_last)
        if is_last:
            bill.change(UNREDUCED, -bill.now[UNREDUCED])

    def _choose_gradients(self, *, is_first: bool, is_last: bool) -> tuple[str, bool]:
        """Returns the term of this backward's gradients, and whether they are added to those that exist."""
        if not self.has_buckets:
            return GRADIENTS, not is_first
        # DDP's buckets hold the reduced gradients. Backwards before the last one do not use them.
        return UNREDUCED, not is_first or is_last

    def _drop_local(self, section: Section, *, is_last: bool) -> None:
        """Frees gradients outside of DDP's buckets once they were copied into these."""
        if self.has_buckets and is_last and self.bill.now[UNREDUCED]:
            self.bill.change(UNREDUCED, -min(section.gradient_bytes, self.bill.now[UNREDUCED]))

    # ---- sharded parameters

    def _play_sharded(self, *, is_first: bool, is_last: bool) -> None:
        self._forward_sharded(is_first=is_first)
        self.bill.enter("backward")
        self._backward_sharded(is_first=is_first, is_last=is_last)
        self._end_reductions()

    def _forward_sharded(self, *, is_first: bool) -> None:
        self.gathers.begin(is_first=is_first)
        if self.place.has_embedding:
            self._forward(self.sections.embedding, is_first=False)
        for number, blocks in enumerate(self.units):
            self.gathers.enter_forward(number)
            for index in blocks:
                self._forward_block(index, is_first=False)
            self.gathers.leave_forward(number)
        if self.place.has_head:
            self._forward_head(is_first=False)

    def _backward_sharded(self, *, is_first: bool, is_last: bool) -> None:
        if self.place.has_head:
            self._backward_head(GRADIENTS, is_added=False)
        for number in reversed(range(len(self.units))):
            self.gathers.enter_backward(number)
            for index in reversed(self.units[number]):
                block = self.sections.blocks[index]
                self._recompute_before(index)
                self._backward(block, GRADIENTS, is_added=False)
            self._end_unit(self.unit_sizes[number], is_first=is_first, is_last=is_last)
        if self.place.has_embedding:
            self._backward_embedding(GRADIENTS, is_added=False)
        elif self.place.has_head and self.workload.decoder.has_tied_embeddings:
            self.bill.change(LOSS, -self.sections.head.weight_gradient_bytes)
            self.bill.change(GRADIENTS, self.sections.head.weight_gradient_bytes)
        self._end_unit(self.root_unit, is_first=is_first, is_last=is_last)

    def _end_reductions(self) -> None:
        self.bill.change(COMMUNICATION, -self.bill.now[COMMUNICATION])
        self._held_reduction = 0

    # ---- a stage of a pipeline: `genesis.strategies.pipeline`, and torch's schedules

    def _play_pipeline(self, num_micro_batches: int) -> None:
        """Plays the forwards until the first backward, one more of each, the other backwards, and the reductions.

        Forwards without adapters, which come before, gather the same stages and keep nothing: they need less.
        """
        bill, place, sections = self.bill, self.place, self.sections
        in_flight = place.count_in_flight(num_micro_batches)
        stream = sections.blocks[0].input_bytes
        # The schedule allocates what it receives for all micro-batches, and keeps the result of each in flight.
        received = num_micro_batches * stream * (place.num_inputs + place.num_outputs)
        kept = in_flight * (sections.tables_bytes + stream * place.num_outputs)
        bill.enter("forward")
        bill.change(RECEIVED, received)
        bill.change(ACTIVATIONS, kept)
        before = bill.now[ACTIVATIONS]
        for number in range(in_flight):
            if number == in_flight - 1:
                # Of the last micro-batch, only some of the rank's stages have run before the first backward.
                of_one = (bill.now[ACTIVATIONS] - before) // max(1, number)
                missing = in_flight * place.stages_per_rank - place.count_forwards(num_micro_batches)
                not_yet = of_one * missing // place.stages_per_rank
                bill.change(ACTIVATIONS, -not_yet)
            self._forward_sharded(is_first=number == 0)
        bill.enter("backward")
        self._backward_sharded(is_first=True, is_last=False)
        if num_micro_batches > in_flight:
            bill.enter("forward")
            self._forward_sharded(is_first=False)
            bill.enter("backward")
            self._backward_sharded(is_first=False, is_last=False)
        for _ in range(in_flight - 1):
            self._backward_sharded(is_first=False, is_last=False)
        bill.change(ACTIVATIONS, not_yet - kept)
        for unit in (*reversed(self.unit_sizes), self.root_unit):
            self._end_unit(unit, is_first=False, is_last=True)
        self._end_reductions()
        bill.change(RECEIVED, -received)

    def _end_unit(self, unit: Unit, *, is_first: bool, is_last: bool) -> None:
        """Ends the backward of a unit: its gradients are kept whole, or reduced to a shard."""
        bill, layout = self.bill, self.layout
        is_reduced = is_last or layout.reduces_each
        fresh = bill.now[GRADIENTS] - self._reduced_gradients
        own_bytes = forward_weight_bytes(self.workload, layout)
        has_sum = not is_first and not layout.reduces_each
        if has_sum:  # they are added to the sum, which is in the type of the reduction
            bill.change(GRADIENTS, -fresh)
        self.gathers.leave_backward(unit, is_last=is_last)
        if not is_reduced:
            if not has_sum:
                bill.change(UNREDUCED, unit.reduced)
                bill.change(GRADIENTS, -fresh)
            return
        # The input of a reduction is freed when that of the next unit is made.
        bill.change(COMMUNICATION, -self._held_reduction)
        bill.change(COMMUNICATION, unit.reduced)
        self._held_reduction = unit.reduced
        if has_sum:
            bill.change(UNREDUCED, -unit.reduced)
        else:
            bill.change(GRADIENTS, -fresh)
        is_on_host = unit.from_host is not None
        narrow = unit.own_shard if layout.reduce_bytes != own_bytes else 0
        if is_on_host:
            bill.see(Counter({COMMUNICATION: unit.shard}))
        elif is_first or not layout.reduces_each:
            bill.see(Counter({COMMUNICATION: max(0, unit.shard - narrow)}))
            bill.change(GRADIENTS, unit.own_shard)
            self._reduced_gradients += unit.own_shard
        else:
            bill.see(Counter({COMMUNICATION: unit.shard}))

    # ---- sections

    def _forward(self, section: Section, *, is_first: bool, is_recomputed: bool = False) -> None:
        if is_first and not self.layout.is_sharded:
            self.bill.change(CASTS, section.cached_casts)
        self.bill.run(section.forward_without if is_recomputed else section.forward)

    def _forward_block(self, index: int, *, is_first: bool) -> None:
        block, group = self.sections.blocks[index], self.group_of.get(index)
        self._forward(block, is_first=is_first, is_recomputed=group is not None)
        if group is not None and index != group.start:  # of a group only the input of the first block is kept
            self.bill.change(ACTIVATIONS, -block.input_bytes)
        if group is not None and self.layout.activation_offload and index == group.start and index:
            # The copy of the input before has ended: it began when this group's predecessor did.
            before = self.sections.blocks[self.group_of[index - 1].start]
            self.bill.change(ACTIVATIONS, -before.input_bytes)

    def _recompute_before(self, index: int, *, has_casts: bool = False) -> None:
        """Plays the second forward of a group before the backward of its last block."""
        group = self.group_of.get(index)
        if group is None or index != group[-1]:
            return
        if self.layout.activation_offload and group.start:
            # The input before comes back while this group runs backward; its own is there.
            self.bill.change(ACTIVATIONS, self.sections.blocks[self.group_of[group.start - 1].start].input_bytes)
        for number in group:
            block, unit = self.sections.blocks[number], number // self.layout.blocks_per_unit
            is_first_of_unit = number % self.layout.blocks_per_unit == 0
            if self.layout.is_sharded and is_first_of_unit and unit != index // self.layout.blocks_per_unit:
                self.gathers.enter_recomputation(unit)
            if has_casts:
                self.bill.change(CASTS, block.cached_casts)
            self.bill.run(block.recompute if number == index else block.forward)

    def _backward(self, section: Section, term: str, *, is_added: bool) -> None:
        course = section.backward_added if is_added else section.backward
        self.bill.run(course._replace(peak=_rename(course.peak, term), end=_rename(course.end, term)))

    def _forward_head(self, *, is_first: bool) -> None:
        head = self.sections.head
        if not head.has_late_gradient:
            self.bill.change(LOSS, head.weight_gradient_bytes)
        self._forward(head, is_first=is_first)

    def _backward_head(self, term: str, *, is_added: bool) -> None:
        head = self.sections.head
        self._backward(head, term, is_added=is_added)
        if head.has_late_gradient:
            self.bill.change(LOSS, head.weight_gradient_bytes)
        if head.weight_gradient_bytes and not self.workload.decoder.has_tied_embeddings:
            self.bill.change(LOSS, -head.weight_gradient_bytes)
            if not is_added:
                self.bill.change(term, head.weight_gradient_bytes)

    def _backward_embedding(self, term: str, *, is_added: bool) -> None:
        """Runs the last backward; a tied weight's two gradients are added before they join others."""
        self._backward(self.sections.embedding, term, is_added=is_added)
        if self.workload.decoder.has_tied_embeddings and self.place.has_head:
            self.bill.change(LOSS, -self.sections.head.weight_gradient_bytes)

    # ---- the update

    def _play_update(self) -> None:
        layout = self.layout
        if self.state.moved:
            most = max(len(one.moments) for one in self.workload.optimizer.parts)
            self.bill.see(Counter({UPDATE: min(self.state.moved, most * NUM_BUFFERS * PIECE_BYTES)}))
        matrices = [one for one in self.model.trained if self.workload.optimizer.of(one.group).whole_matrices]
        if not matrices or layout.cpu_offload >= 1.0:
            return
        whole = [one.num_elements for one in matrices]
        ranks = layout.num_ranks if layout.strategy == "replicated" else 1
        batch = min(BATCH_BYTES, HALF_BYTES * -(-sum(whole) // ranks))
        batch = max(batch, HALF_BYTES * max(whole))
        working = _MATRIX_COPIES * batch
        if layout.is_sharded:
            local = sum(one.local_elements(layout) for one in matrices)
            # The rows that are sent and received in bfloat16, twice.
            working += local * 4 * HALF_BYTES
        elif ranks > 1:
            working += batch * ranks
        self.bill.see(Counter({UPDATE: working}))


def _rename(found: Bytes, term: str) -> Bytes:
    if term == GRADIENTS or GRADIENTS not in found:
        return found
    renamed = Counter(found)
    renamed[term] += renamed.pop(GRADIENTS)
    return renamed
