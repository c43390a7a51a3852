"""The tables of `genesis plan`."""

import math
from collections.abc import Iterator

from rich import box
from rich.markup import escape
from rich.table import Table

from genesis.base.console import Console
from genesis.base.errors import numbered
from genesis.operations.plan.bill import PHASES
from genesis.operations.plan.choose import Recommendation
from genesis.operations.plan.report import Plan, Row


def print_plan(plan: Plan, console: Console, where: str) -> None:
    """Prints the plan as tables."""
    recipe, budget = plan.recipe, plan.question.budget
    trained = "" if plan.num_trained == plan.num_parameters else f", {plan.num_trained / 1e6:,.1f}M trained"
    digits = 0 if plan.num_parameters >= 10**7 else 2
    console.print(f"{escape(where)}: {plan.num_parameters / 1e6:,.{digits}f}M parameters{trained}", highlight=False)
    limit = "no --memory given" if budget.memory_bytes is None else f"{_gb(budget.memory_bytes)} a device"
    console.print(
        f"memory: {limit}; beside tensors {_gb(budget.workspace_bytes)} for driver, kernels and communicators, and "
        f"{budget.margin_share:.0%} for fragmentation",
        highlight=False,
    )
    if plan.question.rate is not None:
        console.print(f"speed: {escape(plan.question.rate.source)}", highlight=False)
    for line in _list_bandwidths(plan):
        console.print(escape(line), highlight=False)
    for line in (*recipe.assumptions, *plan.notes):
        console.print(f"assumed: {escape(line)}", highlight=False)
    console.print(_build_bill(plan))
    console.print(_build_strategies(plan))
    for num_ranks, recommendation in plan.recommendations:
        for part in _list_recommended(num_ranks, recommendation):
            console.print(part, highlight=False)
    console.print(_build_run(plan))


def _list_bandwidths(plan: Plan) -> list[str]:
    """Returns a line of the bandwidths; empty if no time is printed and none was measured."""
    bandwidths = plan.question.bandwidths
    named = bandwidths.named()
    if max(plan.question.gpus) <= bandwidths.devices_per_node:
        del named["between nodes"]
    if plan.question.rate is None and not any(one.is_measured for one in named.values()):
        return []
    shown = (
        f"{name} {one.bytes_per_second / 1e9:,.1f} ({one.source.partition(':')[0]})" for name, one in named.items()
    )
    return [f"bandwidths in GB/s: {', '.join(shown)}"]


