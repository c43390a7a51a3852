"""`genesis supervise`."""

import argparse
import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from genesis.base.arguments import Parser, read_count, respell, split_at_dashes
from genesis.base.errors import UserError
from genesis.base.processes import check_can_find
from genesis.cli.supervise_observers import (
    FILES_OF_ANY_RUN,
    add_observer_options,
    open_observers,
    open_report,
    print_file,
)
from genesis.operations.supervise.attempt import Limits
from genesis.operations.supervise.decide import Policy
from genesis.operations.supervise.loop import supervise
from genesis.operations.supervise.options import SuperviseOptions, read_nodes
from genesis.recipe.imports import OPTION
from genesis.recipe.resolved import ResolvedRecipe, list_steps

_DESCRIPTION = """Keeps one run alive, on this machine or with --nodes on several: starts `genesis fit` from the
newest checkpoint that verifies, watches its ranks, and when they end before the run does, finds out why, cleans up and
starts again. RUN/crashes holds a record of each crash (`genesis crashes RUN`). SIGTERM, SIGUSR1 and a notice of
preemption save the run and end it with status 75, so that a queue starts it again. A supervisor that was killed and
started again finds its run. With --nodes, give the same command on each node; the run's directory must be shared.
Example: genesis supervise -- fit --config configs/genesis-10m.yaml
Exit status: 0 complete, 2 invalid arguments or recipe, 75 saved and to be started again, 80 to 94 the class of the end
after which it gave up (docs: Ends of a run), 130 interrupted."""
_USAGE = "genesis supervise [options] -- fit --config RECIPE [OPTIONS OF FIT]"
_WAIT_SECONDS = 3600.0
_MAX_DIGITS = 12
_OWN_OPTIONS = {
    "--ckpt_path": "the supervisor starts from the newest checkpoint that verifies",
    "--fork": "start the fork by `genesis fit`, then supervise it by its --run_dir",
    "--print_config": "print the recipe by `genesis fit --print_config`",
}


def main(argv: list[str]) -> int:
    """Runs `genesis supervise` and returns its exit status."""
    own, fit = split_at_dashes(argv)
    if any(word.startswith(OPTION) for word in own):
        raise UserError(f"{OPTION} is an option of the training: give it after --: {_USAGE}")
    parser = _build_parser()
    arguments = parser.parse_args(own)
    check_can_find("genesis supervise")
    nodes = read_nodes(
        *(arguments.nodes, arguments.rdzv, arguments.node_name, arguments.rdzv_seconds, arguments.last_call_seconds)
    )
    if arguments.print not in FILES_OF_ANY_RUN:
        _check_fit(fit)
    run_dir = find_run_dir(fit[1:])
    if print_file(arguments, argv, run_dir, nodes):
        return 0
    if arguments.on_drift == "allow":
        fit = [*fit, "--checkpoint.allow_changed", '["*"]']
    options = SuperviseOptions(
        fit=tuple(fit),
        run_dir=run_dir,
        policy=Policy(
            *(arguments.max_ends_without_progress, arguments.on_drift, arguments.max_crashes),
            may_skip_data=arguments.may_skip_data,
        ),
        limits=Limits(
            *(arguments.hang_seconds, arguments.start_seconds, arguments.phase_seconds),
            *(arguments.grace_seconds, arguments.deadline_seconds),
        ),
        port=arguments.port,
        wait_seconds=arguments.wait_seconds,
        preempt_file=arguments.preempt_file,
        preempt_url=arguments.preempt_url,
        cost_per_hour=arguments.cost_per_hour,
        nodes=nodes,
    )
    report = open_report(arguments, run_dir)
    if nodes is not None:
        with _quiet_stores():
            from genesis.operations.supervise.nodes import supervise_nodes  # noqa: PLC0415  # its rendezvous imports torch

        return supervise_nodes(options, report, _echo, open_observers(arguments, run_dir, report, nodes.name))
    return supervise(options, report, _echo, open_observers(arguments, run_dir, report))


