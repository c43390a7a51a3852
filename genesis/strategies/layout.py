"""The interface between the training step and every parallelism: the questions about ranks, and their answers.

The step, the data module and the metrics know no mesh and no axis. They ask a `LayoutStrategy`, which `Replicated` and
`Sharded` are, and which `LightningStrategy` makes of Lightning's own strategies for one device and for DDP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy

from genesis.base.errors import UserError
from genesis.data.window import MicroBatch
from genesis.model.language_model import LanguageModel
from genesis.objectives.objective import HeadResult, Objective
from genesis.objectives.run_options import RunOptions
from genesis.objectives.vocabulary import WHOLE, Vocabulary
from genesis.strategies.degrees import Degrees
from genesis.strategies.micro_batches import WindowLoss, sum_in_turn, train_in_turn
from genesis_callbacks.host_group import HostGroup


@dataclass(frozen=True)
class ParallelLayout:
    """The role of this rank among all ranks.

    Args:
        degrees: The number of ranks for each kind of parallelism.
        data_rank: The index of the share of each global batch that this rank reads. Ranks with the same index read the
            same rows.
        data_world_size: The number of shares.
        stage_ranks: The ranks that hold the same part of the model's layers, each a shard or a copy, and run the same
            forwards: all, without a pipeline.
        seed_place: What the seed of dropout depends on, beside the run's seed and the step.
        reports_rows: Whether this rank gives the counts of its rows to a sum over all ranks. Such sums, as those of
            losses and figures, add the share of each rank; a rank gives 0 for what another rank gives.
        token_group: Sums counts of this rank's rows over the ranks that together read every row once.
        token_process_group: The same ranks, for tensors on the device; None for all ranks.
        gradient_divisor: The divisor that the gradients' reduction applies to their sum over ranks: 1 for a plain sum.
        pipeline_process_group: The ranks of this rank's pipeline, for tensors on the device; None without one.
    """

    degrees: Degrees
    data_rank: int
    data_world_size: int
    stage_ranks: Sequence[int]
    seed_place: tuple[int, ...]
    reports_rows: bool
    token_group: HostGroup
    token_process_group: dist.ProcessGroup | None
    gradient_divisor: int
    pipeline_process_group: dist.ProcessGroup | None = None


def lay_out(
    degrees: Degrees,
    rank: int,
    *,
    gradient_divisor: int,
    token_process_group: dist.ProcessGroup | None = None,
    pipeline_process_group: dist.ProcessGroup | None = None,
) -> ParallelLayout:
    """Returns the layout of one rank. Does not communicate.

    Args:
        degrees: The resolved degrees.
        rank: The global rank.
        gradient_divisor: See `ParallelLayout`.
        token_process_group: See `ParallelLayout`.
        pipeline_process_group: See `ParallelLayout`.
    """
    return ParallelLayout(
        degrees=degrees,
        data_rank=degrees.data_rank(rank),
        data_world_size=degrees.data_world_size,
        stage_ranks=degrees.stage_ranks(rank),
        seed_place=degrees.seed_place(rank),
        reports_rows=degrees.reports_rows(rank),
        token_group=HostGroup(degrees.token_groups()),
        token_process_group=token_process_group,
        gradient_divisor=gradient_divisor,
        pipeline_process_group=pipeline_process_group,
    )


class LayoutStrategy(Protocol):
    """The interface of a Lightning strategy for the training step.

    Attributes:
        vocabulary: What computes losses with the output weight, for objectives.
    """

    vocabulary: Vocabulary

    @property
    def layout(self) -> ParallelLayout:
        """The role of this rank among all ranks."""

    def check_options(self, run: RunOptions) -> None:
        """Refuses options that fit neither each other nor the run. It needs no process group.

        The command line calls it before it starts ranks, and the module before it builds the model.

        Raises:
            UserError: Ranks cannot share the model, or something else of the run.
        """

    def apply_to(self, decoder: LanguageModel) -> None:
        """Cuts, wraps and shards a freshly built decoder on the meta device, in place."""

    def allocate(self, decoder: LanguageModel) -> None:
        """Allocates the tensors of that decoder where they are between steps, without values."""

    def train_micro_batches(
        self,
        decoder: LanguageModel,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scales: Mapping[str, float],
    ) -> WindowLoss:
        """Runs forwards and backwards of one window; gradients are reduced once the returned loss has run backward.

        The sums that it returns have the same names on all ranks, and are added over all of them.
        """

    def sum_losses(
        self, decoder: LanguageModel, micro_batches: Sequence[MicroBatch], objective: Objective
    ) -> HeadResult:
        """Returns this rank's share of the objective's sums over validation micro-batches."""


def layout_strategy(strategy: Strategy) -> LayoutStrategy:
    """Returns a `LayoutStrategy` for a Trainer's strategy: the strategy itself, or an adapter for Lightning's."""
    if hasattr(type(strategy), "layout"):  # on the class, because reading the instance's property computes it
        return cast("LayoutStrategy", strategy)
    return LightningStrategy(strategy)


class LightningStrategy:
    """Adapts a strategy without a layout to `LayoutStrategy`: Lightning's for one device, and DDP.

    Args:
        strategy: The Trainer's strategy.

    Attributes:
        vocabulary: Each rank has the whole output weight.
    """

    vocabulary: Vocabulary = WHOLE

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def layout(self) -> ParallelLayout:
        """The role of this rank: every rank reads different data, and DDP averages gradients over all ranks."""
        strategy, rank, world_size = self._strategy, 0, 1
        if isinstance(strategy, ParallelStrategy):
            sampler = strategy.distributed_sampler_kwargs
            rank, world_size = sampler["rank"], sampler["num_replicas"]
        return lay_out(Degrees(dp_replicate=world_size).resolve(world_size), rank, gradient_divisor=world_size)

    def check_options(self, run: RunOptions) -> None:
        """Checks the kind of the strategy.

        Raises:
            UserError: The strategy has several ranks and is not DDP, so that its reduction of gradients may not be the
                one that the training step relies on.
        """
        if isinstance(self._strategy, ParallelStrategy) and not isinstance(self._strategy, DDPStrategy):
            raise UserError(
                f"trainer.strategy is a {type(self._strategy).__name__}, whose gradients the training step does not "
                "know how to scale; give replicated, sharded, ddp or auto"
            )

    def apply_to(self, decoder: LanguageModel) -> None:
        """Returns without changing the decoder."""

    def allocate(self, decoder: LanguageModel) -> None:
        """Allocates the tensors of that decoder, without values."""
        decoder.to_empty(device=self._strategy.root_device)

    def train_micro_batches(
        self,
        decoder: LanguageModel,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scales: Mapping[str, float],
    ) -> WindowLoss:
        """Runs the micro-batches one after the other."""
        return train_in_turn(
            decoder, micro_batches, objective, scales, vocabulary=self.vocabulary, backward=self._strategy.backward
        )

    def sum_losses(
        self, decoder: LanguageModel, micro_batches: Sequence[MicroBatch], objective: Objective
    ) -> HeadResult:
        """Returns the objective's sums over validation micro-batches."""
        return sum_in_turn(decoder, micro_batches, objective, vocabulary=self.vocabulary)
