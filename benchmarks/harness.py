"""The frame of every benchmark: its options, rounds in which contenders take turns, paired ratios, and the record.

Absolute figures of two runs are never compared. Every contender works once in each round, so that changes of the
machine's speed between rounds do not affect the ratio of two contenders in one round. The result is the median of these
ratios over the rounds.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError

ROOT: Final = Path(__file__).resolve().parents[1]
"""The root of the checkout."""
RECORDS: Final = ROOT / "benchmarks/records"
_CONFIDENCE: Final = 0.95
_PAUSE_SECONDS: Final = 0.1  # a contender's threads spin for a moment after their last work

T = TypeVar("T")
R = TypeVar("R")


# ---- options


def build_parser(name: str, doc: str | None) -> Parser:
    """Returns the parser of a benchmark, with `--out`; `doc` is the docstring of its module."""
    parser = Parser(prog=f"python -m benchmarks {name}", description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help=f"file for the record, such as benchmarks/records/{name}.json")
    return parser


def read_list(text: str) -> list[str]:
    """Returns the words of a list that is separated by commas."""
    return [word for word in text.split(",") if word]


def add_counts(parser: argparse.ArgumentParser, **counts: tuple[int | None, str]) -> None:
    """Adds options for whole numbers, each with its default and its help."""
    for name, (default, text) in counts.items():
        shown = "" if default is None else " (default %(default)s)"
        parser.add_argument(f"--{name}", type=int, default=default, help=text + shown)


def check_counts(options: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Refuses numbers that are too small.

    Raises:
        UserError: A number is below `least`.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}: it must be at least {least}")


def check_choices(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuses names that are unknown.

    Raises:
        UserError: A name is not among `known`.
    """
    for name in names:
        if name not in known:
            raise UserError(f"{option} has {name!r}; there are {', '.join(known)}")


# ---- rounds


def rotate_order(contenders: Sequence[T], round_index: int) -> list[T]:
    """Returns the order of the contenders in a round: each contender comes first, second, ... equally often.

    Example:
        >>> rotate_order(["a", "b", "c"], 1)
        ['b', 'c', 'a']
    """
    start = round_index % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def take_rounds(
    contenders: Mapping[str, T], num_rounds: int, work: Callable[[T], R], rate: Callable[[R], float], unit: str
) -> dict[str, list[R]]:
    """Lets the contenders work in rounds, in a rotating order, and returns what each of them gave in each round.

    Args:
        contenders: What works, by name.
        num_rounds: Number of rounds.
        work: Lets a contender work once.
        rate: Returns the figure of its work that is printed.
        unit: The figure's unit.
    """
    console = Console(stderr=True)
    given: dict[str, list[R]] = {name: [] for name in contenders}
    for index in range(num_rounds):
        for name in rotate_order(list(contenders), index):
            time.sleep(_PAUSE_SECONDS)
            given[name].append(work(contenders[name]))
        rates = {name: rate(of_one[-1]) for name, of_one in given.items()}
        shown = ", ".join(f"{name} {one:,.0f}" if one >= 100 else f"{name} {one:.4g}" for name, one in rates.items())
        console.print(f"round {index + 1}/{num_rounds}, {unit}: {shown}", highlight=False)
    return given


# ---- ratios


@dataclass(frozen=True)
class PairedRatio:
    """The median of paired ratios.

    Args:
        median: Median of the ratios.
        low: Lower end of an interval that contains the true median with at least 95% probability; None if there are
            too few pairs.
        high: Upper end of this interval.
        num_pairs: Number of rounds.
    """

    median: float
    low: float | None
    high: float | None
    num_pairs: int


