"""`genesis plan`: what a recipe needs before it starts. It imports no Lightning and allocates nothing."""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from genesis.arguments import Parser
from genesis.cli.option_names import check_fit
from genesis.cli.options import PLAIN_WIDTH, check_is_yaml
from genesis.errors import UserError
from genesis.plan.bill import PHASES
from genesis.plan.recipe import MOST_RANKS, Recipe, apply_overrides, read_content, read_recipe
from genesis.plan.remedies import Budget
from genesis.plan.report import Plan, Question, Row, make_plan, own_layout, to_json
from genesis.plan.speed import ASSUMED_MFU, LINKS, Rate, rate_from_tokens, read_rates
from genesis_callbacks.device_peaks import PeakType, read_peak_flops

GIB: Final = 2**30
_UNITS: Final = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb", "eb"))},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtpe", start=1)},
}
_AMOUNT: Final = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MOST_BYTES: Final = 10**24
_CONTEXT_BYTES: Final = 600 * 2**20
"""Assumed: a CUDA context with its kernels."""
_PRODUCTS_BYTES: Final = 2 * 32 * 2**20
"""The workspaces of cuBLAS that torch makes for two streams."""
_COMMUNICATOR_BYTES: Final = 400 * 2**20
"""Assumed: NCCL's communicators and their buffers."""
_HOST_BYTES: Final = 600 * 2**20
"""Resident memory of Python, torch and Lightning on a CPU."""
_MARGIN_SHARE: Final = 0.05
_LEAST_NUMBER: Final = 1e-9
_MOST_NUMBER: Final = 1e15
"""No price, rate or time lies beyond these; their products and quotients are finite floats."""

_DESCRIPTION = """Prints the memory of a recipe by rank and moment of a step, for every strategy, and what makes it fit;
then time, energy, money, disk and the interval of saves. Nothing is allocated.
Options of `genesis fit` change the recipe: --data.micro_batch_size 2.
Example: genesis plan --config configs/genesis-1b.yaml --gpus 1,2 --memory 24GB"""


