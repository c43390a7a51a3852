"""`genesis mirror`: copies checkpoints to a second place while a run trains."""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import FrameType

from genesis.base.arguments import Parser, read_size
from genesis.base.errors import UserError, printable
from genesis.base.run_directory import RUNS_NAME
from genesis.operations.mirror.contents import read_contents, verify_contents
from genesis.operations.mirror.history import verify_history
from genesis.operations.mirror.mirror import Mirror, MirrorOptions
from genesis.operations.mirror.places import Place, open_place
from genesis.operations.mirror.plan import MirrorRetention
from genesis.operations.mirror.transfer import Pace

_BAD = 1
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_NICENESS = 10
_MAX_SECONDS = 1_000_000
_DESCRIPTION = """Copies the committed checkpoints of a run to a second place while it trains: a directory, or a URL
such as s3://bucket/prefix. Every copy is read back and compared with the manifest before it becomes visible there. The
training is unaffected, whatever happens to the copies. `genesis mirror restore` continues a run from its mirror.
Example: genesis mirror runs/demo/run s3://bucket/runs/demo"""


class _Ended(BaseException):
    """SIGTERM has arrived."""


def read_rate(text: str) -> float:
    """Returns bytes per second.

    Raises:
        argparse.ArgumentTypeError: The text is not a rate.

    Example:
        >>> read_rate("20MB"), read_rate("1.5MiB/s")
        (20000000.0, 1572864.0)
    """
    number = read_size(text.strip().removesuffix("/s"))
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate; give bytes per second, such as 20MB")
    return float(number)


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give seconds above 0 and below {_MAX_SECONDS}")
    return seconds


def main(argv: list[str]) -> int:
    """Runs `genesis mirror` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    place = open_place(arguments.url)
    if arguments.verify:
        return _verify(place, arguments.bandwidth)
    if arguments.run is None:
        raise UserError("give the run's directory before the mirror, or --verify with the mirror alone")
    options = MirrorOptions(
        MirrorRetention(arguments.keep_last, arguments.keep_every_n_steps),
        arguments.bandwidth,
        arguments.poll_seconds,
    )
    run = _find_run(arguments.run)
    if not run.exists():
        _report(f"there is no run {run} yet; a mirror waits for its first checkpoint")
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)  # the training comes first
    with Mirror(run, place, options, _report) as mirror, _ended_by_sigterm():
        try:
            if arguments.once:
                return _BAD if mirror.sync(is_last=True) else 0
            _report(f"{run} is mirrored to {place.url}; Ctrl-C stops")
            mirror.run(lambda: arguments.parent is None or os.getppid() == arguments.parent)
        except _Ended:
            if arguments.once:
                _report("stopped by SIGTERM; the same command goes on")
                return _ENDED_BY_SIGTERM
    return 0


def _find_run(given: Path) -> Path:
    """Returns the run's directory, which need not exist: a mirror may be started before the training."""
    named = Path(RUNS_NAME) / given
    return named if not given.exists() and not given.is_absolute() and named.is_dir() else given


def _verify(place: Place, bandwidth: float | None) -> int:
    contents = read_contents(place)
    if not contents.checkpoints and not contents.damaged:
        raise UserError(f"{place.url} holds no mirrored checkpoint; give the place of a mirror")
    num_bad = 0
    pace = Pace(bandwidth)
    for folder, problem in chain(verify_contents(place, contents, pace), verify_history(place, pace)):
        num_bad += problem is not None
        print(f"{folder}: {'verified' if problem is None else printable(problem)}", flush=True)
    return _BAD if num_bad else 0


def _report(line: str) -> None:
    print(f"genesis mirror: {printable(line)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the block by an exception: a request that hangs must not delay the end."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _build_parser() -> Parser:
    parser = Parser(prog="genesis mirror", description=_DESCRIPTION)
    add = parser.add_argument
    retention, options = MirrorRetention(), MirrorOptions()
    add("run", type=Path, nargs="?", help="the run's directory, or its name in runs/; it need not exist yet")
    add("url", help="the second place: a directory, or a URL that fsspec knows, such as s3://bucket/prefix")
    add("--once", action="store_true", help="bring the mirror up to date and end; status 1 if a checkpoint is damaged")
    add(
        "--verify",
        action="store_true",
        help="read every copy in the second place and compare it with its manifest, and end; status 1 if one differs",
    )
    add("--keep_last", type=int, default=retention.keep_last, help="number of the newest checkpoints that stay there")
    add("--keep_every_n_steps", type=int, help="checkpoints whose step is a multiple of this stay for good")
    add(
        "--bandwidth",
        type=read_rate,
        help="limit in bytes per second for all that is written and read back, such as 20MB; default: no limit",
    )
    add(
        "--poll_seconds",
        type=_read_seconds,
        default=options.poll_seconds,
        help="time between two looks for new checkpoints",
    )
    add("--parent", type=int, help=argparse.SUPPRESS)  # the supervisor that started it, with which it ends
    return parser
