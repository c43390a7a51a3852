"""`genesis report`: a page about one run or several."""

import argparse
from pathlib import Path

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.run_directory import RunDirectory
from genesis.operations.report.collect import find_run
from genesis.operations.report.write import write_report

_DESCRIPTION = """Writes one HTML file about a run, or about several whose curves are drawn over each other: loss,
learning rate, gradient norm, speed, parts of a step, memory, checkpoints and crashes, data, evaluations, texts,
and the recipe. The file needs no network and no other file, and reads well on a phone. A run may still be training.
Example: genesis report runs/mine"""


def main(argv: list[str]) -> int:
    """Runs `genesis report` and returns its exit status."""
    parser = Parser(prog="genesis report", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="the run's directory, or its name in runs/")
    parser.add_argument("--out", type=Path, help="the page (default: RUN/report.html; report.html for several runs)")
    parser.add_argument(
        "--png", type=Path, metavar="DIR", help="also write the charts as PNG files into this directory"
    )
    parser.add_argument(
        "--prompt", action="append", default=[], help="a text that the newest checkpoint continues; repeatable"
    )
    arguments = parser.parse_args(argv)
    paths = [find_run(given) for given in arguments.run]
    default = RunDirectory(paths[0]).report if len(paths) == 1 else Path("report.html")
    written = write_report(paths, arguments.out or default, arguments.png, arguments.prompt)
    console = Console(highlight=False, soft_wrap=True)
    for path in written[:2] if arguments.png else written:
        size = path.stat().st_size / 1e6
        console.print(f"{path} ({size:.1f} MB)", markup=False)
    if arguments.png:
        console.print(f"and {len(written) - 2} more pictures in {arguments.png}", markup=False)
    return 0