def main(argv: list[str]) -> int:
    """Runs `genesis plan` and returns its exit status: 1 if the recipe's own strategy does not fit."""
    own, overrides = split_overrides(argv)
    arguments = _build_parser().parse_args(own)
    check_fit([f"--{name}={value}" for name, value in overrides])
    for path in arguments.config:
        check_is_yaml(path)
    where = ", ".join(map(str, arguments.config))
    gpus = None if arguments.gpus is None else _read_gpus(arguments.gpus)
    written = read_content(arguments.config)
    content = apply_overrides(written, overrides)
    recipe = read_recipe(content, where, num_ranks=None if gpus is None else gpus[0], base_dtype=arguments.base_dtype)
    question = _build_question(arguments, recipe, gpus or (recipe.layout.num_ranks,), _find_batch(written))
    corpora = [] if recipe.corpus is None else [Path(recipe.corpus)]
    plan = make_plan(recipe, question, corpora)
    if arguments.json:
        print(json.dumps(to_json(plan), indent=1))
    else:
        print_plan(plan, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH), where)
    return 0 if plan.own.fits else 1


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the plan's own words, and the options of `genesis fit`: those whose name has a dot, and `--run_dir`.

    Example:
        >>> split_overrides(["--gpus", "2", "--data.seq_len", "512", "--trainer.max_steps=9"])
        (['--gpus', '2'], [('data.seq_len', '512'), ('trainer.max_steps', '9')])

    Raises:
        UserError: An option has no value.
    """
    own: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            own.append(word)
            continue
        if not equals:
            following = next(words, None)
            if following is None:
                raise UserError(f"{name} has no value: write {name} VALUE")
            value = following
        overrides.append((name.removeprefix("--"), value))
    return own, overrides


def read_bytes(text: str) -> int:
    """Returns the bytes that a text such as `24GB` or `80GiB` means.

    Example:
        >>> read_bytes("24GB"), read_bytes("1GiB")
        (24000000000, 1073741824)

    Raises:
        ArgumentTypeError: It is no amount of at least one byte.
    """
    match = _AMOUNT.fullmatch(text)
    unit = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount: write it as 24GB or 80GiB")
    number = float(match[1]) * unit
    if not 1 <= number <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no possible memory: write at least one byte, such as 24GB")
    return int(number)


def _read_gpus(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split(","):
        if not part.strip().isascii() or not part.strip().isdecimal() or not 1 <= int(part) <= MOST_RANKS:
            raise UserError(f"--gpus is {text!r}: write numbers of devices such as 1,2,8, each from 1 to {MOST_RANKS}")
        numbers.append(int(part))
    return tuple(dict.fromkeys(numbers))


def _read_number(*, allows_zero: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0.0 or (number == 0.0 and not allows_zero):
            least = "at least 0" if allows_zero else "above 0"
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {least}")
        if number != 0.0 and not _LEAST_NUMBER <= number <= _MOST_NUMBER:
            raise argparse.ArgumentTypeError(f"{text!r} must lie between {_LEAST_NUMBER:g} and {_MOST_NUMBER:g}")
        return number

    return read


def _build_parser() -> Parser:
    parser = Parser(
        prog="genesis plan", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, action="append", required=True, help="recipe of `genesis fit`; several are merged"
    )
    parser.add_argument("--gpus", help="numbers of devices, such as 1,2,8 (default: the recipe's)")
    parser.add_argument("--memory", type=read_bytes, help="memory of each device, such as 24GB or 80GiB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--base_dtype", choices=("float32", "bfloat16"), help="type of the frozen weights of adapters")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--workspace",
        type=read_bytes,
        help="memory beside tensors: driver, kernels, communicators (default: an assumed one, which is printed)",
    )
    memory.add_argument(
        "--margin",
        type=_read_number(allows_zero=True),
        default=_MARGIN_SHARE,
        help="share of the peak that fragmentation may take (default %(default)s)",
    )
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--rates", type=Path, help="report of `genesis doctor --device`, or record of `genesis bench step`"
    )
    speed.add_argument("--tokens_per_second", type=_read_number(), help="measured rate over all devices")
    speed.add_argument("--device_name", help="the driver's name of the device, such as 'NVIDIA GeForce RTX 4090'")
    speed.add_argument("--mfu", type=_read_number(), help=f"assumed MFU (default {ASSUMED_MFU})")
    speed.add_argument(
        "--link", default="pcie", help=f"{', '.join(LINKS)}, or GB/s in each direction (default %(default)s)"
    )
    cost = parser.add_argument_group("cost")
    cost.add_argument("--steps", type=_read_number(), help="steps of the run (default: the recipe's)")
    cost.add_argument("--watts", type=_read_number(), help="power of a device with its share of the host")
    cost.add_argument("--cost_per_hour", type=_read_number(), help="price of a device")
    cost.add_argument("--spot_cost_per_hour", type=_read_number(), help="price of an interruptible device")
    cost.add_argument(
        *("--interruptions_per_day",),
        type=_read_number(allows_zero=True),
        default=0.0,
        help="interruptions of the run at that price",
    )
    for name, default, text in (
        ("restart_seconds", 300.0, "time from an interruption to the next step"),
        ("mirror_lag_seconds", 0.0, "time by which the mirror is behind; 0 if the disk stays"),
    ):
        cost.add_argument(
            f"--{name}", type=_read_number(allows_zero=True), default=default, help=f"{text} (%(default)s)"
        )
    saves = parser.add_argument_group("saves")
    saves.add_argument("--mtbf_hours", type=_read_number(), help="mean time between failures of the run")
    saves.add_argument("--save_seconds", type=_read_number(), help="time by which a save delays training")
    saves.add_argument(
        "--from_global_batch_size",
        type=_read_number(),
        help="global batch for which the learning rate was found (default: that of the recipe's files)",
    )
    return parser


def _build_question(
    arguments: argparse.Namespace, recipe: Recipe, gpus: tuple[int, ...], written_batch: int | None
) -> Question:
    old_batch = arguments.from_global_batch_size or written_batch
    workspace = arguments.workspace
    if workspace is None:
        workspace = _HOST_BYTES if recipe.workload.is_cpu else _CONTEXT_BYTES + _PRODUCTS_BYTES
        workspace += _COMMUNICATOR_BYTES if max(gpus) > 1 and not recipe.workload.is_cpu else 0
    link = _read_link(arguments.link)
    return Question(
        gpus=gpus,
        budget=Budget(arguments.memory, workspace, arguments.margin),
        rate=_find_rate(arguments, recipe, gpus[0], link),
        link_bytes_per_second=link,
        watts=arguments.watts,
        price_per_hour=arguments.cost_per_hour,
        spot_price_per_hour=arguments.spot_cost_per_hour,
        interruptions_per_day=arguments.interruptions_per_day,
        restart_seconds=arguments.restart_seconds,
        mirror_lag_seconds=arguments.mirror_lag_seconds,
        failure_hours=arguments.mtbf_hours,
        save_seconds=arguments.save_seconds,
        num_steps=None if arguments.steps is None else max(1, int(arguments.steps)),
        old_batch=None if old_batch is None else max(1, int(old_batch)),
    )


def _find_batch(written: Mapping[str, Any]) -> int | None:
    """Returns the global batch that the recipe's files have; None for prompts, whose answers are the batch."""
    data = written.get("data")
    batch = data.get("global_batch_size") if isinstance(data, Mapping) and "prompts" not in data else None
    return batch if type(batch) is int and batch > 0 else None


