"""What decides, beside the number of ranks, whether ranks can share a run: for strategies, and for plans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from genesis.base.errors import UserError, numbered
from genesis.model.cut import find_indivisible
from genesis.model.decoder import DecoderConfig
from genesis.model.shares import list_cut_columns
from genesis.objectives.objective import Objective

_OF_BATCH: Final = ", and change data.global_batch_size or data.micro_batch_size, which do not fit it"


def _always(num_ranks: int) -> bool:
    return True


@dataclass(frozen=True)
class RunOptions:
    """What decides whether ranks can share a run.

    Args:
        decoder: The model.
        objective: The class of what training minimises.
        whole_matrices: The optimizer's algorithm if it needs whole matrices, and the command trains; else None.
        seq_len: The tokens of a row; None if the data is not known.
        batch_sizes: The sequences of a step over all ranks, and those of a micro-batch; None if the command does not
            train, or the data is not known.
        has_float8: Whether products run in float8, which needs whole layers on each rank.
        has_nf4: Whether the frozen base of adapters is in NF4, whose blocks no rank can divide.
        row_block: Values of a row that share an element of the optimizer's moments; 1 if none do, or nothing trains.

    Raises:
        UserError: The objective trains a model that scores texts, and this one writes them, or the other way round.
    """

    decoder: DecoderConfig
    objective: type[Objective]
    whole_matrices: str | None = None
    seq_len: int | None = None
    batch_sizes: tuple[int, int] | None = None
    has_float8: bool = False
    has_nf4: bool = False
    row_block: int = 1

    def __post_init__(self) -> None:
        name = self.objective.__name__
        if self.objective.scores_texts and self.decoder.num_scores is None:
            raise UserError(
                f"{name} trains a model that scores texts, and this one writes them: start from the result of `genesis "
                "import MODEL OUT --as reward_model`, or set model.decoder.num_scores to 1"
            )
        if self.decoder.num_scores is not None and not self.objective.scores_texts:
            raise UserError(
                f"the model scores texts (model.decoder.num_scores), and {name} trains one that writes them: set "
                "model.objective to genesis.objectives.RewardModel"
            )


def check_optimizer_offload(run: RunOptions, share: float) -> None:
    """Refuses to move moments in blocks to the host, whose pieces would divide them.

    Raises:
        UserError: Both are given.
    """
    if share > 0.0 and run.row_block > 1:
        raise UserError(
            f"optimizer_offload is {share:g}, and model.optimizer has moments of 8 bits, which are not moved: set it "
            "to 0, or take genesis.optim.AdamW"
        )


def check_has_plain_experts(run: RunOptions, num_ranks: int) -> None:
    """Checks that ranks can share the experts of a run's base.

    Args:
        run: The run.
        num_ranks: `expert_parallel`, at least 2.

    Raises:
        UserError: They are in NF4.
    """
    if run.has_nf4:
        raise UserError(
            f"expert_parallel is {num_ranks}, and the base is in NF4, whose experts have scales in common: set it to "
            "1, and shard the model by FSDP2 alone"
        )


def check_tensor_share(
    run: RunOptions,
    num_ranks: int,
    num_available: int,
    context_ranks: int = 1,
    fits: Callable[[int], bool] = _always,
) -> None:
    """Checks that ranks can share the matrices of a run's model and the tokens of its rows.

    Args:
        run: The run.
        num_ranks: `tensor_parallel`, at least 2.
        num_available: The ranks that no other axis takes.
        context_ranks: `context_parallel`, which shares rows and heads, too.
        fits: Whether another number fits the batch and the other axes.

    Raises:
        UserError: They cannot; the message has the nearest number that can.
    """
    given = f"tensor_parallel is {num_ranks}"
    if run.has_float8:
        raise UserError(f"{given}, and model.float8 needs whole layers: leave out one of the two")
    if run.has_nf4:
        raise UserError(f"{given}, and the base is in NF4, which ranks cannot cut: import it with --dtype bfloat16")
    if "tensor" not in run.objective.trains_under:
        raise UserError(f"{given}, and {run.objective.__name__} does not train under tensor parallelism: set it to 1")
    found = _find_uncut(run, num_ranks)
    if found is not None:
        divisors = (number for number in range(1, num_available + 1) if num_available % number == 0)
        shared = [n for n in divisors if _find_uncut(run, n) is None and _shares_context(run, context_ranks, n)]
        fitting = [number for number in shared if fits(number)]
        nearest = min(fitting or shared, key=lambda number: abs(number - num_ranks), default=None)
        remedy = f"set it to 1, and context_parallel {context_ranks} to 1"
        if nearest is not None:
            remedy = f"set it to {nearest}" + ("" if fitting else _OF_BATCH)
        raise UserError(f"{given}, and so many ranks cannot share {found}: {remedy}")


def _find_uncut(run: RunOptions, num_ranks: int) -> str | None:
    """Returns what `num_ranks` ranks cannot share."""
    if num_ranks == 1:
        return None
    mixers = (mixer.find_uncut(num_ranks) for mixer, _ in run.decoder.list_mixers())
    found = [one for one in (*mixers, run.decoder.parts.feed_forward.find_uncut(num_ranks)) if one is not None]
    sizes = {"vocab_size": run.decoder.vocab_size, "data.seq_len": run.seq_len or num_ranks}
    uncut = found[0] if found else find_indivisible(sizes, num_ranks)
    if uncut is not None or run.row_block == 1:
        return uncut
    columns = list_cut_columns(run.decoder, num_ranks)
    divided = next((name for name, width in columns.items() if width % (num_ranks * run.row_block)), None)
    return divided and f"{divided} in blocks of {run.row_block} (model.optimizer.init_args.block)"


def check_context_share(
    run: RunOptions, num_ranks: int, tensor_ranks: int, fits: Callable[[int], bool] = _always
) -> None:
    """Checks that ranks can share the rows of a run, and the heads of every mixer.

    Args:
        run: The run.
        num_ranks: `context_parallel`, at least 2.
        tensor_ranks: `tensor_parallel`, which shares rows and heads, too.
        fits: Whether another number fits the batch and the other axes.

    Raises:
        UserError: They cannot; the message has the nearest number of ranks that can.
    """
    if "context" not in run.objective.trains_under:
        raise UserError(
            f"context_parallel is {num_ranks}, and {run.objective.__name__} does not train under context "
            "parallelism, where a rank has a part of each row: set context_parallel to 1"
        )
    for mixer, _ in run.decoder.list_mixers():
        if mixer.count_shared_heads() is None:
            raise UserError(
                f"context_parallel is {num_ranks}, and {type(mixer).__name__} does not know how ranks could share its "
                "heads (`SequenceMixerConfig.count_shared_heads`): set context_parallel to 1"
            )
    for what, number in _list_shared_sizes(run).items():
        if number % (num_ranks * tensor_ranks):
            # A divisor of the given degree leaves the other axes as they are.
            divisors = (cp for cp in range(1, num_ranks + 1) if num_ranks % cp == 0)
            shared = [cp for cp in divisors if _shares_context(run, cp, tensor_ranks)]
            fitting = [cp for cp in shared if fits(cp)]
            nearest = max(fitting or shared)
            of_matrices = f" * tensor_parallel {tensor_ranks}" if tensor_ranks > 1 else ""
            raise UserError(
                f"context_parallel {num_ranks}{of_matrices} does not divide {what}; set context_parallel to {nearest}"
                + ("" if fitting else _OF_BATCH)
            )


def _list_shared_sizes(run: RunOptions) -> dict[str, int]:
    """Returns what context parallelism divides: the tokens of a row and the heads of each mixer, by their names."""
    sizes = {} if run.seq_len is None else {f"data.seq_len {run.seq_len}": run.seq_len}
    for mixer, _ in run.decoder.list_mixers():
        num_heads = mixer.count_shared_heads()
        if num_heads is not None:
            sizes[f"the {numbered(num_heads, 'heads')} of {type(mixer).__name__}"] = num_heads
    return sizes


def _shares_context(run: RunOptions, num_ranks: int, tensor_ranks: int) -> bool:
    """Returns whether so many ranks can share rows and heads, beside those that share matrices."""
    return num_ranks == 1 or all(size % (num_ranks * tensor_ranks) == 0 for size in _list_shared_sizes(run).values())


def check_pipeline(run: RunOptions, num_ranks: int, *, reduces_each: bool, keeps_gathered: bool) -> None:
    """Checks that a pipeline can train a run.

    Args:
        run: The run.
        num_ranks: `pipeline_parallel`, at least 2.
        reduces_each: Whether gradients are to be reduced after each micro-batch.
        keeps_gathered: Whether parameters are to stay gathered by the strategy's own option.

    Raises:
        UserError: It cannot.
    """
    remedy = "set pipeline_parallel to 1, and share the model by FSDP2 alone"
    if "pipeline" not in run.objective.trains_under:
        raise UserError(
            f"pipeline_parallel is {num_ranks}, and {run.objective.__name__} does not train under pipeline "
            f"parallelism: {remedy}"
        )
    if run.has_float8:
        raise UserError(f"model.float8 is given, whose scales a pipeline does not compute: remove it, or {remedy}")
    if reduces_each:
        raise UserError(
            "gradient_reduction is micro_batch, and a pipeline reduces gradients after its last backward alone: "
            "set it to window, or pipeline_parallel to 1"
        )
    if keeps_gathered:
        raise UserError(
            "keep_gathered is true, and a pipeline itself keeps parameters gathered from the first backward of a "
            "window to the last: set it to auto, or pipeline_parallel to 1"
        )
