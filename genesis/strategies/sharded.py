"""Sharded: every rank holds a part of the parameters, gradients and optimizer state (FSDP2)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchmetrics import Metric

from genesis.base.errors import UserError
from genesis.data.loader import plan_micro_batches
from genesis.data.window import MicroBatch
from genesis.model.compilation import CompileBlocks, resolve_compilation
from genesis.model.decoder import Decoder
from genesis.model.expert_share import check_expert_share
from genesis.model.language_model import LanguageModel
from genesis.model.recomputation import ActivationCheckpointing
from genesis.model.shares import share_context, share_matrices
from genesis.model.stages import check_micro_batches, divide_layers
from genesis.objectives.objective import Head, HeadResult, Objective, prepare
from genesis.objectives.run_options import (
    RunOptions,
    check_context_share,
    check_has_plain_experts,
    check_optimizer_offload,
    check_pipeline,
    check_tensor_share,
)
from genesis.objectives.vocabulary import WHOLE, Vocabulary
from genesis.optim.offload_share import read_cpu_offload
from genesis.strategies.axis_traffic import AxisTraffic
from genesis.strategies.context_parallel import ContextExchange, ContextVocabulary
from genesis.strategies.cut_vocabulary import CutVocabulary
from genesis.strategies.degrees import AXIS_NAMES, Degrees, list_divisors, place_on, warn_of_crossing
from genesis.strategies.desync import DesyncWatchdog
from genesis.strategies.float8_gather import gather_in_float8
from genesis.strategies.gathered import GatheringChoice, KeepGathered
from genesis.strategies.host_memory import HostOffload
from genesis.strategies.layout import ParallelLayout, lay_out
from genesis.strategies.mesh import WorldMesh
from genesis.strategies.micro_batches import WindowLoss, add_result, sum_in_turn, train_in_turn
from genesis.strategies.pipeline import Pipeline, Stage, StageClock, StagedWindow, cut_stages
from genesis.strategies.start import Launcher, Start
from genesis.strategies.tensor_parallel import MatrixCutter, RowShare, check_torch
from genesis.strategies.timeouts import choose_timeout, read_timeout
from genesis.strategies.wrap import ShardOptions, allocate_sharded, apply_wrappers, set_resharding
from genesis_callbacks.step_parts import timing

DType = Literal["float32", "bfloat16"]


class Sharded(ModelParallelStrategy):
    """FSDP2 over all ranks, one or many, which read different data unless they share rows, matrices or layers.

    Args:
        shard: `full` frees a unit's parameters after its forward and gathers them again in backward; `grad_op` keeps
            them from forward to backward (reduced gradients and optimizer state are sharded all the same); `hybrid`
            shards as `full` within a group of `ranks_per_shard_group` ranks and replicates over the groups.
        ranks_per_shard_group: Size of a group under `hybrid`; by default the ranks of one node.
        blocks_per_unit: Blocks whose parameters are gathered by one collective.
        max_gathers_in_flight: Maximum number of units gathered or being gathered at once; 1 disables prefetching.
        gather_dtype: The dtype in which parameters are gathered and computed; by default bfloat16 under `bf16-mixed`,
            else the parameters' own.
        reduce_dtype: The dtype in which gradients are reduced.
        gradient_reduction: After every window, or after every micro-batch. After every window, gradients are added up
            before the reduction, so that with two or more micro-batches every rank holds all gradients of the model in
            `reduce_dtype` (4 bytes for each parameter), under any `shard`. After every micro-batch, gradients stay
            sharded, and communication grows with the number of micro-batches.
        keep_gathered: Whether parameters stay gathered between the micro-batches of a window: `true`, `false`, or
            `auto`, which keeps them if after the first window the device's free memory exceeds what they take by 20%,
            on every rank, and never on CPUs. A window then gathers each unit once, and every rank holds the whole model
            in `gather_dtype` until the window's last backward. Losses are the same.
        expert_parallel: Number of ranks that share the experts of a mixture; each holds as many experts, and the ranks
            send each other the rows of their tokens. 1 gives every rank all experts, sharded like other weights.
        tensor_parallel: Number of ranks that share the matrices of each layer and the tokens of each row.
        context_parallel: Number of ranks that share the tokens of each row.
        pipeline_parallel: Number of ranks among which the layers are divided, in their order; the micro-batches of a
            window pass them one behind the other. It needs at least as many micro-batches.
        stages_per_rank: Parts of the model on each rank of a pipeline; several make the ranks wait less and send more.
        layers_per_stage: The number of layers of each stage of a pipeline, of which there are `pipeline_parallel` times
            `stages_per_rank`; by default the largest stage has as few operations as possible, those of the head
            included.
        cpu_offload: Share of the blocks whose parameters, gradients and optimizer states are in the host's memory
            between uses, from 0 to 1, by FSDP2's own policy: the host updates them. `true`, or 1, is the whole model
            with its embedding and head.
        activation_checkpointing: `none`, `block`, or n for every n-th block.
        blocks_per_recomputation: Consecutive blocks that are recomputed together, with `block`: only the input of the
            first is kept, and the backward holds the activations of all of them at once.
        activation_offload: Whether the inputs of recomputed blocks lie in the host's memory from their forward to their
            backward, with `block`.
        optimizer_offload: Share of the optimizer's states that lies in the host's memory, from 0 to 1: each step they
            pass through the device, piece by piece, and the device updates.
        compile_blocks: Whether each block is compiled by torch.compile; `auto` for CUDA devices with Triton alone.
        desync_seconds: If a rank is alone in a forward for longer, the run ends and names it; the first two windows
            of each rank, in which it compiles and connects, may take any time.
        process_group_backend: `gloo` or `nccl`; by default the device's own backend.
        timeout_seconds: Time limit of a collective. By default longer than `HangWatch` waits before it ends a run and
            names the rank for which the others wait, or 1,800 s without `HangWatch`.

    Attributes:
        start: The record that the ranks compare after they have joined the process group.
        hang_seconds: After how long at most `HangWatch` ends a run that hangs; None without one.
        offload: What lies in the host's memory.
        stage_clock: Measures when the stages of this rank compute; None without a pipeline.
        traffic: Counts what this rank sends along each axis on which that can be counted.
        vocabulary: What computes losses with the output weight, which ranks may share.
    """

    def __init__(
        self,
        shard: Literal["full", "grad_op", "hybrid"] = "full",
        ranks_per_shard_group: int | None = None,
        blocks_per_unit: int = 1,
        max_gathers_in_flight: int = 2,
        gather_dtype: DType | None = None,
        reduce_dtype: DType = "float32",
        gradient_reduction: Literal["window", "micro_batch"] = "window",
        keep_gathered: KeepGathered = "auto",
        expert_parallel: int = 1,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        pipeline_parallel: int = 1,
        stages_per_rank: int = 1,
        layers_per_stage: list[int] | None = None,
        cpu_offload: bool | float = False,
        activation_checkpointing: ActivationCheckpointing = "none",
        blocks_per_recomputation: int = 1,
        activation_offload: bool = False,
        optimizer_offload: float = 0.0,
        compile_blocks: CompileBlocks = False,
        desync_seconds: float = 300.0,
        process_group_backend: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=read_timeout(timeout_seconds),
        )
        self.cpu_offload = read_cpu_offload(cpu_offload)
        if self.cpu_offload and optimizer_offload:
            raise UserError(
                f"optimizer_offload is {optimizer_offload:g}, and cpu_offload is {self.cpu_offload:g}, which keeps "
                "optimizer states in the host's memory and updates them there: set one of them back"
            )
        self.shard = shard
        self.ranks_per_shard_group = ranks_per_shard_group
        self.blocks_per_unit = blocks_per_unit
        self.max_gathers_in_flight = max_gathers_in_flight
        self.gather_dtype = gather_dtype
        self.reduce_dtype = reduce_dtype
        self.gradient_reduction = gradient_reduction
        self.keep_gathered = keep_gathered
        self._axes = {"ep": expert_parallel, "tp": tensor_parallel, "cp": context_parallel, "pp": pipeline_parallel}
        for name, value in self._axes.items():
            if value < 1:
                raise UserError(f"{AXIS_NAMES[name]}_parallel is {value}; it is a number of ranks, at least 1")
        if stages_per_rank < 1:
            raise UserError(f"stages_per_rank is {stages_per_rank}; it is a number of stages, at least 1")
        if pipeline_parallel == 1 and (stages_per_rank > 1 or layers_per_stage is not None):
            option = "stages_per_rank" if stages_per_rank > 1 else "layers_per_stage"
            raise UserError(f"{option} is given, and pipeline_parallel is 1: set it to 2 or more, or remove {option}")
        self.stages_per_rank = stages_per_rank
        self.layers_per_stage = layers_per_stage
        self.activation_checkpointing = activation_checkpointing
        self.blocks_per_recomputation = blocks_per_recomputation
        self.offload = HostOffload(
            activations=activation_offload,
            optimizer_share=optimizer_offload,
            has_units=self.cpu_offload > 0.0,
        )
        self.compile_blocks = resolve_compilation(compile_blocks)
        self.desync_seconds = desync_seconds
        self.timeout_seconds = timeout_seconds
        self.hang_seconds: float | None = None
        self.start = Start()
        self._watchdog: DesyncWatchdog | None = None
        self._gathering: GatheringChoice | None = None
        self._mesh: WorldMesh | None = None
        self._layout: ParallelLayout | None = None
        self.vocabulary: Vocabulary = WHOLE
        self._stages: list[Stage] = []
        self.pipeline: Pipeline | None = None
        self.stage_clock = StageClock() if pipeline_parallel > 1 else None
        counted = ("pp",) if self.compile_blocks else ("tp", "cp", "pp")
        self.traffic = {AXIS_NAMES[axis]: AxisTraffic() for axis in counted if self._axes[axis] > 1}

    # ---- the layout, for the training step

    @property
    def layout(self) -> ParallelLayout:
        """The role of this rank among all ranks; available once the ranks have joined the process group."""
        assert self._layout is not None, "setup_environment makes the layout"
        return self._layout

    @property
    def _num_ranks(self) -> int:
        return self.num_nodes * self.num_processes

    def _plan_degrees(self, given: Mapping[str, int] | None = None) -> Degrees:
        axes = self._axes if given is None else given
        if self.shard != "hybrid":
            return Degrees(**axes).resolve(self._num_ranks)
        of_stage, rest = divmod(self._num_ranks, axes["pp"])
        if rest or not of_stage:
            return Degrees(**axes).resolve(self._num_ranks)  # which refuses them
        group = self.ranks_per_shard_group or min(self.num_processes, of_stage)
        if group < 1 or of_stage % group:
            raise UserError(
                f"ranks_per_shard_group {group} does not divide {of_stage} ranks; one of {list_divisors(of_stage)} does"
            )
        return Degrees(dp_replicate=of_stage // group, **axes).resolve(self._num_ranks)

    @property
    def needs_fixed_rows(self) -> bool:
        """Whether all rows of a run have one length: ranks divide it, and a pipeline's schedule has one shape."""
        return self._axes["cp"] * self._axes["tp"] * self._axes["pp"] > 1

    @property
    def parallel_degrees(self) -> dict[str, int]:
        """The number of ranks for each kind of parallelism, for the manifests of checkpoints."""
        return self.layout.degrees.named()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's index among ranks with different data, in the form that Lightning and its callbacks need."""
        return {"num_replicas": self.layout.data_world_size, "rank": self.layout.data_rank}

    def check_options(self, run: RunOptions) -> None:
        """Refuses what ranks would refuse later, each for itself; see `LayoutStrategy`."""
        check_optimizer_offload(run, self.offload.optimizer_share)
        shared = [name for name, ranks in self._axes.items() if ranks > 1]
        if run.decoder.body is not None and shared:
            raise UserError(
                f"{AXIS_NAMES[shared[0]]}_parallel is {self._axes[shared[0]]}, and ranks cannot share the layers of "
                f"another library ({type(run.decoder.body).__name__}): set it to 1, and shard the model by FSDP2 alone"
            )
        self._check_degrees(run, self._axes, partial(self._fits, run))

    def _fits(self, run: RunOptions, axis: str, degree: int) -> bool:
        """Returns whether these ranks can train a run with another degree of one axis."""
        if axis == "pp" and degree == 1 and (self.stages_per_rank > 1 or self.layers_per_stage is not None):
            return False
        try:
            self._check_degrees(run, {**self._axes, axis: degree}, lambda *_: False)
        except UserError:
            return False
        return True

    def _check_degrees(self, run: RunOptions, axes: Mapping[str, int], fits: Callable[[str, int], bool]) -> None:
        """Refuses degrees that do not fit the model, the batch or each other.

        Args:
            run: The run.
            axes: The degree of each axis.
            fits: Whether the run could be trained with another degree of an axis.
        """
        with self._naming_nearest(axes, ("tp", "cp", "pp"), fits):
            degrees = self._plan_degrees(axes)
        sparse = degrees.sparse_axes()
        if degrees.ep > 1:
            check_has_plain_experts(run, degrees.ep)
            ranks_of_group = sparse["efsdp"] * sparse["ep"]
            check_expert_share(run.decoder.parts.feed_forward, degrees.ep, ranks_of_group, run.whole_matrices)
        if degrees.tp > 1:
            check_torch(degrees.tp)
            num_available = degrees.dp_shard * degrees.tp
            check_tensor_share(run, degrees.tp, num_available, degrees.cp, partial(fits, "tp"))
        if degrees.cp > 1:
            check_context_share(run, degrees.cp, degrees.tp, partial(fits, "cp"))
        if degrees.pp > 1:
            self._check_pipeline(run, degrees, fits)
        elif run.batch_sizes is not None:
            plan_micro_batches(*run.batch_sizes, degrees.data_world_size)

    def _check_pipeline(self, run: RunOptions, degrees: Degrees, fits: Callable[[str, int], bool]) -> None:
        with self._naming_nearest(vars(degrees), ("pp",), fits):
            divide_layers(run.decoder, degrees.pp * self.stages_per_rank, self.layers_per_stage)
        check_pipeline(
            run,
            degrees.pp,
            reduces_each=self.gradient_reduction == "micro_batch",
            keeps_gathered=self.keep_gathered is True,
        )
        if not self._save_distributed_checkpoint:
            raise UserError(
                "save_distributed_checkpoint is false, which saves the layers of one stage alone: save by "
                "AsyncProcessCheckpoint, or set pipeline_parallel to 1"
            )
        if run.batch_sizes is not None:
            num_micro_batches = plan_micro_batches(*run.batch_sizes, degrees.data_world_size)
            with self._naming_nearest(vars(degrees), ("tp", "cp"), fits):  # fewer ranks that read other data
                check_micro_batches(num_micro_batches, degrees.pp, self.stages_per_rank)

    @contextmanager
    def _naming_nearest(
        self, axes: Mapping[str, int], names: Sequence[str], fits: Callable[[str, int], bool]
    ) -> Iterator[None]:
        """Adds the nearest degree that fits, of one of several axes, to a refusal."""
        try:
            yield
        except UserError as error:
            others = ((axis, n) for axis in names if axes[axis] > 1 for n in list_divisors(self._num_ranks))
            fitting = [(axis, n) for axis, n in others if n != axes[axis] and fits(axis, n)]
            if not fitting:
                raise
            axis, nearest = min(fitting, key=lambda one: abs(one[1] - axes[one[0]]))
            raise UserError(f"{error}; {AXIS_NAMES[axis]}_parallel {nearest} fits") from error

    @property
    def _num_stages(self) -> int:
        return self._axes["pp"] * self.stages_per_rank

    @property
    def pipeline_stage(self) -> int:
        """The index of this rank among those of a pipeline, for the roles of checkpoints."""
        return place_on(self.layout.degrees.data_axes(), self.global_rank)["pp"]

    def apply_to(self, decoder: LanguageModel) -> None:
        """Applies this strategy's wrappers to a freshly built decoder, in place."""
        assert self._mesh is not None, "setup_environment makes the mesh"
        precision = MixedPrecisionPolicy(
            param_dtype=self.computed_dtype,
            reduce_dtype=getattr(torch, self.reduce_dtype),
            # Rotary tables stay in float32: positions beyond 256 are not all different in bfloat16.
            cast_forward_inputs=False,
        )
        dtype = self.computed_dtype or decoder.output_weight.dtype
        if self._axes["pp"] > 1:
            assert isinstance(decoder, Decoder), "`check_options` refuses other models"
            divided = divide_layers(decoder.config, self._num_stages, self.layers_per_stage)
            self._stages = cut_stages(decoder, divided, range(self.pipeline_stage, self._num_stages, self._axes["pp"]))
        if self._axes["tp"] > 1:
            assert isinstance(decoder, Decoder)
            share = RowShare(self._mesh.tensor.get_group(), self.traffic.get("tensor"))
            share_matrices(decoder, share, MatrixCutter(self._mesh.tensor, share.traffic))
            self.vocabulary = CutVocabulary(share)
        if self._axes["cp"] > 1:
            assert isinstance(decoder, Decoder)
            exchange = ContextExchange(self._mesh.data.get_group("cp"), self.traffic.get("context"))
            share_context(decoder, exchange)
            self.vocabulary = ContextVocabulary(exchange, self.vocabulary)
        options = ShardOptions(
            mesh=self._mesh.shard,
            reshard_after_forward=self._frees_after_forward,
            blocks_per_unit=self.blocks_per_unit,
            max_gathers_in_flight=self.max_gathers_in_flight,
            precision=precision,
            cpu_offload=self.cpu_offload,
            uncut=self._mesh.uncut if self._axes["tp"] > 1 else None,
            experts=(self._mesh.experts, self._mesh.expert_shard) if self._axes["ep"] > 1 else None,
            stages=self._stages,
        )
        apply_wrappers(
            decoder,
            self.activation_checkpointing,
            self.compile_blocks,
            options,
            blocks_per_recomputation=self.blocks_per_recomputation,
            offload=self.offload.build_activations(),
        )
        if self._stages:
            assert isinstance(decoder, Decoder)
            group = self._mesh.dense.get_group("pp")
            num_shares = self._axes["cp"] * self._axes["tp"]
            assert self.stage_clock is not None
            self.pipeline = Pipeline(
                decoder,
                self._stages,
                group,
                self.root_device,
                dtype,
                self.stage_clock,
                num_shares,
                self.traffic["pipeline"],
            )

    def allocate(self, decoder: LanguageModel) -> None:
        """Allocates the tensors of that decoder, without values: offloaded ones in the host's memory."""
        allocate_sharded(decoder, self.root_device, self.blocks_per_unit, self.cpu_offload)
        self._note_moved_stages()
        assert self._mesh is not None, "setup_environment makes the mesh"
        gather_in_float8(decoder, self._mesh.shard)

    @property
    def computed_dtype(self) -> torch.dtype | None:
        """The dtype in which parameters are gathered; None for their own dtype."""
        default = "bfloat16" if self.precision_plugin.precision == "bf16-mixed" else None
        gathered = self.gather_dtype or default
        return None if gathered is None else getattr(torch, gathered)

    def train_micro_batches(
        self,
        decoder: LanguageModel,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scales: Mapping[str, float],
    ) -> WindowLoss:
        """Runs the micro-batches one after the other, or through a pipeline.

        `gradient_reduction` decides when gradients are reduced. A pipeline reduces them itself, so that nothing is left
        to the backward that Lightning runs.
        """
        if self.pipeline is not None:
            assert self.lightning_module is not None
            timed = partial(timing, self.lightning_module.trainer)
            staged = self._stage(decoder, micro_batches, objective, scales=scales, is_training=True, timing=timed)
            with timed("communication"):  # all but the forwards and backwards of this rank
                self.pipeline.train(staged)
            sums, part_sums = self.pipeline.share_figures(staged)
            nothing = torch.zeros((), device=self.root_device, requires_grad=True)
            return WindowLoss(nothing, self._take_share(sums), part_sums)
        if self._gathering is None:
            self._gathering = GatheringChoice(self.keep_gathered, self.root_device)
        self._gathering.begin_window()
        # Keeping parameters gathered only helps if the window has a further micro-batch.
        is_kept = self._gathering.is_kept and len(micro_batches) > 1
        window = train_in_turn(
            decoder,
            micro_batches,
            objective,
            scales,
            vocabulary=self.vocabulary,
            backward=self.backward,
            gradient_reduction=self.gradient_reduction,
            set_gathering=partial(self._set_gathering, decoder) if is_kept else None,
        )
        if is_kept:
            # All forwards are done. The last backward, which Lightning runs, and validation free parameters.
            set_resharding(decoder, after_forward=self._frees_after_forward, after_backward=True)
        return window._replace(sums=self._take_share(window.sums))

    def _stage(
        self, decoder: LanguageModel, micro_batches: Sequence[MicroBatch], objective: Objective, **options: Any
    ) -> StagedWindow:
        """Returns the window of a pipeline; an objective that runs the model has then run it on all ranks."""
        if objective.runs_model:
            micro_batches = [prepare(objective, decoder, one, self.vocabulary) for one in micro_batches]

        def build_head(micro_batch: MicroBatch) -> Head:
            if not objective.runs_model:
                micro_batch = prepare(objective, decoder, micro_batch, self.vocabulary)
            return objective.head(micro_batch, self.vocabulary)

        return StagedWindow(micro_batches, build_head, self.precision_plugin.forward_context, **options)

    def _take_share(self, sums: HeadResult) -> HeadResult:
        """Returns this rank's share in a sum over all ranks: ranks that share matrices or rows have the same sums."""
        place = place_on(self.layout.degrees.data_axes(), self.global_rank)
        if place["tp"] == place["cp"] == 0:
            return sums
        return HeadResult(*({name: torch.zeros_like(value) for name, value in part.items()} for part in sums))

    def _set_gathering(self, decoder: LanguageModel, is_last: bool) -> None:
        set_resharding(decoder, after_forward=False, after_backward=is_last)

    @property
    def _frees_after_forward(self) -> bool:
        return self.shard != "grad_op"

    def sum_losses(
        self, decoder: LanguageModel, micro_batches: Sequence[MicroBatch], objective: Objective
    ) -> HeadResult:
        """Returns this rank's share of the objective's sums over validation micro-batches."""
        if self.pipeline is not None:
            window = self._stage(decoder, micro_batches, objective)
            self.pipeline.evaluate(window)
            for result in window.results:
                window.sums = add_result(window.sums, result)
            sums, _ = self.pipeline.share_figures(window)
            return self._take_share(sums)
        return self._take_share(sum_in_turn(decoder, micro_batches, objective, vocabulary=self.vocabulary))

    # ---- Lightning's hooks

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Joins the ranks and makes the mesh.

        The base's method does not fit, because its mesh has only an axis for data and one for tensor parallelism.
        """
        degrees = self._plan_degrees()
        self._setup_distributed()
        for warning in warn_of_crossing(degrees, self.start.nodes):
            rank_zero_warn(warning)
        timeout_seconds = choose_timeout(self.timeout_seconds, self.hang_seconds)
        self._mesh = WorldMesh(degrees, self.root_device.type, timeout_seconds)
        self._layout = self._lay_out(degrees, self._mesh)
        assert self.lightning_module is not None
        self._device_mesh = self.lightning_module._device_mesh = self._mesh.dense

    def _lay_out(self, degrees: Degrees, mesh: WorldMesh) -> ParallelLayout:
        # If all ranks together read every row once, they need no further process group.
        tokens = mesh.tokens.get_group() if len(degrees.token_groups()) > 1 else None
        stages = mesh.dense.get_group("pp") if degrees.pp > 1 else None
        return lay_out(
            degrees, self.global_rank, gradient_divisor=1, token_process_group=tokens, pipeline_process_group=stages
        )

    def _setup_distributed(self) -> None:
        # Before the mesh is created, which is a collective: ranks of another start must not take part in one.
        self.start.begin()
        super()._setup_distributed()
        self.start.check(self.node_rank)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Prepares training; starts the watchdog over forwards that one rank enters alone."""
        # A parameter first gathered under inference mode stays an inference tensor, on which backward would fail.
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # After the base, which moves the states of optimizers to the device. In a validation after a fit, the
            # optimizers are still those of the fit, whose states are moved already.
            self.offload.move_states(self.optimizers, self.root_device, self.num_processes)
            assert self.model is not None
            self.offload.count_units(self.model, self.optimizers, self.root_device)
        if self.world_size > 1:
            assert self.lightning_module is not None
            self._watchdog = DesyncWatchdog(self.lightning_module, self.desync_seconds, self.layout.stage_ranks)
            self._watchdog.start()

    def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        """Runs a window's forwards, backwards and step; the watchdog counts it."""
        output = super().optimizer_step(*arguments, **options)
        # In automatic optimization this call includes the closure, so the window's forwards are all counted by now.
        self._end_window()
        if self._gathering is not None:
            assert isinstance(self.lightning_module, pl.LightningModule)
            # Never by `next` without a default: Lightning takes a StopIteration in a hook for the end of an epoch.
            models = [child for child in self.lightning_module.modules() if isinstance(child, LanguageModel)]
            self._gathering.end_window(models[0], self.computed_dtype)
        return output

    def validation_step(self, *arguments: Any, **options: Any) -> Any:
        """Runs a window of validation; the watchdog counts it like a window of training."""
        output = super().validation_step(*arguments, **options)
        self._end_window()
        return output

    def _end_window(self) -> None:
        if self._watchdog is not None:
            self._watchdog.end_window()

    def teardown(self) -> None:
        """Stops the watchdog and the watch of this start, and tears down the base."""
        self.start.end()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        super().teardown()

    def model_to_device(self) -> None:
        """Moves tensors that are not sharded; offloaded parameters stay in CPU memory."""
        assert self.model is not None
        if not self.cpu_offload:
            super().model_to_device()
        for module in self.model.modules() if self.cpu_offload else ():
            if isinstance(module, Metric):  # its sums are updated on the device
                module.to(self.root_device)
        self._note_moved_stages()

    def _note_moved_stages(self) -> None:
        # FSDP2 takes note of moved parameters in its own `to`, and the module's does not reach the stages.
        for stage in self._stages:
            stage._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]  # torch's