def _read_link(text: str) -> float:
    if text in LINKS:
        return LINKS[text]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not _LEAST_NUMBER <= number <= _MOST_NUMBER:
        raise UserError(
            f"--link is {text!r}: it must be {', '.join(LINKS)}, or GB/s from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}"
        )
    return number * 1e9


def _find_rate(arguments: argparse.Namespace, recipe: Recipe, num_ranks: int, link: float) -> Rate | None:
    """Returns a measured rate if there is one, or the share of a known peak that is assumed, or None."""
    if arguments.tokens_per_second is not None:
        layout = own_layout(recipe.layout, num_ranks)
        return rate_from_tokens(recipe.workload, layout, arguments.tokens_per_second, link)
    if arguments.rates is not None:
        return read_rates(arguments.rates)
    if arguments.device_name is None:
        return None
    kind: PeakType = "tfloat32" if recipe.workload.precision == "32-true" else "bfloat16"
    if recipe.workload.precision.startswith("16"):
        kind = "float16"
    peak = read_peak_flops(arguments.device_name, kind)
    if peak is None:
        raise UserError(
            f"the peak of --device_name {arguments.device_name!r} is not known: give --rates or --tokens_per_second"
        )
    mfu = ASSUMED_MFU if arguments.mfu is None else min(1.0, arguments.mfu)
    source = f"assumed MFU of {mfu:.0%} of {peak / 1e12:,.0f} TFLOP/s in {kind}"
    return Rate(peak * mfu, source, is_assumed=True)


# ---- the tables


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
    for line in (*recipe.assumptions, *plan.notes):
        console.print(f"assumed: {escape(line)}", highlight=False)
    console.print(_build_bill(plan))
    console.print(_build_strategies(plan))
    console.print(_build_run(plan))


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


def _build_run(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE, title="the run", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, text in _list_facts(plan):
        table.add_row(name, escape(text))
    return table


def _list_facts(plan: Plan) -> list[tuple[str, str]]:
    workload = plan.recipe.workload
    count = workload.num_micro_batches(plan.own.layout.num_ranks)
    facts = [("tokens per update", f"{workload.tokens_per_step:,} ({count:,} micro-batches a rank)")]
    if plan.num_steps is not None:
        tokens = plan.num_steps * workload.tokens_per_step
        amount = f"{tokens / 1e9:,.2f} billion" if tokens >= 10**9 else f"{tokens / 1e6:,.2f} million"
        facts.append(("steps", f"{plan.num_steps:,}, {amount} tokens"))
    facts += _list_costs(plan)
    facts += _list_saves(plan)
    host = plan.host
    parts = [f"staging of a save {_gb(host.staging)}", f"windows of the loader {_gb(host.windows)}"]
    if host.offload:
        parts.insert(0, f"offload {_gb(host.offload)}")
    facts.append(("host memory of a rank", ", ".join(parts)))
    for share in plan.packings:
        facts.append(
            (f"packing {share.packing}", f"at {share.seq_len:,} tokens {1 - share.valid_share:.1%} of the work is lost")
        )
    proposal = plan.proposal
    if proposal is not None:
        text = f"{proposal.lr:.3g} for a global batch {proposal.factor:g} times as large (square-root rule for Adam"
        betas = (
            "no valid betas" if proposal.betas is None else f"betas {proposal.betas[0]:.4g}, {proposal.betas[1]:.4g}"
        )
        facts.append(("AdamW's learning rate", f"{text}, arXiv:2205.10287; {betas}, eps {proposal.eps:.3g})"))
        if workload.optimizer == "muon":
            facts.append(("Muon's learning rate", "no such rule is known for Muon: measure it"))
    if plan.num_trained == plan.num_parameters:
        least, most = _gb(plan.textbook.without_master_weights), _gb(plan.textbook.with_master_weights)
        text = f"{least} with 16-bit weights and gradients, {most} with master weights, over all ranks"
        facts.append(("textbook state", text))
    return facts


def _list_costs(plan: Plan) -> list[tuple[str, str]]:
    facts, step, cost = [], plan.own.step, plan.cost
    if step is None:
        return [("time", "give --device_name, --rates or --tokens_per_second")]
    exposed = f", {step.exposed_seconds / step.seconds:.0%} of it communication" if step.exposed_seconds else ""
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
    if plan.interval is not None:
        interval = plan.interval
        steps = (
            ""
            if plan.own.step is None
            else f" ({max(1, round(interval.daly_seconds / plan.own.step.seconds)):,} steps)"
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
