"""Pipeline parallelism: consecutive layers on consecutive ranks, which micro-batches pass one behind the other.

P  ranks of a pipeline     v  stages of a rank     M  micro-batches of a window     B S D  the residual stream

Rank r has the stages r, r + P, r + 2 P and so on: with one stage for each rank the schedule is 1F1B, with several the
interleaved one, both torch's. A share (P - 1) / (v M + P - 1) of the time passes in waiting, the bubble.

All ranks of a pipeline read the same rows, so that micro-batches travel by number: documents of any length, labels and
values need no cutting, and only the residual stream and its gradient are sent. Torch gets their shapes beforehand:
without them it would find them by a trial forward, and two shapes of evaluation in turn would hang.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Int32, Int64
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from genesis.base.device import CPU, is_host, record_timer
from genesis.base.errors import UserError
from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.model.decoder import Block, Decoder
from genesis.model.part import Statistics
from genesis.model.stages import NumberedBlocks, check_micro_batches, ideal_bubble_share
from genesis.model.statistics import add_statistics, list_auxiliary_losses
from genesis.objectives.objective import TOKENS, HeadResult
from genesis.strategies.axis_traffic import AxisTraffic
from genesis.strategies.micro_batches import add_result, scale_terms
from genesis.strategies.wrap import free_gathered_parameters
from genesis_callbacks.step_parts import Part as StepPart

_MAX_OPEN_WINDOWS: Final = 64
"""A device that is further behind loses the times of its oldest windows."""


# ---- the stages of a rank


class Stage(nn.Module):
    """Some consecutive layers of a decoder that owns them, with the embedding or the head at the ends.

    Its parameters are those of the decoder, under other names; FSDP2 takes it for a root. It computes one micro-batch
    of the current window, that with the number `number`.

    Attributes:
        layers: The numbers of its layers.
        number: The micro-batch.
        window: The current window.
    """

    def __init__(self, decoder: Decoder, layers: range) -> None:
        super().__init__()
        self.layers, self.number = layers, 0
        self.is_first, self.is_last = layers.start == 0, layers.stop == decoder.config.num_layers
        self.blocks = nn.ModuleList(decoder.numbered_blocks[number] for number in layers)
        is_tied = decoder.config.has_tied_embeddings
        if self.is_first or (self.is_last and is_tied):
            self.embedding = decoder.embedding
        if self.is_last:
            self.norm = decoder.norm
            if not is_tied:
                self.output = decoder.output
        self.window: StagedWindow | None = None
        vars(self)["decoder"] = decoder  # not as a submodule, which would have the parameters of the other stages

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Returns the residual stream after this stage; after the last one the loss that is to run backward."""
        window = self.window
        assert window is not None
        with window.forward_context():
            return self._compute(x, window)

    def _compute(self, x: Tensor | None, window: "StagedWindow") -> Tensor:
        decoder: Decoder = vars(self)["decoder"]
        micro_batch = window.micro_batches[self.number]
        head = window.build_head(micro_batch) if self.is_last else None
        if x is None:
            x = decoder.embed(micro_batch.input_ids)
        counted = micro_batch.labels != IGNORE_INDEX if window.is_training else None
        documents = micro_batch.document_ids, micro_batch.document_offsets
        inputs = decoder.prepare(x, micro_batch.input_ids, *documents, counted=counted)
        statistics: dict[str, Statistics] = {}
        for blocks in decoder.groups:
            if blocks.start in self.layers:
                x, reported = decoder.run_blocks(blocks, x, inputs)
                statistics |= reported
        if window.is_training:
            add_statistics(window.part_sums, statistics)
        if head is not None:
            result = decoder.finish(x, head)
            if not window.is_training:
                window.results.append(result)
                return x
            window.sums = add_result(window.sums, result)
            return torch.stack((scale_terms(result.terms, statistics, window.scales),))
        losses = list_auxiliary_losses(statistics) if window.is_training else []
        if losses:
            joined: Tensor = _JoinLoss.apply(x, torch.stack(losses).sum() * window.scales[TOKENS])  # type: ignore[no-untyped-call]
            return joined
        return x


