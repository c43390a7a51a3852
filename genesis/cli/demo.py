"""`genesis demo`."""

import argparse

from genesis.base.arguments import Parser
from genesis.base.errors import UserError
from genesis.operations.demo.finetune import run_finetune_demo
from genesis.operations.demo.main import run_demo

_KINDS = ("pretrain", "finetune")
_DESCRIPTION = """Runs the whole workflow in minutes on a CPU, each step as a command that you could type yourself:
Python's own sources as text, a tokenizer, token shards, training with one real SIGKILL in the middle and a resume,
validation, text from an early and the last checkpoint, a report with all curves. All results are in runs/demo.
`genesis demo finetune` downloads an open model of 135M parameters and 300 conversations by pip (100 MB), trains
adapters with a SIGKILL and a resume, compares answers before and after, and exports; all results are in
runs/demo-finetune."""


def main(argv: list[str]) -> int:
    """Runs `genesis demo` and returns its exit status."""
    parser = Parser("genesis demo", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "kind",
        nargs="?",
        default="pretrain",
        metavar="{pretrain,finetune}",
        help="train a small model from scratch, or fine-tune an open one (default %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="number of training steps; intervals are scaled (default: the recipe's 1000)",
    )
    arguments = parser.parse_args(argv)
    # Not by argparse's choices: the value of a misspelt option would then be refused instead of the option.
    if arguments.kind not in _KINDS:
        raise UserError(f"genesis demo: there is no demo {arguments.kind!r}; give {' or '.join(_KINDS)}")
    if arguments.kind == "finetune":
        if arguments.steps is not None:
            raise UserError("--steps shortens the demo of pretraining: leave it out beside finetune")
        return run_finetune_demo()
    return run_demo(arguments.steps)
