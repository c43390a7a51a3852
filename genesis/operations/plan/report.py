"""Puts the answers of a plan together, as one value that can be printed or written as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.operations.plan.bandwidths import Bandwidths
from genesis.operations.plan.checkpoints import CheckpointBill, Interval, count_checkpoints, find_interval
from genesis.operations.plan.choose import Choice, Recommendation, recommend, warn_of_axes
from genesis.operations.plan.cost import Cost, Interruptions, SpotComparison, compare_spot, count_cost
from genesis.operations.plan.epochs import Epoch, find_epoch
from genesis.operations.plan.host import HostBytes, count_host
from genesis.operations.plan.layout import Layout, Workload
from genesis.operations.plan.padding import PackingShare, read_packings
from genesis.operations.plan.recipe import Recipe
from genesis.operations.plan.remedies import Budget, Remedy, find_remedies, list_layouts
from genesis.operations.plan.speed import Rate, StepTime, flops_per_token, time_step
from genesis.operations.plan.state import TextbookBill, build_model
from genesis.operations.plan.timeline import Timeline, play_step
from genesis.optim.algorithm import RateProposal

UNKNOWN_RATE: Final = Rate(1e14, "unknown", is_assumed=True)
"""The order of remedies needs some rate; no time is printed for it."""
KEEP_SPARE: Final = 1.2
"""Free memory for each gathered byte that `Sharded(keep_gathered="auto")` demands."""


@dataclass(frozen=True)
class Question:
    """What is asked about a recipe.

    Args:
        gpus: Numbers of devices.
        budget: The memory of each.
        rate: The rate of a device; None if it is not known.
        bandwidths: What moves how fast.
        watts: Power of a device.
        price_per_hour: Price of a device.
        spot_price_per_hour: Price of one that can be taken away.
        interruptions_per_day: How often that happens to the run.
        restart_seconds: Time from an interruption to the next step.
        mirror_lag_seconds: Time by which the copy of a checkpoint elsewhere is late.
        failure_hours: Mean time between failures of the run.
        save_seconds: Time that a save delays training; None to estimate it.
        num_steps: Steps; None for the recipe's.
        old_batch: The global batch for which the recipe's learning rate was found; None if it is the recipe's.
        chooses: Whether to choose among all layouts.
    """

    gpus: tuple[int, ...]
    budget: Budget
    rate: Rate | None
    bandwidths: Bandwidths
    watts: float | None = None
    price_per_hour: float | None = None
    spot_price_per_hour: float | None = None
    interruptions_per_day: float = 0.0
    restart_seconds: float = 300.0
    mirror_lag_seconds: float = 0.0
    failure_hours: float | None = None
    save_seconds: float | None = None
    num_steps: int | None = None
    old_batch: int | None = None
    chooses: bool = False


@dataclass(frozen=True)
class Row:
    """A strategy on a number of devices.

    Args:
        layout: The layout.
        is_own: Whether the recipe has this strategy.
        timeline: Its memory; None if it is refused.
        needed_bytes: Memory that a device must have.
        fits: Whether it has that.
        step: The time of a step.
        remedies: What makes it fit, if it does not.
        refusal: Why it cannot run.
    """

    layout: Layout
    is_own: bool
    timeline: Timeline | None
    needed_bytes: int
    fits: bool
    step: StepTime | None
    remedies: tuple[Remedy, ...]
    refusal: str | None


@dataclass(frozen=True)
class Plan:
    """The answers.

    Args:
        recipe: The recipe.
        question: What was asked.
        num_parameters: Parameters of the model.
        num_trained: Those that are trained.
        flops_per_token: Of a forward and backward.
        rows: Every strategy on every number of devices.
        own: The recipe's own strategy on the first number of devices.
        host: Memory of the host for a rank of it.
        textbook: The state of mixed precision as textbooks count it.
        num_steps: Steps of the run; None if it is not known.
        num_epochs: Epochs of the run; None if the corpus is not here.
        epoch: An epoch of the corpus, likewise.
        cost: Of the run; None without steps or a rate.
        checkpoints: What checkpoints take.
        save_seconds: Time that a save delays training.
        write_seconds: Time of writing a checkpoint to the disk, beside training.
        interval: Of saves, for the mean time between failures.
        spot: Interruptible machines; None without prices.
        packings: The packings of the corpus, if it is here.
        proposal: Options of the optimizer, if the global batch has changed and a rule is known.
        notes: What the bill assumes.
        recommendations: For each number of devices, if they were asked for.
    """

    recipe: Recipe
    question: Question
    num_parameters: int
    num_trained: int
    flops_per_token: float
    rows: tuple[Row, ...]
    own: Row
    host: HostBytes
    textbook: TextbookBill
    num_steps: int | None
    num_epochs: float | None
    epoch: Epoch | None
    cost: Cost | None
    checkpoints: CheckpointBill
    save_seconds: float
    write_seconds: float
    interval: Interval | None
    spot: SpotComparison | None
    packings: tuple[PackingShare, ...]
    proposal: RateProposal | None
    notes: tuple[str, ...]
    recommendations: tuple[tuple[int, Recommendation], ...] = ()


def make_plan(recipe: Recipe, question: Question, corpora: Sequence[Path] = ()) -> Plan:
    """Returns the answers to a question about a recipe.

    Args:
        recipe: The recipe.
        question: What is asked.
        corpora: Where the corpus may lie.

    Raises:
        UserError: The recipe cannot run on the first number of devices.
    """
    workload = recipe.workload
    model = build_model(workload)
    rows = tuple(_answer_row(workload, layout, recipe.layout, question) for layout in _list_rows(recipe, question))
    own = next(row for row in rows if row.is_own)
    recommendations = tuple(_recommend(recipe, question)) if question.chooses else ()
    if own.timeline is None:
        chosen = recommendations[0][1].choices[:1] if recommendations else ()
        if not chosen:
            raise UserError(own.refusal or "the recipe cannot run")
        return _plan_chosen(recipe, question, corpora, own, chosen[0])
    packings = tuple(share for corpus in corpora for share in read_packings(corpus))
    epochs = (find_epoch(corpus, recipe.packing, workload.seq_len, packings) for corpus in corpora)
    epoch = next(filter(None, epochs), None)
    num_steps = question.num_steps or recipe.num_steps
    if num_steps is None and recipe.num_epochs is not None and epoch is not None:
        num_steps = max(1, recipe.num_epochs * epoch.num_sequences // workload.global_batch_size)
    num_epochs = None
    if num_steps is not None and epoch is not None and epoch.num_sequences:
        num_epochs = num_steps * workload.global_batch_size / epoch.num_sequences
    cost = None
    if num_steps is not None and own.step is not None:
        seconds = num_steps * own.step.seconds
        cost = count_cost(seconds, own.layout.num_ranks, question.watts, question.price_per_hour)
    checkpoints = count_checkpoints(model, workload, recipe.saves, num_steps)
    save_seconds = question.save_seconds
    if save_seconds is None:
        to_host = question.bandwidths.to_host.bytes_per_second
        save_seconds = checkpoints.checkpoint_bytes / own.layout.num_ranks / to_host
    batch = workload.global_batch_size
    proposal = None
    if question.old_batch is not None and question.old_batch != batch:
        proposal = workload.optimizer.parts[-1].propose_rate(batch / question.old_batch)
    num_parameters = sum(parameter.num_weights for parameter in model.parameters)
    return Plan(
        recipe=recipe,
        question=question,
        num_parameters=num_parameters,
        num_trained=sum(parameter.num_elements for parameter in model.trained),
        flops_per_token=flops_per_token(workload),
        rows=rows,
        own=own,
        host=count_host(
            workload,
            own.layout,
            own.timeline,
            has_optimizer=recipe.saves.has_optimizer,
            prefetch_windows=recipe.prefetch_windows,
        ),
        textbook=TextbookBill(num_parameters),
        num_steps=num_steps,
        num_epochs=num_epochs,
        epoch=epoch,
        cost=cost,
        checkpoints=checkpoints,
        save_seconds=save_seconds,
        write_seconds=checkpoints.checkpoint_bytes / question.bandwidths.to_disk.bytes_per_second,
        interval=None if question.failure_hours is None else find_interval(save_seconds, question.failure_hours * 3600),
        spot=_compare_spot(recipe, question, own, cost),
        packings=packings,
        proposal=proposal,
        notes=tuple(_list_notes(workload, own, question)),
        recommendations=recommendations,
    )


def _plan_chosen(recipe: Recipe, question: Question, corpora: Sequence[Path], own: Row, chosen: Choice) -> Plan:
    """Returns the plan of the layout that was chosen, because the recipe's own cannot run on so many devices."""
    plan = make_plan(replace(recipe, workload=chosen.workload, layout=chosen.layout), question, corpora)
    return replace(plan, notes=(f"the recipe's layout is replaced by the recommended one: {own.refusal}", *plan.notes))


