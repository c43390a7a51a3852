"""`genesis demo`."""

import argparse
from pathlib import Path

from genesis.arguments import Parser
from genesis.demo.main import run_demo

_DESCRIPTION = """The whole road in minutes on a CPU, each step a command that you could type yourself: text that every
Python has, a tokenizer, token shards, training with one real SIGKILL in the middle and a resume, validation, text from
an early and the last checkpoint, a picture of the loss. All of it lies in runs/demo."""


def main(argv: list[str]) -> int:
    """Runs `genesis demo` and returns its exit status."""
    parser = Parser("genesis demo", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="the repository's folder of configs")
    return run_demo(parser.parse_args(argv).configs)
