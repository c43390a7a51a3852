"""How a run spreads over ranks and what it trains, as values: the input of every other module of the plan."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

from genesis.base.errors import UserError, numbered
from genesis.model.adapter import BASE_FORMATS, AdapterConfig, BaseFormat
from genesis.model.attend.table import FLEX
from genesis.model.decoder import DecoderConfig
from genesis.model.expert_share import check_expert_share
from genesis.model.stages import check_micro_batches
from genesis.objectives import CrossEntropy
from genesis.objectives.objective import Objective
from genesis.objectives.run_options import (
    RunOptions,
    check_context_share,
    check_has_plain_experts,
    check_optimizer_offload,
    check_pipeline,
    check_tensor_share,
)
from genesis.optim import AdamW, Algorithm
from genesis.optim.offload_share import spread_units

Strategy = Literal["one device", "replicated", "zero1", "full", "grad_op", "hybrid"]
SHARDED: Final = ("full", "grad_op", "hybrid")
PRECISIONS: Final = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
FLOAT32_BYTES: Final = 4
HALF_BYTES: Final = 2

Checkpointing = Literal["none", "block"] | int
"""The blocks whose activations the backward computes again, as `genesis.strategies.wrap` has it."""


@dataclass(frozen=True)
class Layout:
    """How a strategy spreads a model; the fields are options of `genesis.strategies`.

    Args:
        strategy: `one device`, DDP (`replicated`), DDP with spread optimizer states (`zero1`), or a form of FSDP2.
        num_ranks: Ranks of the run.
        ranks_per_shard_group: Ranks that share one copy of the model, or of a stage of it; all of them, except under
            `hybrid`.
        cpu_offload: Share of the blocks whose parameters, gradients and optimizer states are in the host's memory; 1
            for the whole model.
        activation_checkpointing: See `Checkpointing`.
        blocks_per_recomputation: Blocks that are recomputed together.
        activation_offload: Whether the inputs of recomputed blocks are in the host's memory.
        optimizer_offload: Share of the optimizer's states that is in the host's memory.
        blocks_per_unit: Blocks that are gathered together.
        max_gathers_in_flight: Units that are gathered or being gathered.
        expert_parallel: Ranks that share the experts, among those of a shard group; each holds as many experts.
        tensor_parallel: Ranks that share the matrices of each layer, among those of a shard group.
        context_parallel: Ranks that share the tokens of each sequence, among those of a shard group.
        pipeline_parallel: Ranks that run different layers.
        stages_per_rank: Stages of layers that each of them runs.
        layers_per_stage: Layers of each stage; None to divide them evenly.
        gather_bytes: Bytes of an element of gathered parameters; None for the precision's default.
        reduce_bytes: Bytes of an element in the reduction of gradients.
        reduces_each: Whether gradients are reduced after every micro-batch.
        keeps_gathered: Whether parameters stay gathered between the micro-batches of a window.
        has_compiled_blocks: Whether blocks are compiled.
    """

    strategy: Strategy = "one device"
    num_ranks: int = 1
    ranks_per_shard_group: int = 1
    cpu_offload: float = 0.0
    activation_checkpointing: Checkpointing = "none"
    blocks_per_recomputation: int = 1
    activation_offload: bool = False
    optimizer_offload: float = 0.0
    blocks_per_unit: int = 1
    max_gathers_in_flight: int = 2
    expert_parallel: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    stages_per_rank: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    gather_bytes: int | None = None
    reduce_bytes: int = FLOAT32_BYTES
    reduces_each: bool = False
    keeps_gathered: bool = False
    has_compiled_blocks: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the model."""
        return self.strategy in SHARDED

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data, or groups of ranks that read the same."""
        return self.num_ranks // (self.tensor_parallel * self.context_parallel * self.pipeline_parallel)

    @property
    def num_stages(self) -> int:
        """Stages of layers over all ranks; 1 without a pipeline."""
        return self.pipeline_parallel * self.stages_per_rank

    @property
    def ranks_per_expert(self) -> int:
        """Ranks that shard the same experts."""
        return self.ranks_per_shard_group // self.expert_parallel

    @property
    def name(self) -> str:
        """The strategy as tables name it."""
        degrees = {"tensor": self.tensor_parallel, "context": self.context_parallel, "pipeline": self.pipeline_parallel}
        axes = "".join(f", {name} {degree}" for name, degree in degrees.items() if degree > 1)
        rounds = f" x {self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        experts = f", experts over {self.expert_parallel}" if self.expert_parallel > 1 else ""
        share = "" if self.cpu_offload in (0.0, 1.0) else f" {self.cpu_offload:g}"
        return f"{self.strategy}{axes}{rounds}{experts}{f', offload{share}' if self.cpu_offload else ''}"

    def list_offloaded(self, num_blocks: int) -> set[int | None]:
        """Returns the numbers of the blocks that are in the host's memory, and None if all the rest is there, too."""
        units = spread_units(-(-num_blocks // self.blocks_per_unit), self.cpu_offload)
        blocks: set[int | None] = {index for index in range(num_blocks) if units[index // self.blocks_per_unit]}
        return blocks | {None} if self.cpu_offload >= 1.0 else blocks


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        decoder: The model.
        adapter: Its adapters; None if all weights are trained.
        base: How frozen weights are stored.
        optimizer: How parameters are updated.
        objective: The class of the objective.
        seq_len: Tokens of a sequence.
        micro_batch_size: Sequences, or pairs, of a forward on a rank.
        global_batch_size: Sequences, or pairs, of a step.
        precision: The Trainer's precision.
        is_cpu: Whether the device is a CPU.
        attention: The kernel of attention, by its name in `genesis.model.attend.table`.
        has_documents: Whether sequences have several documents.
        teacher: The model that a student learns from, if it runs and its shape is known.
        teacher_bytes: Bytes of an element of its weights.
        teacher_top_k: Ids whose probabilities are kept for each token.
        reward_models: The models that score answers, if their shapes are known.
        num_answer_rows: Answers that a rank writes at the same time.
        scores_without_adapters: Whether each micro-batch also has a forward without adapters, for a reference.
        max_grad_norm: Whether gradients are clipped does not change memory: they are scaled in place.
    """

    decoder: DecoderConfig
    adapter: AdapterConfig | None = None
    base: BaseFormat = BASE_FORMATS["float32"]
    optimizer: Algorithm = field(default_factory=AdamW)
    objective: type[Objective] = CrossEntropy
    seq_len: int = 2048
    micro_batch_size: int = 1
    global_batch_size: int = 1
    precision: str = "bf16-mixed"
    is_cpu: bool = False
    attention: str = FLEX.name
    has_documents: bool = True
    teacher: DecoderConfig | None = None
    teacher_bytes: int = FLOAT32_BYTES
    teacher_top_k: int = 64
    reward_models: tuple[DecoderConfig, ...] = ()
    num_answer_rows: int = 0
    scores_without_adapters: bool = False

    @property
    def rows_per_sequence(self) -> int:
        """Rows of tokens that a sequence of the batch may have: a pair of answers has two."""
        return 2 if self.objective.learns_from == "pairs" else 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks, with padding."""
        return self.global_batch_size * self.rows_per_sequence * self.seq_len

    def num_micro_batches(self, layout: Layout) -> int:
        """Returns the micro-batches of a window on one rank.

        Raises:
            UserError: They do not divide the global batch, or the pipeline cannot run so many.
        """
        num_readers = layout.data_ranks
        count, rest = divmod(self.global_batch_size, self.micro_batch_size * num_readers)
        if rest or not count:
            raise UserError(
                f"data.global_batch_size {self.global_batch_size} is not divisible into micro-batches of "
                f"{self.micro_batch_size} on {numbered(num_readers, 'ranks')} that read different data: choose a "
                f"multiple of {self.micro_batch_size * num_readers}"
            )
        if layout.pipeline_parallel > 1:
            check_micro_batches(count, layout.pipeline_parallel, layout.stages_per_rank)
        return count


def check_layout(workload: Workload, layout: Layout) -> None:
    """Refuses what a fit would refuse before its ranks start.

    Raises:
        UserError: Ranks cannot share the model, the rows or the objective, or numbers do not divide each other.
    """
    whole = workload.optimizer.whole_name
    check_expert_share(workload.decoder.parts.feed_forward, layout.expert_parallel, layout.ranks_per_shard_group, whole)
    run = RunOptions(
        workload.decoder,
        workload.objective,
        whole_matrices=whole,
        seq_len=workload.seq_len,
        has_nf4=workload.base.is_nf4,
        row_block=workload.optimizer.find_row_block(workload.adapter),
    )
    check_optimizer_offload(run, layout.optimizer_offload)
    if layout.expert_parallel > 1:
        check_has_plain_experts(run, layout.expert_parallel)
    if layout.tensor_parallel > 1:
        num_free = layout.ranks_per_shard_group // layout.context_parallel
        fits = partial(_fits_batch, workload, layout, "tensor_parallel")
        check_tensor_share(run, layout.tensor_parallel, num_free, layout.context_parallel, fits)
    if layout.context_parallel > 1:
        fits = partial(_fits_batch, workload, layout, "context_parallel")
        check_context_share(run, layout.context_parallel, layout.tensor_parallel, fits)
    if layout.pipeline_parallel > 1:
        check_pipeline(
            run, layout.pipeline_parallel, reduces_each=layout.reduces_each, keeps_gathered=layout.keeps_gathered
        )


def _fits_batch(workload: Workload, layout: Layout, axis: str, degree: int) -> bool:
    """Returns whether the batch can be divided under another degree of an axis."""
    options: dict[str, Any] = {axis: degree}
    try:
        workload.num_micro_batches(replace(layout, **options))
    except UserError:
        return False
    return True


def parameter_bytes(workload: Workload) -> int:
    """Returns the bytes of an element of a trained parameter at rest: two only under a `true` precision of 16 bits."""
    return HALF_BYTES if workload.precision in ("bf16-true", "16-true") else FLOAT32_BYTES


def forward_weight_bytes(workload: Workload, layout: Layout) -> int:
    """Returns the bytes of an element of trained weights as the forward sees them."""
    own = parameter_bytes(workload)
    if not layout.is_sharded:
        return own
    if layout.gather_bytes is not None:
        return layout.gather_bytes
    return HALF_BYTES if workload.precision == "bf16-mixed" else own


def product_bytes(workload: Workload, layout: Layout) -> int:
    """Returns the bytes of an element of the matrix products."""
    if workload.precision in ("bf16-mixed", "16-mixed"):
        return HALF_BYTES
    return forward_weight_bytes(workload, layout)