class _JoinLoss(torch.autograd.Function):
    """Passes the residual stream on; a loss of this stage gets the gradient 1 when the stream gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.detach()  # not `x` itself, for which autograd makes a view, of which FSDP2 warns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)


@dataclass
class StagedWindow:
    """What the stages compute, and the sums of what the stages of this rank have computed.

    Args:
        micro_batches: The same on all ranks of a pipeline.
        build_head: Returns the head of the forward of a micro-batch; called on the rank with the last stage alone.
        forward_context: The context of a forward: torch's schedules run forwards and backwards in one call.
        scales: The factor of each term before its backward, by unit.
        is_training: Whether backwards follow.
        timing: Counts the time of a `with` block as a part of the step.
        results: What the heads returned for each micro-batch, on the rank with the last stage, without backwards.
        sums: The objective's sums, on the rank with the last stage.
        part_sums: The statistics of the parts of this rank's stages.
    """

    micro_batches: Sequence[MicroBatch]
    build_head: Callable[[MicroBatch], Callable[[Tensor, Tensor], Any]]
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]]
    scales: Mapping[str, float] = field(default_factory=dict)
    is_training: bool = False
    timing: Callable[[StepPart], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    results: list[Any] = field(default_factory=list)
    sums: HeadResult = field(default_factory=lambda: HeadResult({}, {}))
    part_sums: dict[str, Tensor] = field(default_factory=dict)


def cut_stages(decoder: Decoder, divided: Sequence[range], own: Sequence[int]) -> list[Stage]:
    """Leaves only the layers of some stages in a freshly built decoder, in place, and returns these stages.

    The names of what it keeps stay. The blocks of other ranks remain in `decoder.blocks_elsewhere`, on the meta device.

    Args:
        decoder: The decoder.
        divided: The layers of each stage of the pipeline.
        own: The numbers of the stages of this rank.
    """
    blocks: dict[int, Block] = decoder.numbered_blocks
    held = {number: blocks.pop(number) for stage in own for number in divided[stage]}
    decoder.blocks_elsewhere = blocks
    decoder.register_module("blocks", NumberedBlocks(held))
    decoder.groups = [divided[stage] for stage in own]
    has_first, has_last = 0 in own, len(divided) - 1 in own
    is_tied = decoder.config.has_tied_embeddings
    if not has_last:
        decoder.register_module("norm", None)
        if not is_tied:
            decoder.register_module("output", None)
    if is_tied and has_last and not has_first:
        decoder.copies = frozenset({"embedding.weight"})
    elif not has_first:
        decoder.register_module("embedding", None)
    decoder.forward = _refuse_forward  # type: ignore[method-assign]
    return [Stage(decoder, divided[stage]) for stage in own]


def _refuse_forward(*_: Any, **__: Any) -> Any:
    raise UserError(
        "pipeline_parallel divides the model among ranks, so that none of them can run it alone, as an objective or a "
        "callback wants to: leave pipeline_parallel at 1 for it"
    )


# ---- the time in which a rank computes


class WindowTimes(NamedTuple):
    """Times of the windows of a rank, in seconds.

    Args:
        busy: The sum of the times in which it computed.
        whole: The sum of the times from the start of a window to the end of its last backward on this rank.
        num_windows: The number of windows.
    """

    busy: float = 0.0
    whole: float = 0.0
    num_windows: int = 0


class StageClock:
    """Measures when the stages of a rank compute; on a device by events, for which the host does not wait.

    Attributes:
        ideal_share: See `ideal_bubble_share`, for the last window.
    """

    def __init__(self) -> None:
        self._device = torch.device(CPU)
        self._windows: deque[list[Any]] = deque(maxlen=_MAX_OPEN_WINDOWS)
        self.ideal_share = 0.0

    def begin_window(self, device: torch.device, ideal_share: float) -> None:
        """Notes that a window begins on a device."""
        self._device, self.ideal_share = device, ideal_share
        self._windows.append([self._mark()])

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Counts the time of a `with` block."""
        self._windows[-1].append(self._mark())
        yield
        self._windows[-1].append(self._mark())

    def take(self) -> WindowTimes:
        """Returns the times of the windows since the last call that the device has passed."""
        taken = WindowTimes()
        while self._windows and (is_host(self._device.type) or self._windows[0][-1].query()):
            start, *marks = self._windows.popleft()
            busy = sum(self._measure(*pair) for pair in zip(marks[::2], marks[1::2], strict=True))
            whole = self._measure(start, marks[-1])
            taken = WindowTimes(taken.busy + busy, taken.whole + whole, taken.num_windows + 1)
        return taken

    def _mark(self) -> Any:
        return time.perf_counter() if is_host(self._device.type) else record_timer(self._device)

    def _measure(self, begin: Any, end: Any) -> float:
        return float(end - begin) if is_host(self._device.type) else float(begin.elapsed_time(end)) / 1e3


# ---- the pipeline