def _recommend(recipe: Recipe, question: Question) -> Iterator[tuple[int, Recommendation]]:
    if question.rate is None or question.budget.memory_bytes is None:
        missing = "--memory" if question.rate is not None else "--device_name, --rates or --tokens_per_second"
        raise UserError(f"--choose compares times of layouts that fit, and needs {missing}")
    for num_ranks in question.gpus:
        yield (
            num_ranks,
            recommend(recipe.workload, recipe.layout, num_ranks, question.budget, question.rate, question.bandwidths),
        )


def _list_rows(recipe: Recipe, question: Question) -> list[Layout]:
    layouts: list[Layout] = []
    for number, num_ranks in enumerate(question.gpus):
        several = list_layouts(recipe.layout, num_ranks)
        own = own_layout(recipe.layout, num_ranks)
        if number == 0 and own not in several:
            several.insert(0, own)
        layouts += several
    return layouts


def own_layout(own: Layout, num_ranks: int) -> Layout:
    """Returns the recipe's layout on so many devices."""
    if own.num_ranks == num_ranks:
        return own
    from_list = list_layouts(own, num_ranks)
    for layout in from_list:
        if (layout.strategy, layout.cpu_offload) == (own.strategy, own.cpu_offload):
            return layout
    return from_list[0]


def _answer_row(workload: Workload, layout: Layout, own: Layout, question: Question) -> Row:
    is_own = layout == own_layout(own, question.gpus[0])
    try:
        timeline = play_step(workload, layout)
    except UserError as error:
        return Row(layout, is_own, None, 0, False, None, (), str(error))
    budget = question.budget
    fits = budget.fits(timeline.peak_bytes)
    rate = question.rate or UNKNOWN_RATE
    step = time_step(workload, layout, rate, question.bandwidths)
    remedies = () if fits else find_remedies(workload, layout, budget, rate, question.bandwidths)
    needed = budget.needed(timeline.peak_bytes)
    shown = None if question.rate is None else step
    return Row(layout, is_own, timeline, needed, fits, shown, tuple(remedies), None)