@contextlib.contextmanager
def _quiet_stores() -> Iterator[None]:
    """Lets torch, if it is imported within this context, print no stack of C++ when a store is lost.

    The supervisor prints a line for each. Ranks, which inherit the environment, print what torch warns of.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    is_given = name in os.environ
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if not is_given:
            del os.environ[name]


def _build_parser() -> Parser:
    parser = Parser(
        "genesis supervise", usage=_USAGE, description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    policy, limits = Policy(), Limits()
    add(
        "--max_ends_without_progress",
        type=read_count,
        default=policy.max_ends_without_progress,
        metavar="K",
        help="stop after K ends without a new checkpoint between them (default %(default)s)",
    )
    add("--max_crashes", type=read_count, metavar="N", help="stop after N crashes in all (default: no limit)")
    add(
        "--on_drift",
        choices=("stop", "allow", "fresh"),
        default=policy.on_drift,
        help="if the recipe is not that of the newest checkpoint: stop and print the difference (default), allow it,\n"
        "or start from scratch with the earlier checkpoints moved aside",
    )
    add(
        "--may_skip_data",
        type=_count_or_none,
        default=policy.may_skip_data,
        metavar="N",
        help="skip up to N windows of data (global batches) in the whole run, in which gradients are not finite or\n"
        "the memory is too small (default %(default)s)",
    )
    for name, default, text in (
        ("--hang_seconds", limits.hang_seconds, "time without a heartbeat until a rank in training hangs"),
        ("--start_seconds", limits.start_seconds, "limit from a launch to the first step"),
        ("--phase_seconds", limits.phase_seconds, "limit without a heartbeat in validations, saves and rollouts"),
        ("--grace_seconds", limits.grace_seconds, "from SIGTERM to SIGKILL when ranks are ended"),
        ("--deadline_seconds", limits.deadline_seconds, "time for the last save after SIGTERM or SIGUSR1"),
        ("--wait_seconds", _WAIT_SECONDS, "how long to wait for disk space"),
    ):
        add(name, type=_positive, default=default, metavar="S", help=f"{text} (default %(default)g)")
    add("--port", type=_port, help="port at which the ranks meet (default: a free one in each attempt)")
    add("--preempt_file", type=Path, metavar="FILE", help="save and exit with status 75 when FILE exists")
    add(
        "--preempt_url",
        type=_url,
        metavar="URL",
        help="save and exit with status 75 when URL answers with 200; asked every 5 s",
    )
    add("--cost_per_hour", type=_price, metavar="PRICE", help="price of an hour of this machine, for the crash records")
    add_observer_options(parser)
    _add_node_options(parser)
    return parser


def _add_node_options(parser: Parser) -> None:
    add = parser.add_argument
    add("--nodes", metavar="N|MIN:MAX", help="number of nodes; each runs this command. 1:2 trains with one or two")
    add("--rdzv", metavar="HOST:PORT", help="where the nodes meet: one of them, which hosts it, and a free port")
    add("--node_name", metavar="NAME", help="this node's own name (default: the machine's)")
    for name, default, text in (
        ("--rdzv_seconds", 600.0, "how long to wait for the other nodes"),
        ("--last_call_seconds", 10.0, "how long to wait for more nodes than MIN"),
    ):
        add(name, type=_positive, default=default, metavar="S", help=f"{text} (default %(default)g)")


def _check_fit(fit: Sequence[str]) -> None:
    if not fit or fit[0] != "fit":
        raise UserError(f"give the training after --: {_USAGE}")
    for word in fit:
        remedy = _OWN_OPTIONS.get(word.partition("=")[0])
        if remedy is not None:
            raise UserError(f"{word} is not for a supervised run: {remedy}")


def find_run_dir(fit: Sequence[str]) -> Path:
    """Returns the run's directory by the arguments and the recipes; what the real parser finds is compared later.

    Raises:
        UserError: A recipe cannot be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # each training warns of deprecated options
        return Path(str(ResolvedRecipe.read(list_steps(respell(fit))).get("run_dir")))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price, a number of at least 0")
    return value


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of the web; give http:// or https://")
    return text


def _count_or_none(text: str) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 0")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, from 1 to 65535")
    return int(text)


def _echo(data: bytes) -> None:
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), data)
