"""`genesis plan`: what a recipe needs before it starts. It imports no Lightning and allocates nothing."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from genesis.base.arguments import Parser, read_size
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.cli.option_names import check_names
from genesis.cli.options import PLAIN_WIDTH
from genesis.cli.plan_tables import print_plan
from genesis.cli.quiet import warned_in_one_line
from genesis.model.adapter import BASE_FORMATS
from genesis.operations.plan.bandwidths import (
    DEVICES_PER_NODE,
    LINKS,
    NETWORKS,
    Bandwidth,
    Bandwidths,
    find_bandwidths,
    read_report,
)
from genesis.operations.plan.recipe import MOST_RANKS, Recipe, read_recipe
from genesis.operations.plan.remedies import Budget
from genesis.operations.plan.report import Question, make_plan, own_layout, to_json
from genesis.operations.plan.speed import ASSUMED_MFU, Rate, find_rate, rate_from_tokens
from genesis.recipe.resolved import ResolvedRecipe
from genesis.recipe.yaml import check_is_yaml
from genesis_callbacks.device_peaks import PeakType, read_peak_flops

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
    with warned_in_one_line():
        return _plan(argv)


def _plan(argv: Sequence[str]) -> int:
    own, overrides = split_overrides(argv)
    arguments = _build_parser().parse_args(own)
    check_names("fit", [f"--{name}={value}" for name, value in overrides])
    for path in arguments.config:
        check_is_yaml(path)
    where = ", ".join(map(str, arguments.config))
    gpus = None if arguments.gpus is None else _read_gpus(arguments.gpus)
    written = ResolvedRecipe.read(arguments.config, later=overrides)
    for line in written.notes:
        print(line, file=sys.stderr)
    recipe = read_recipe(
        written.override(overrides),
        num_ranks=None if gpus is None else gpus[0],
        base_dtype=arguments.base_dtype,
        teacher_file=arguments.teacher,
        chooses=arguments.choose,
    )
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
    number = read_size(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is no possible memory: write at least one byte, such as 24GB")
    if text.strip()[-1].isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: write {text.strip()}GB, or {text.strip()}B for bytes")
    return number


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


def _read_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {MOST_RANKS}")
    return int(text)


def _read_share(text: str) -> float:
    number = _read_number()(text)
    if number > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is a share of the peak: write at most 1, such as 0.4 for 40%")
    return number


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
    parser.add_argument("--teacher", type=Path, help="decoder of the teacher of a distillation, if it is not here")
    parser.add_argument("--base_dtype", choices=tuple(BASE_FORMATS), help="type of the frozen weights of adapters")
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
        "--rates", type=Path, help="report of `genesis doctor --device`, or record of the benchmark `step`"
    )
    speed.add_argument("--tokens_per_second", type=_read_number(), help="measured rate over all devices")
    speed.add_argument("--device_name", help="the driver's name of the device, such as 'NVIDIA GeForce RTX 4090'")
    speed.add_argument("--mfu", type=_read_share, help=f"assumed MFU (default {ASSUMED_MFU})")
    speed.add_argument(
        "--link", help=f"{', '.join(LINKS)}, or GB/s in each direction (default: measured in --rates, or pcie)"
    )
    speed.add_argument(
        "--network",
        help=f"link between nodes: {', '.join(NETWORKS)}, or GB/s of a device in each direction (default: infiniband)",
    )
    speed.add_argument(
        "--gpus_per_node", type=_read_count, default=DEVICES_PER_NODE, help="devices of a node (default %(default)s)"
    )
    speed.add_argument(
        "--choose",
        action="store_true",
        help="compare all layouts that fit, with tensor, context and pipeline parallelism, and recommend one",
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
    content = None if arguments.rates is None else read_report(arguments.rates)
    bandwidths = _find_bandwidths(arguments, content)
    return Question(
        gpus=gpus,
        budget=Budget(arguments.memory, workspace, arguments.margin),
        rate=_find_rate(arguments, recipe, gpus[0], bandwidths, content),
        bandwidths=bandwidths,
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
        chooses=arguments.choose,
    )


def _find_batch(written: ResolvedRecipe) -> int | None:
    """Returns the global batch that the recipe's files have; None for prompts, whose answers are the batch."""
    batch = None if written.get("data.prompts") is not None else written.get("data.global_batch_size")
    return batch if type(batch) is int and batch > 0 else None


def _find_bandwidths(arguments: argparse.Namespace, content: Mapping[str, Any] | None) -> Bandwidths:
    """Returns the measured bandwidths, and assumed ones for others; `--link` and `--network` replace some."""
    found = Bandwidths() if content is None else find_bandwidths(content, str(arguments.rates))
    found = replace(found, devices_per_node=arguments.gpus_per_node)
    if arguments.link is not None:
        found = replace(found, between_devices=_read_link("--link", arguments.link, LINKS))
    if arguments.network is not None:
        found = replace(found, between_nodes=_read_link("--network", arguments.network, NETWORKS))
    return found


def _read_link(option: str, text: str, known: Mapping[str, float]) -> Bandwidth:
    if text in known:
        return Bandwidth(known[text], f"assumed: {text}")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not _LEAST_NUMBER <= number <= _MOST_NUMBER:
        raise UserError(
            f"{option} is {text!r}: it must be {', '.join(known)}, or GB/s from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}"
        )
    return Bandwidth(number * 1e9, "given")


def _find_rate(
    arguments: argparse.Namespace,
    recipe: Recipe,
    num_ranks: int,
    bandwidths: Bandwidths,
    content: Mapping[str, Any] | None,
) -> Rate | None:
    """Returns a measured rate if there is one, or the share of a known peak that is assumed, or None."""
    if arguments.tokens_per_second is not None:
        layout = own_layout(recipe.layout, num_ranks)
        return rate_from_tokens(recipe.workload, layout, arguments.tokens_per_second, bandwidths)
    if content is not None:
        rate = find_rate(content, str(arguments.rates))
        if rate is not None:
            return rate
        if not any(one.is_measured for one in bandwidths.named().values()):
            raise UserError(
                f"--rates {arguments.rates} has no rate: it needs the parts devices and speed of `genesis doctor "
                "--device`, on a device whose peak is known, its parts copies or disk, or a record of the benchmark "
                "`step`; or give --tokens_per_second"
            )
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
    mfu = ASSUMED_MFU if arguments.mfu is None else arguments.mfu
    source = f"assumed MFU of {mfu:.0%} of {peak / 1e12:,.0f} TFLOP/s in {kind}"
    return Rate(peak * mfu, source, is_assumed=True)