def _list_notes(workload: Workload, own: Row, question: Question) -> Iterator[str]:
    assert own.timeline is not None
    budget = question.budget
    yield from own.timeline.notes
    yield from warn_of_axes(own.layout, question.bandwidths)
    layout, whole = own.layout, own.timeline.gathered_whole_bytes
    if layout.has_compiled_blocks:
        yield "compiled blocks are counted as eager ones, which keep no less"
    several = workload.num_micro_batches(layout) > 1 and layout.num_ranks > 1
    if layout.is_sharded and several and not (layout.keeps_gathered or workload.is_cpu) and budget.memory_bytes:
        has_room = own.needed_bytes + round(KEEP_SPARE * whole) <= budget.memory_bytes
        verb = "will" if has_room else "will not"
        yield f"keep_gathered auto {verb} keep {whole / 1e9:,.2f} GB of parameters gathered between micro-batches"
    if workload.objective.memory_note:
        yield workload.objective.memory_note


def _compare_spot(recipe: Recipe, question: Question, own: Row, cost: Cost | None) -> SpotComparison | None:
    if cost is None or question.price_per_hour is None or question.spot_price_per_hour is None or own.step is None:
        return None
    every = recipe.saves.every_n_steps
    interval = cost.hours * 3600 if every is None else every * own.step.seconds
    interruptions = Interruptions(
        question.interruptions_per_day, interval, question.mirror_lag_seconds, question.restart_seconds
    )
    return compare_spot(
        cost.hours * 3600, own.layout.num_ranks, question.spot_price_per_hour, question.price_per_hour, interruptions
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain JSON. Bytes, seconds and counts have their units in their names."""
    recipe, question = plan.recipe, plan.question
    workload = recipe.workload
    return {
        "schema_version": 1,
        "what": "genesis plan",
        "assumptions": list(recipe.assumptions),
        "notes": list(plan.notes),
        "model": {
            "num_parameters": plan.num_parameters,
            "num_trained": plan.num_trained,
            "flops_per_token": plan.flops_per_token,
            "textbook_state_bytes": plan.textbook.without_master_weights,
            "textbook_state_with_master_weights_bytes": plan.textbook.with_master_weights,
        },
        "budget": asdict(question.budget),
        "rate": None if question.rate is None else asdict(question.rate),
        "bandwidths": {name: asdict(one) for name, one in question.bandwidths.named().items()},
        "strategies": [_row_to_json(row) for row in plan.rows],
        "host": asdict(plan.host),
        "run": {
            "tokens_per_update": workload.tokens_per_step,
            "num_micro_batches": workload.num_micro_batches(plan.own.layout),
            "num_steps": plan.num_steps,
            "num_epochs": plan.num_epochs,
            "num_tokens": None if plan.num_steps is None else plan.num_steps * workload.tokens_per_step,
            **({} if plan.cost is None else asdict(plan.cost)),
        },
        "checkpoints": {
            **asdict(plan.checkpoints),
            "save_seconds": plan.save_seconds,
            "write_seconds": plan.write_seconds,
        },
        "interval": None if plan.interval is None else asdict(plan.interval),
        "spot": None if plan.spot is None else {**asdict(plan.spot), "is_spot_cheaper": plan.spot.is_spot_cheaper},
        "packings": [asdict(share) for share in plan.packings],
        "learning_rate": None if plan.proposal is None else asdict(plan.proposal),
        "recommendations": [
            {"num_gpus": num_ranks, **_recommendation_to_json(one)} for num_ranks, one in plan.recommendations
        ],
    }


def _recommendation_to_json(recommendation: Recommendation) -> dict[str, Any]:
    return {
        "num_tried": recommendation.num_tried,
        "least_needed_bytes": recommendation.least_needed,
        "reasons": list(recommendation.reasons),
        "warnings": list(recommendation.warnings),
        "choices": [
            {
                "strategy": choice.layout.name,
                "options": choice.options,
                "needed_bytes": choice.needed_bytes,
                "stage_peak_bytes": list(choice.timeline.stage_peaks),
                "step": asdict(choice.step),
            }
            for choice in recommendation.choices
        ],
    }


def _row_to_json(row: Row) -> dict[str, Any]:
    layout, timeline = row.layout, row.timeline
    found: dict[str, Any] = {
        "strategy": layout.name,
        "num_gpus": layout.num_ranks,
        "activation_checkpointing": layout.activation_checkpointing,
        "expert_parallel": layout.expert_parallel,
        "blocks_per_recomputation": layout.blocks_per_recomputation,
        "activation_offload": layout.activation_offload,
        "optimizer_offload": layout.optimizer_offload,
        "is_own": row.is_own,
    }
    if timeline is None:
        return {**found, "refusal": row.refusal}
    return {
        **found,
        "fits": row.fits,
        "needed_bytes": row.needed_bytes,
        "peak_phase": timeline.peak_phase,
        "peak_bytes": timeline.peak_bytes,
        "phases": {phase: _sort(terms) for phase, terms in timeline.peaks.items()},
        "step": None if row.step is None else asdict(row.step),
        "remedies": [
            {
                "changes": list(remedy.changes),
                "needed_bytes": remedy.needed_bytes,
                "slowdown": round(remedy.slowdown, 3),
                "changes_result": remedy.changes_result,
            }
            for remedy in row.remedies
        ],
    }


def _sort(terms: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(terms.items()))
