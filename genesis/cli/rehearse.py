"""`genesis rehearse`."""

import argparse
import json
import random
import shlex
import sys
from pathlib import Path

from genesis.base.arguments import Parser, check_output, read_count, split_at_dashes
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.cli.option_names import check_fit
from genesis.cli.options import PLAIN_WIDTH
from genesis.operations.rehearse.main import Options, rehearse
from genesis.operations.rehearse.recipe import check_extra
from genesis.operations.rehearse.report import build_kill_table, summarise
from genesis_callbacks.base.files import replace_file

_DESCRIPTION = """Trains a recipe once without interruption and once with SIGKILLs at random moments, each followed by a
restart from the latest checkpoint; then compares the final weights bit for bit, and the loss of every step. Half of
the kills fall into saves, a quarter into restarts. A kill hits all ranks at once, one rank alone, or a process that
writes checkpoints (checkpoint.mode: process). Options after -- go to every `genesis fit`. Both runs log every step
and stay.
Example: genesis rehearse --config configs/genesis-10m.yaml -- --trainer.max_steps 60 --checkpoint.every_n_steps 10
Exit status: 0 bit-equal, 1 different or not all kills happened, 2 invalid arguments."""
_USAGE = "genesis rehearse --config RECIPE [--kills N] [--seed N] [--dir DIR] [--json FILE] [-- OPTIONS OF FIT]"
_ROOT = Path("runs/rehearsals")
_SEEDS = 1 << 31


def main(argv: list[str]) -> int:
    """Runs `genesis rehearse` and returns its exit status."""
    own, extra = split_at_dashes(argv)
    parser = Parser(
        "genesis rehearse", usage=_USAGE, description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, action="append", required=True, help="a recipe; may be given several times"
    )
    parser.add_argument("--kills", type=read_count, default=3, help="number of kills (default %(default)s)")
    parser.add_argument(
        "--seed", type=int, help="seed of the kill times, to repeat a rehearsal; default: a random seed, printed"
    )
    parser.add_argument("--dir", type=Path, help=f"directory for both runs (default {_ROOT}/NAME of the first recipe)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON to FILE")
    arguments = parser.parse_args(own)
    check_extra(extra)
    if arguments.json is not None:
        check_output(arguments.json, "--json")
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(_SEEDS)
    configs = [word for config in arguments.config for word in ("--config", str(config))]
    options = Options(
        fit=("fit", *configs, "--trainer.log_every_n_steps", "1", *extra),
        num_kills=arguments.kills,
        seed=seed,
        directory=_choose_directory(arguments.dir, arguments.config[0]),
        command=shlex.join(
            ["genesis", "rehearse", *configs, "--kills", str(arguments.kills), "--seed", str(seed)]
            + (["--", *extra] if extra else [])
        ),
    )
    check_fit(options.fit[1:])  # at once and in one line, before anything is trained
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(f"$ {options.command}", soft_wrap=True, markup=False)
    report = rehearse(options, console)
    if report.kills:
        console.print(build_kill_table(report.kills))
    for line in summarise(report):
        console.print(line, soft_wrap=True, markup=False)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        replace_file(arguments.json.resolve(), (json.dumps(report.to_json(), indent=2) + "\n").encode())
    return 0 if report.verdict == "equal" else 1


def _choose_directory(wanted: Path | None, config: Path) -> Path:
    """Returns a directory that is empty or does not exist.

    Raises:
        UserError: The directory `wanted` is not empty.
    """
    if wanted is None:
        number, wanted = 1, _ROOT / config.stem
        while wanted.exists():
            number += 1
            wanted = _ROOT / f"{config.stem}-{number}"
    elif wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
        raise UserError(f"--dir {wanted} already exists; remove it, or give another directory")
    return wanted