def compare_pairs(numerators: Sequence[float], denominators: Sequence[float]) -> PairedRatio:
    """Returns the median of the ratios of each round, with an interval that assumes nothing about their distribution.

    The interval runs between the k-th smallest and the k-th largest ratio, for the largest k whose coverage is enough.

    Example:
        >>> compare_pairs([2.0, 6.0, 9.0], [2.0, 3.0, 3.0])
        PairedRatio(median=2.0, low=None, high=None, num_pairs=3)

    References:
        David and Nagaraja, Order Statistics, 3rd edition, section 7.1.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    rank = find_interval_rank(len(ratios))
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (None, None)
    return PairedRatio(statistics.median(ratios), low, high, len(ratios))


def find_interval_rank(num_pairs: int) -> int:
    """Returns the k of the median's interval; 0 if even the range of all ratios covers too little.

    Example:
        >>> [find_interval_rank(n) for n in (5, 6, 10, 20)]
        [0, 1, 2, 6]
    """
    tail, rank = 0.0, 0
    for k in range(num_pairs // 2):
        # The interval misses the median if fewer than k + 1 ratios lie on one of its sides.
        tail += math.comb(num_pairs, k) / 2**num_pairs
        if 1 - 2 * tail < _CONFIDENCE:
            break
        rank = k + 1
    return rank


# ---- the record


def describe_hardware(device_name: str = "cpu") -> str:
    """Returns a line with cores, memory and GPU; `device_name` is the GPU's name, or "cpu"."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = "" if device_name == "cpu" else f", {device_name}"
    return f"{os.cpu_count()}-core {platform.machine()}, {memory_gib:.0f} GiB{gpu}"


def anonymise(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with each path replaced by its file name, also in lists of NAME=PATH."""
    words = []
    for word in argv:
        peers = [peer.partition("=") for peer in word.split(",")]
        words.append(",".join(name + equals + (equals and Path(path).name) for name, equals, path in peers))
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def begin_record(
    name: str, what: str, argv: Sequence[str], packages: Sequence[str] = (), device_name: str = "cpu"
) -> dict[str, Any]:
    """Returns what every record has: its command, date, hardware and versions, without a path or name of the machine.

    Args:
        name: The benchmark.
        what: What it measures.
        argv: Its arguments.
        packages: The packages whose versions are recorded.
        device_name: The GPU's name, or "cpu".
    """
    return {
        "what": what,
        "command": f"python -m benchmarks {name} {shlex.join(anonymise(argv))}".rstrip(),
        "date": date.today().isoformat(),
        "hardware": describe_hardware(device_name),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
    }


def format_ratio(ratio: Mapping[str, Any] | None, digits: int = 3) -> str:
    """Returns a ratio in plain types with its interval; an empty text for None."""
    if ratio is None:
        return ""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.{digits}f} to {ratio['high']:.{digits}f})"
    return f"{ratio['median']:.{digits}f}{interval}"


def format_versions(versions: Mapping[str, str]) -> str:
    """Returns packages and their versions in one line."""
    return ", ".join(f"{package} {number}" for package, number in versions.items())


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table of Markdown, and an empty line."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def format_page(title: str, record: Mapping[str, Any], notes: Sequence[str], body: Sequence[str]) -> str:
    """Returns a page of Markdown: what every record has, notes as a list, and the tables."""
    load = record.get("load_average_after")
    lines = [
        f"# {title}",
        "",
        f"- command: `{record['command']}`",
        f"- date: {record['date']}",
        f"- hardware: {record['hardware']}" + (f"; load average at the end {load}, its own included" if load else ""),
        f"- versions: {format_versions(record['versions'])}",
        *(f"- {note}" for note in notes),
        "",
        *body,
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def finish(record: dict[str, Any], format_record: Callable[[dict[str, Any]], str], out: Path | None) -> None:
    """Adds the load of the machine, prints the page, and writes record and page to `out` with their suffixes."""
    record["load_average_after"] = round(os.getloadavg()[0], 1)
    page = format_record(record)
    print(page, end="")
    if out is not None:
        write_record(record, page, out)


def write_record(record: Mapping[str, Any], page: str, out: Path) -> None:
    """Writes a record to `out` with the suffix .json, and its page with the suffix .md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(page, encoding="utf-8")
