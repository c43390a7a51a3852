"""`genesis demo`."""

import argparse
from pathlib import Path

from genesis.arguments import Parser
from genesis.demo.main import run_demo

_DESCRIPTION = """Runs the whole workflow in minutes on a CPU, each step as a command that you could type yourself:
Python's own sources as text, a tokenizer, token shards, training with one real SIGKILL in the middle and a resume,
validation, text from an early and the last checkpoint, a plot of the loss. All results are in runs/demo."""


def main(argv: list[str]) -> int:
    """Runs `genesis demo` and returns its exit status."""
    parser = Parser("genesis demo", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="the repository's folder of configs")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="number of training steps; intervals are scaled (default: the recipe's 1000)",
    )
    arguments = parser.parse_args(argv)
    return run_demo(arguments.configs, arguments.steps)
