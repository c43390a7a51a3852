"""Replicated: every rank holds the whole model; gradients are averaged by DDP once per window."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from genesis.base.errors import UserError
from genesis.data.window import MicroBatch
from genesis.model.compilation import CompileBlocks, resolve_compilation
from genesis.model.language_model import LanguageModel
from genesis.model.recomputation import ActivationCheckpointing
from genesis.objectives.objective import HeadResult, Objective
from genesis.objectives.run_options import RunOptions, check_optimizer_offload
from genesis.objectives.vocabulary import WHOLE, Vocabulary
from genesis.optim import GroupedOptimizer
from genesis.strategies.degrees import Degrees
from genesis.strategies.host_memory import HostOffload
from genesis.strategies.layout import ParallelLayout, lay_out
from genesis.strategies.micro_batches import WindowLoss, sum_in_turn, train_in_turn
from genesis.strategies.start import Launcher, Start
from genesis.strategies.timeouts import choose_timeout, read_timeout, set_timeout
from genesis.strategies.wrap import apply_wrappers


class Replicated(DDPStrategy):
    """DDP over all ranks. A single rank has no process group: it opens no port and needs no DDP wrapper.

    Args:
        optimizer_states: `replicated`, or `sharded` (ZeRO-1): each rank keeps and updates the optimizer state of its
            part of the parameters, and broadcasts them after the step.
        activation_checkpointing: `none`, `block`, or n for every n-th block.
        blocks_per_recomputation: Consecutive blocks that are recomputed together, with `block`: only the input of the
            first is kept, and the backward holds the activations of all of them at once.
        activation_offload: Whether the inputs of recomputed blocks lie in the host's memory from their forward to their
            backward, with `block`.
        optimizer_offload: Share of the optimizer's states that lies in the host's memory, from 0 to 1: each step they
            pass through the device, piece by piece, and the device updates.
        compile_blocks: Whether each block is compiled by torch.compile; `auto` for CUDA devices with Triton alone.
        process_group_backend: `gloo` or `nccl`; by default the device's own backend.
        timeout_seconds: Time limit of a collective. By default longer than `HangWatch` waits before it ends a run and
            names the rank for which the others wait, or 1,800 s without `HangWatch`.

    Attributes:
        start: The record that the ranks compare after they have joined the process group.
        hang_seconds: After how long at most `HangWatch` ends a run that hangs; None without one.
        offload: What lies in the host's memory.
        vocabulary: What computes losses with the output weight.
    """

    vocabulary: Vocabulary = WHOLE

    def __init__(
        self,
        optimizer_states: Literal["replicated", "sharded"] = "replicated",
        activation_checkpointing: ActivationCheckpointing = "none",
        blocks_per_recomputation: int = 1,
        activation_offload: bool = False,
        optimizer_offload: float = 0.0,
        compile_blocks: CompileBlocks = False,
        process_group_backend: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=read_timeout(timeout_seconds),
            # The bucket is the gradient: one copy of every gradient less.
            gradient_as_bucket_view=True,
            # Otherwise DDP sorts gradients into other buckets after its first step. The buckets decide in which
            # order three or more ranks are added, so a resumed run would differ from one that was never killed.
            find_unused_parameters=True,
        )
        if optimizer_states == "sharded" and optimizer_offload:
            raise UserError(
                f"optimizer_offload is {optimizer_offload:g}, and optimizer_states is 'sharded': set one of them back, "
                "or use Sharded, which shards states and offloads them"
            )
        self.optimizer_states = optimizer_states
        self.activation_checkpointing = activation_checkpointing
        self.blocks_per_recomputation = blocks_per_recomputation
        self.offload = HostOffload(
            activations=activation_offload,
            optimizer_share=optimizer_offload,
        )
        self.compile_blocks = resolve_compilation(compile_blocks)
        self.timeout_seconds = timeout_seconds
        self.hang_seconds: float | None = None
        self.start = Start()
        self._layout: ParallelLayout | None = None

    # ---- the layout, for the training step

    @property
    def layout(self) -> ParallelLayout:
        """The role of this rank among all ranks; available once the ranks have joined the process group."""
        assert self._layout is not None, "setup_distributed makes the layout"
        return self._layout

    def _lay_out(self) -> ParallelLayout:
        num_ranks = self.num_nodes * self.num_processes
        degrees = Degrees(dp_replicate=num_ranks).resolve(num_ranks)
        return lay_out(degrees, self.global_rank, gradient_divisor=num_ranks)  # DDP averages

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

    def apply_to(self, decoder: LanguageModel) -> None:
        """Applies this strategy's wrappers to a freshly built decoder, in place."""
        apply_wrappers(
            decoder,
            self.activation_checkpointing,
            self.compile_blocks,
            blocks_per_recomputation=self.blocks_per_recomputation,
            offload=self.offload.build_activations(),
        )

    def allocate(self, decoder: LanguageModel) -> None:
        """Allocates the tensors of that decoder, without values."""
        decoder.to_empty(device=self.root_device)

    def train_micro_batches(
        self,
        decoder: LanguageModel,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scales: Mapping[str, float],
    ) -> WindowLoss:
        """Runs the micro-batches one after the other; DDP's reduction waits for the returned loss's backward."""
        return train_in_turn(
            decoder, micro_batches, objective, scales, vocabulary=self.vocabulary, backward=self.backward
        )

    def sum_losses(
        self, decoder: LanguageModel, micro_batches: Sequence[MicroBatch], objective: Objective
    ) -> HeadResult:
        """Returns the objective's sums over validation micro-batches."""
        return sum_in_turn(decoder, micro_batches, objective, vocabulary=self.vocabulary)

    # ---- Lightning's hooks

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self.num_nodes * self.num_processes == 1

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Joins the process group and compares starts with the other ranks, unless this rank is alone."""
        if self.is_alone:
            # The parts of the base's method that work without a process group.
            reset_seed()
            self.set_world_ranks()
        else:
            self.start.begin()
            super().setup_distributed()
            self.start.check(self.node_rank)
            assert dist.group.WORLD is not None
            set_timeout(dist.group.WORLD, choose_timeout(self.timeout_seconds, self.hang_seconds))
        self._layout = self._lay_out()

    def setup(self, trainer: "pl.Trainer") -> None:
        """Moves the module to its device and builds its optimizers; with several ranks, wraps it in DDP."""
        if self.is_alone:
            # DDPStrategy.setup asks the process group, so the method of its base is called.
            super(DDPStrategy, self).setup(trainer)
        else:
            super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # After the base, which moves the states of optimizers to the device. In a validation after a fit, the
            # optimizers are still those of the fit, whose states are moved already.
            self.offload.move_states(self.optimizers, self.root_device, self.num_processes)

    def teardown(self) -> None:
        """Stops the watch of this start, and tears down the base."""
        self.start.end()
        super().teardown()

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]  # as the base of all strategies
        if self.is_alone:
            return model
        # DDP advises against the option when it finds no unused parameter; see `__init__` for why it is set.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified", UserWarning)
        # Not as the base does, on a stream of its own (Lightning #21567): gradients would be added up on that stream,
        # with a wait for each parameter, because the backwards of a window's micro-batches run on the current one.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Builds the module's optimizers and, under ZeRO-1, spreads their state over the ranks."""
        super().setup_optimizers(trainer)
        if self.is_alone:
            return
        if self.optimizer_states == "sharded":
            self.optimizers = [_spread(optimizer) for optimizer in self.optimizers]
            return
        # After DDP all ranks hold the same gradients, so that each can compute a share of the whole matrices.
        assert dist.group.WORLD is not None
        for optimizer in self.optimizers:
            if isinstance(optimizer, GroupedOptimizer):
                optimizer.share_matrices(dist.group.WORLD)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state, for Lightning's own saves.

        Raises:
            UserError: Under ZeRO-1, because one rank's part would be saved as the whole state.
        """
        if self.optimizer_states == "sharded" and not self.is_alone:
            raise UserError(
                "optimizer_states is 'sharded': Lightning's own checkpoints would hold only one rank's "
                "part; save with AsyncProcessCheckpoint, which stores the parts of all ranks"
            )
        return super().optimizer_state(optimizer)


def _spread(optimizer: Optimizer) -> Optimizer:
    """Returns `optimizer`'s groups under ZeRO-1."""
    groups = [dict(group) for group in optimizer.param_groups]
    # Imported here: its package compiles ten optimizers by TorchScript when it is imported, for most fits in vain.
    zero: Any = import_module("torch.distributed.optim")
    build: Any = type(optimizer)
    if isinstance(optimizer, GroupedOptimizer):
        build = partial(GroupedOptimizer, algorithms=optimizer.algorithms)
    spread: Optimizer = zero.ZeroRedundancyOptimizer(groups, optimizer_class=build, **optimizer.defaults)
    return spread