class _NumberedStage(PipelineStage):
    """Torch's stage, which also gives ours the number of the micro-batch, and the clock the times of its work."""

    submod: Stage
    clock: StageClock
    traffic: AxisTraffic

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Runs the forward of a micro-batch."""
        self.submod.number = fwd_chunk_id
        with self._working_on("forward"):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        """Runs the backward of a micro-batch."""
        with self._working_on("backward"):
            super().backward_one_chunk(*arguments, **options)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the transfers of an output to the next stage."""
        return self._count(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the transfers of a gradient to the stage before."""
        return self._count(super().get_bwd_send_ops(bwd_chunk_id))

    def _count(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        for operation in operations:
            self.traffic.note(operation.tensor.nbytes)
        return operations

    @contextlib.contextmanager
    def _working_on(self, part: StepPart) -> Iterator[None]:
        assert self.submod.window is not None
        with self.submod.window.timing(part), self.clock.computing():
            yield


class Pipeline:
    """Runs windows through the stages of a pipeline; this rank computes its own. All ranks of it call it alike.

    Args:
        decoder: The decoder, cut.
        stages: The stages of this rank.
        group: The ranks of the pipeline.
        device: Where this rank computes.
        dtype: The dtype of the residual stream.
        clock: Measures this rank's work in training.
        num_shares: The number of ranks that share the tokens of each row.
        traffic: Counts what this rank sends to the others.
    """

    def __init__(
        self,
        decoder: Decoder,
        stages: Sequence[Stage],
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        clock: StageClock,
        num_shares: int = 1,
        traffic: AxisTraffic | None = None,
    ) -> None:
        self._decoder, self.stages, self._group, self._device, self._dtype = decoder, stages, group, device, dtype
        self._clock, self._num_shares, self._traffic = clock, num_shares, traffic or AxisTraffic()
        self._rank, self._num_ranks = group.rank(), group.size()
        self._schedule: Any = None
        self._schedule_key: tuple[int, tuple[int, int, int]] | None = None
        self._names: dict[bool, tuple[list[str], list[str], dict[str, torch.Size]]] = {}
        decoder.forward = self.run  # type: ignore[assignment, method-assign]  # it runs no more than heads

    # ---- training

    def train(self, window: StagedWindow) -> None:
        """Runs all forwards and backwards of a window, reduces the gradients, and adds those of tied embeddings."""
        num_micro_batches = len(window.micro_batches)
        check_micro_batches(num_micro_batches, self._num_ranks, len(self.stages))
        shapes = {self._shape_of(micro_batch) for micro_batch in window.micro_batches}
        assert len(shapes) == 1, "rows of text have the same length"
        (shape,) = shapes
        if self._schedule_key != (num_micro_batches, shape):
            self._schedule = self._build_schedule(num_micro_batches, shape)
            self._schedule_key = num_micro_batches, shape
        ideal_share = ideal_bubble_share(self._num_ranks, len(self.stages), num_micro_batches)
        self._clock.begin_window(self._device, ideal_share)
        # Torch cuts a target into those of the micro-batches; ours need none.
        numbers = torch.arange(num_micro_batches) if self.stages[-1].is_last else None
        with self._running(window), torch.autocast(self._device.type, enabled=False):
            self._schedule.step(target=numbers, return_outputs=False)
        if self._decoder.config.has_tied_embeddings and (self.stages[0].is_first or self.stages[-1].is_last):
            self._add_gradients_of_copies()

    def _shape_of(self, micro_batch: MicroBatch) -> tuple[int, int, int]:
        """Returns the shape of the residual stream of a micro-batch on this rank."""
        num_rows, width = micro_batch.input_ids.shape
        return num_rows, width // self._num_shares, self._decoder.config.dim

    def _build_schedule(self, num_micro_batches: int, shape: tuple[int, int, int]) -> Any:
        num_stages = len(self.stages) * self._num_ranks
        stream = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages: list[Any] = []
        for number, stage in enumerate(self.stages):
            stages.append(
                _NumberedStage(
                    stage,
                    self._rank + number * self._num_ranks,
                    num_stages,
                    self._device,
                    input_args=() if stage.is_first else stream,
                    output_args=loss if stage.is_last else stream,
                    group=self._group,
                )
            )
            stages[-1].clock, stages[-1].traffic = self._clock, self._traffic
        # `scale_grads` would divide every gradient by the number of micro-batches: the scales of terms are in the loss.
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss.sum(), "scale_grads": False}
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, num_micro_batches, **options)
        return Schedule1F1B(stages[0], num_micro_batches, **options)

    @contextlib.contextmanager
    def _running(self, window: StagedWindow) -> Iterator[None]:
        for stage in self.stages:
            stage.window = window
        yield
        for stage in self.stages:
            stage.window = None

    def _add_gradients_of_copies(self) -> None:
        """Adds the gradients of the embedding on the first and the last rank, which both hold it."""
        gradient = self._decoder.embedding.weight.grad
        if gradient is None:  # frozen, under adapters
            return
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not local.numel():
            return
        sent = local.to(self._device)  # offloaded gradients are on the host
        received = torch.empty_like(sent)
        self._exchange(sent, received, peer=self._num_ranks - 1 - self._rank)
        local += received.to(local.device)

    def _exchange(self, sent: Tensor | None, received: Tensor | None, *, peer: int, source: int | None = None) -> None:
        operations = []
        if sent is not None:
            self._traffic.note(sent.nbytes)
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=peer))
        if received is not None:
            source = peer if source is None else source
            operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    # ---- evaluation

    @torch.no_grad()
    def evaluate(self, window: StagedWindow) -> None:
        """Runs the forwards of a window, of any number of micro-batches of any shape, and frees gathered parameters.

        The ranks work in step: at each time a rank sends what it has just computed, receives its next input, and
        computes. As all of them know which rank sends what, no two ranks can wait for each other.
        """
        next_rank, last_rank = (self._rank + 1) % self._num_ranks, (self._rank - 1) % self._num_ranks
        num_rounds = -(-len(window.micro_batches) // self._num_ranks)
        per_round = self._num_ranks * len(self.stages)
        made: Tensor | None = None
        with self._running(window):
            for moment in range(num_rounds * per_round + self._num_ranks - 1):
                number, stage = self._find_work(moment - self._rank, len(window.micro_batches))
                x: Tensor | None = None
                if stage is not None and not stage.is_first:
                    shape = self._shape_of(window.micro_batches[number])
                    x = torch.empty(shape, dtype=self._dtype, device=self._device)
                self._exchange(made, x, peer=next_rank, source=last_rank)
                made = None
                if stage is not None:
                    stage.number = number
                    out = stage(x)
                    made = None if stage.is_last else out
        for stage in self.stages:
            free_gathered_parameters(stage)

    def run(
        self,
        input_ids: Int64[Tensor, "B S"],
        *,
        document_ids: Int32[Tensor, "B S"] | None = None,
        document_offsets: Int32[Tensor, " num_documents+1"] | None = None,
        head: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Returns the tensor that `head` returns on the last stage: the decoder's forward, without a graph.

        All ranks of the pipeline call it for the same tokens, and it waits for all stages. See `Decoder.forward`.

        Raises:
            UserError: A stage calls it in a window, when the other stages compute other forwards.
        """
        if any(stage.window is not None for stage in self.stages):
            _refuse_forward()
        documents = torch.zeros_like(input_ids, dtype=torch.int32) if document_ids is None else document_ids
        # A forward without statistics reads no labels.
        micro_batch = MicroBatch(input_ids, input_ids, documents, document_offsets)
        window = StagedWindow([micro_batch], lambda _: head, contextlib.nullcontext)
        self.evaluate(window)
        last = self._num_ranks - 1
        described: list[Any] = [(result.shape, result.dtype) for result in window.results] or [None]
        dist.broadcast_object_list(described, group=self._group, group_src=last)
        ((shape, dtype),) = described
        (result,) = window.results or [torch.empty(shape, dtype=dtype, device=self._device)]
        found: Tensor = result.contiguous()
        dist.broadcast(found, group=self._group, group_src=last)
        return found

    def _find_work(self, turn: int, num_micro_batches: int) -> tuple[int, Stage | None]:
        """Returns the micro-batch and the stage of this rank's turn; the stage is None where it has nothing to do."""
        round_of_turn, within = divmod(turn, self._num_ranks * len(self.stages))
        stage, column = divmod(within, self._num_ranks)
        number = round_of_turn * self._num_ranks + column
        return number, self.stages[stage] if turn >= 0 and number < num_micro_batches else None

    # ---- figures

    def share_figures(self, window: StagedWindow) -> tuple[HeadResult, dict[str, Tensor]]:
        """Returns this rank's share of the sums of a window, under the names of all stages.

        The last stage has the objective's sums and each stage the statistics of its parts; the other ranks give 0.
        It communicates in the first window of training, and of evaluation, in which the ranks exchange the names.
        """
        if window.is_training not in self._names:
            own = [*map(list, window.sums)], {name: value.shape for name, value in window.part_sums.items()}
            of_ranks: list[Any] = [None] * self._num_ranks
            dist.all_gather_object(of_ranks, own, group=self._group)
            (terms, figures), _ = of_ranks[-1]
            shapes = {name: shape for _, of_parts in of_ranks for name, shape in of_parts.items()}
            self._names[window.is_training] = terms, figures, shapes
        terms, figures, shapes = self._names[window.is_training]
        zero = torch.zeros((), device=self._device)
        sums = HeadResult(
            *(
                {name: values.get(name, zero) for name in names}
                for names, values in zip((terms, figures), window.sums, strict=True)
            )
        )
        parts = {
            name: window.part_sums[name]
            if name in window.part_sums
            else torch.zeros(shape, dtype=torch.float64, device=self._device)
            for name, shape in shapes.items()
        }
        return sums, parts
