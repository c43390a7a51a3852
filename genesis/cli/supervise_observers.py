"""Options of `genesis supervise` for what goes on beside its loop: mirror, metrics, alerts, logs and service files."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from genesis.base.arguments import Parser
from genesis.base.errors import UserError
from genesis.cli.mirror import read_rate
from genesis.operations.supervise.alerts import AlertOptions, Alerts, check_program, read_command
from genesis.operations.supervise.log_lines import LogFormat, build_report
from genesis.operations.supervise.metrics import MetricsServer
from genesis.operations.supervise.mirror_open import open_place
from genesis.operations.supervise.mirror_plan import MirrorRetention
from genesis.operations.supervise.mirror_process import MirrorProcess, MirrorProcessOptions
from genesis.operations.supervise.node_options import NodeOptions
from genesis.operations.supervise.observers import Observer
from genesis.operations.supervise.service_files import FILE_KINDS, ServiceCommand, render_file

FILES_OF_ANY_RUN = ("alerts", "dashboard")
"""The files of `--print` that need no training on the command line."""

_HOST = "127.0.0.1"


def add_observer_options(parser: Parser) -> None:
    """Adds the options to the parser of `genesis supervise`."""
    add = parser.add_argument
    add(
        "--print",
        choices=FILE_KINDS,
        help="print a systemd unit, a Slurm job script or Kubernetes manifests that run this command, or alert rules\n"
        "for Prometheus, or a dashboard for Grafana, and end",
    )
    add(
        "--mirror",
        metavar="URL",
        help="copy checkpoints there while the run trains; a run without any continues from it",
    )
    add("--mirror_keep_last", type=int, default=2, metavar="N", help="newest checkpoints that stay there (default 2)")
    add("--mirror_keep_every_n_steps", type=int, metavar="N", help="multiples of N that stay there for good")
    add(
        "--mirror_bandwidth",
        type=read_rate,
        metavar="RATE",
        help="limit of the mirror in bytes per second, such as 20MB",
    )
    add("--metrics_port", type=int, metavar="PORT", help="serve /metrics for Prometheus and /healthz; 0: any free port")
    add("--metrics_host", default=_HOST, metavar="HOST", help=f"address of the metrics (default {_HOST})")
    add("--webhook", metavar="URL", help="POST a JSON object on a crash, a recovery and the end")
    add("--notify_command", metavar="COMMAND", help="run a program with that object on its standard input")
    add("--log_format", choices=("text", "json"), default="text", help="form of the supervisor's lines (default text)")


def print_file(arguments: Namespace, words: Sequence[str], run_dir: Path, nodes: NodeOptions | None = None) -> bool:
    """Prints the file of `--print`, if it is given, and returns whether it is.

    Args:
        arguments: The parsed options.
        words: All words after `genesis supervise`.
        run_dir: The run's directory.
        nodes: The options of several nodes; None for one.
    """
    if arguments.print is None:
        return False
    command = ServiceCommand(
        _without_print(words),
        run_dir,
        Path.cwd(),
        max_nodes=1 if nodes is None else nodes.max_nodes,
        min_nodes=1 if nodes is None else nodes.min_nodes,
    )
    sys.stdout.write(render_file(arguments.print, command))
    return True


def _without_print(words: Sequence[str]) -> list[str]:
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    kept: list[str] = []
    is_value = False
    for word in own:
        if not is_value and not word.startswith("--print"):
            kept.append(word)
        is_value = word == "--print"
    return [*kept, *words[len(own) :]]


def open_report(arguments: Namespace, run_dir: Path) -> Callable[[str], None]:
    """Returns the function that prints the supervisor's lines."""
    log_format: LogFormat = "json" if arguments.log_format == "json" else "text"
    return build_report(log_format, run_dir)


def open_observers(
    arguments: Namespace, run_dir: Path, report: Callable[[str], None], node: str | None = None
) -> list[Observer]:
    """Returns the observers that the options ask for; the metrics' server listens already.

    `node` is this node's name, if there are several.

    Raises:
        UserError: An option is wrong, or the metrics' address cannot be listened on.
    """
    observers: list[Observer] = []
    if arguments.mirror is not None:
        observers.append(_open_mirror(arguments, run_dir, report))
    if arguments.webhook is not None or arguments.notify_command is not None:
        command = None if arguments.notify_command is None else read_command(arguments.notify_command)
        options = AlertOptions(arguments.webhook, command)
        if command is not None:
            check_program(command)
        observers.append(Alerts(run_dir, options, report))
    if arguments.metrics_port is not None:
        server = MetricsServer(run_dir, arguments.metrics_host, arguments.metrics_port, node)
        report(f"metrics at {server.url}/metrics, health at {server.url}/healthz")
        observers.append(server)
    elif arguments.metrics_host != _HOST:
        raise UserError("--metrics_host needs --metrics_port")
    return observers


def _open_mirror(arguments: Namespace, run_dir: Path, report: Callable[[str], None]) -> MirrorProcess:
    # A mistake is refused now, and not by the mirror's process a moment after the training has begun.
    open_place(arguments.mirror)
    MirrorRetention(arguments.mirror_keep_last, arguments.mirror_keep_every_n_steps)
    options = ["--keep_last", str(arguments.mirror_keep_last)]
    if arguments.mirror_keep_every_n_steps is not None:
        options += ["--keep_every_n_steps", str(arguments.mirror_keep_every_n_steps)]
    if arguments.mirror_bandwidth is not None:
        options += ["--bandwidth", str(arguments.mirror_bandwidth)]
    return MirrorProcess(run_dir, MirrorProcessOptions(arguments.mirror, options), report)