def _build_bill(plan: Plan) -> Table:
    timeline = plan.own.timeline
    assert timeline is not None
    layout = plan.own.layout
    groups = f", {layout.blocks_per_recomputation} at once" if layout.blocks_per_recomputation > 1 else ""
    title = (
        f"memory of a rank: {layout.name} on {layout.num_ranks}, recomputed blocks: "
        f"{layout.activation_checkpointing}{groups}"
    )
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    totals = {phase: sum(terms.values()) for phase, terms in timeline.peaks.items()}
    name, unit = ("GB", 10**9) if max(totals.values()) >= 10**9 else ("MB", 10**6)
    table.add_column(name)
    phases = [phase for phase in PHASES if phase in timeline.peaks]
    for phase in phases:
        table.add_column(f"{phase} *" if phase == timeline.peak_phase else phase, justify="right")
    terms = dict.fromkeys(term for phase in phases for term in timeline.peaks[phase])
    for term in terms:
        cells = [timeline.peaks[phase].get(term, 0) for phase in phases]
        if max(cells) >= unit // 200:
            table.add_row(term, *(f"{cell / unit:,.2f}" if cell >= unit // 200 else "" for cell in cells))
    table.add_section()
    table.add_row("tensors", *(f"{totals[phase] / unit:,.2f}" for phase in phases))
    needed = (plan.question.budget.needed(totals[phase]) for phase in phases)
    table.add_row("with workspaces and margin", *(f"{one / unit:,.2f}" for one in needed))
    return table


def _build_strategies(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE, title="strategies", title_justify="left")
    for name, side in (("devices", "right"), ("strategy", "left"), ("GB", "right"), ("peak in", "left")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]  # a side
    table.add_column("fits" if plan.question.budget.memory_bytes is not None else "")
    if plan.question.rate is not None:
        table.add_column("tokens/s", justify="right")
    table.add_column("what makes it fit: the quickest changes", overflow="fold")
    for row in plan.rows:
        *cells, step, advice = _describe_row(row, has_limit=plan.question.budget.memory_bytes is not None)
        table.add_row(*cells, *([] if plan.question.rate is None else [step]), advice)
    return table


def _describe_row(row: Row, *, has_limit: bool) -> tuple[str, ...]:
    name = f"{row.layout.name} *" if row.is_own else row.layout.name
    if row.timeline is None:
        return (str(row.layout.num_ranks), name, "", "", "", "", escape(row.refusal or ""))
    step = "" if row.step is None else f"{row.step.tokens_per_second:,.0f}"
    verdict = ("yes" if row.fits else "no") if has_limit else ""
    lines = [
        f"{' + '.join(remedy.changes)}: {remedy.needed_bytes / 1e9:,.1f} GB, {remedy.slowdown:.2f} x the time"
        f"{', learns otherwise' if remedy.changes_result else ''}"
        for remedy in row.remedies
    ]
    if not row.fits and not lines:
        lines = ["nothing: more devices, or a smaller model"]
    needed = f"{row.needed_bytes / 1e9:,.1f}"
    return str(row.layout.num_ranks), name, needed, row.timeline.peak_phase, verdict, step, escape("\n".join(lines))


def _list_recommended(num_ranks: int, recommendation: Recommendation) -> Iterator[Table | str]:
    """Yields the layouts that fit on a number of devices, and why the first one is recommended."""
    if not recommendation.choices:
        yield (
            f"none of {numbered(recommendation.num_tried, 'layouts')} on {numbered(num_ranks, 'devices')} fits: a "
            f"device needs at least {_gb(recommendation.least_needed)}; adapters, offload, a shorter seq_len or more "
            "devices need less"
        )
        return
    title = f"layouts of {numbered(num_ranks, 'devices')}: the best of {recommendation.num_tried:,}"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in ("strategy", "recomputed", "micro-batch"):
        table.add_column(name)
    for name in ("GB", "s a step", "tokens/s", "exposed", "bubble", "imbalance"):
        table.add_column(name, justify="right")
    for choice in recommendation.choices:
        step, layout = choice.step, choice.layout
        axes = step.axes
        shares = (step.exposed_seconds - axes.bubble - axes.imbalance, axes.bubble, axes.imbalance)
        table.add_row(
            f"{layout.name} *" if choice is recommendation.choices[0] else layout.name,
            str(layout.activation_checkpointing),
            str(choice.workload.micro_batch_size),
            f"{choice.needed_bytes / 1e9:,.1f}",
            f"{step.seconds:,.3g}",
            f"{step.tokens_per_second:,.0f}",
            *(f"{share / step.seconds:.0%}" if share else "" for share in shares),
        )
    yield table
    for line in recommendation.reasons:
        yield escape(f"  because of {line}")
    for line in recommendation.warnings:
        yield escape(f"  note: {line}")
    options = " ".join(f"--{name} {value}" for name, value in recommendation.choices[0].options.items())
    yield escape(f"  take it by: {options}")


def _build_run(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE, title="the run", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, text in _list_facts(plan):
        table.add_row(name, escape(text))
    return table


def _list_facts(plan: Plan) -> list[tuple[str, str]]:
    workload, layout = plan.recipe.workload, plan.own.layout
    count = workload.num_micro_batches(layout)
    facts = [("tokens per update", f"{workload.tokens_per_step:,} ({count:,} micro-batches a rank)")]
    if layout.pipeline_parallel > 1:
        assert plan.own.timeline is not None
        rounds = layout.stages_per_rank * count
        efficiency = rounds / (rounds + layout.pipeline_parallel - 1)
        peaks = ", ".join(f"{one / 1e9:,.1f}" for one in plan.own.timeline.stage_peaks)
        facts.append(("pipeline", f"busy for {efficiency:.0%} of the time at most; GB of its ranks: {peaks}"))
    if plan.num_steps is not None:
        tokens = plan.num_steps * workload.tokens_per_step
        amount = f"{tokens / 1e9:,.2f} billion" if tokens >= 10**9 else f"{tokens / 1e6:,.2f} million"
        facts.append(("steps", f"{plan.num_steps:,}, {amount} tokens with padding"))
    elif plan.recipe.num_epochs is not None:
        facts.append(("steps", f"unknown: {numbered(plan.recipe.num_epochs, 'epochs')} of a corpus that is not here"))
    if plan.num_epochs is not None and plan.epoch is not None:
        epoch = plan.epoch
        what = epoch.packing if epoch.packing in ("pairs", "answers") else f"sequences by {epoch.packing}"
        about = "" if epoch.is_exact else "about "
        facts.append(("epochs", f"{about}{plan.num_epochs:.3g}, each {about}{epoch.num_sequences:,} {what}"))
    facts += _list_costs(plan)
    facts += _list_saves(plan)
    host = plan.host
    parts = [f"staging of a save {_gb(host.staging)}", f"windows of the loader {_gb(host.windows)}"]
    if host.offload:
        parts.insert(0, f"offload {_gb(host.offload)}")
    facts.append(("host memory of a rank", ", ".join(parts)))
    for share in plan.packings:
        is_own = plan.epoch is not None and plan.epoch.packing == share.packing
        other = "" if is_own and share.seq_len == workload.seq_len else "; not what this recipe trains with"
        facts.append(
            (
                f"packing {share.packing}",
                f"at {numbered(share.seq_len, 'tokens')}: {share.valid_share:.1%} of the positions have a label, and "
                f"are learned; the others are padding, or only read{other}",
            )
        )
    facts += _list_rates(plan)
    if plan.num_trained == plan.num_parameters:
        least, most = _gb(plan.textbook.without_master_weights), _gb(plan.textbook.with_master_weights)
        text = f"{least} with 16-bit weights and gradients, {most} with master weights, over all ranks"
        facts.append(("textbook state", text))
    return facts


def _list_rates(plan: Plan) -> list[tuple[str, str]]:
    """Returns learning rates for another global batch than the one for which the recipe's was found."""
    facts, workload = [], plan.recipe.workload
    proposal = plan.proposal
    if proposal is not None:
        text = f"{proposal.lr:.3g} for a global batch {proposal.factor:g} times as large (square-root rule for Adam"
        linear = proposal.lr * math.sqrt(proposal.factor)
        betas = (
            "no valid betas" if proposal.betas is None else f"betas {proposal.betas[0]:.4g}, {proposal.betas[1]:.4g}"
        )
        text = f"{text}, arXiv:2205.10287; {betas}, eps {proposal.eps:.3g})"
        text = f"{text}; {linear:.3g} by the linear rule, which was found for SGD. Both are rules, no theorems"
        facts.append((f"{type(workload.optimizer.parts[-1]).__name__}'s learning rate", text))
    if plan.question.old_batch not in (None, workload.global_batch_size):
        for name in (type(one).__name__ for one in workload.optimizer.parts if one.propose_rate(1.0) is None):
            facts.append((f"{name}'s learning rate", f"no such rule is known for {name}: measure it"))
    return facts


def _list_costs(plan: Plan) -> list[tuple[str, str]]:
    facts, step, cost = [], plan.own.step, plan.cost
    if step is None:
        return [("time", "give --device_name, --rates or --tokens_per_second")]
    what = "communication and offload" if step.offload_seconds else "communication"
    exposed = f", {step.exposed_seconds / step.seconds:.0%} of it {what}" if step.exposed_seconds else ""
    facts.append(("step", f"{step.seconds:,.2f} s{exposed}; {step.tokens_per_second:,.0f} tokens/s"))
    if cost is None:
        return [*facts, ("hours", "give --steps")]
    facts.append(("hours", f"{cost.hours:,.1f} ({cost.hours / 24:,.1f} days)"))
    if cost.kilowatt_hours is not None:
        facts.append(("energy", f"{cost.kilowatt_hours:,.0f} kWh"))
    if cost.money is not None:
        facts.append(("money", f"{cost.money:,.2f}"))
    spot = plan.spot
    if spot is not None:
        lost = f"{spot.interruptions.lost_seconds:,.0f} s lost with each interruption"
        if spot.spot_money is None or spot.hours is None:
            facts.append(("spot", f"never ends: {lost}"))
        else:
            verdict = "cheaper" if spot.is_spot_cheaper else "dearer"
            facts.append(("spot", f"{spot.spot_money:,.2f} in {spot.hours:,.1f} hours, {verdict}: {lost}"))
    return facts


def _list_saves(plan: Plan) -> list[tuple[str, str]]:
    bill = plan.checkpoints
    disk = "all checkpoints stay: set checkpoint.keep_last" if bill.disk_bytes is None else (
        f"{_gb(bill.disk_bytes)} of disk for {bill.num_kept}"
    )  # fmt: skip
    base = f", and {_gb(bill.base_bytes)} of base once" if bill.base_bytes else ""
    facts = [("checkpoint", f"{_gb(bill.checkpoint_bytes)}{base}; {disk}")]
    if plan.question.bandwidths.to_disk.is_measured or plan.question.bandwidths.to_host.is_measured:
        facts.append(
            ("a save", f"delays training by {plan.save_seconds:.2g} s, and is written in {plan.write_seconds:.2g} s")
        )
    if plan.interval is not None:
        interval = plan.interval
        steps = (
            ""
            if plan.own.step is None
            else f" ({numbered(max(1, round(interval.daly_seconds / plan.own.step.seconds)), 'steps')})"
        )
        facts.append(
            (
                "best interval of saves",
                f"{interval.daly_seconds:,.0f} s{steps} by Daly, {interval.young_seconds:,.0f} s by Young; "
                f"{interval.lost_share:.1%} of the time lost (a save delays training by {plan.save_seconds:.2g} s)",
            )
        )
    return facts


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:,.1f} MB"
