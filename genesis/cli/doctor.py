"""`genesis doctor` on the machine and on its devices (`--device`). It imports no Lightning; `--config` is elsewhere."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError, naming
from genesis.cli.options import PLAIN_WIDTH
from genesis.operations.doctor.advice import examine_machine
from genesis.operations.doctor.checks import Check, has_failed, list_plain, print_checks, write_json
from genesis.operations.doctor.facts import PlannedSaves, read_facts
from genesis.operations.doctor.main import main as examine_devices

_DESCRIPTION: Final = """Examines what a training needs, in three ways:
  genesis doctor                    the machine: builds, devices and their links, memory, disks, limits, ports; seconds
  genesis doctor --config RECIPE    the machine and the recipe: initial loss, labels, masks, accumulation, checkpoint,
                                    resume, memory, overfitting one batch, two ranks; minutes
  genesis doctor --device [KIND]    the devices, measured: speed, copies, waits, a killed run; minutes
Options after -- change the recipe, as options of `genesis fit` do.
Example: genesis doctor --config configs/genesis-10m.yaml -- --trainer.accelerator cpu
Exit status: 0 nothing failed, 1 a check failed, 2 invalid arguments or input."""
_FAILED: Final = 1


@dataclass(frozen=True)
class RecipeReport:
    """The results of the examination of a recipe.

    Args:
        checks: In the order of the table.
        plain: For the JSON.
        saves: The checkpoints that the recipe plans; None if the plan does not know the recipe.
        show: Prints it.
    """

    checks: Sequence[Check]
    plain: Mapping[str, Any]
    saves: PlannedSaves | None
    show: Callable[[Console], None]


ExamineRecipe = Callable[[argparse.Namespace, Sequence[str]], RecipeReport]


def main(argv: list[str]) -> int:
    """Runs `genesis doctor` without a recipe and returns its exit status."""
    if any(word.partition("=")[0] == "--device" for word in argv):
        return examine_devices(argv)
    return run_doctor(argv, None)


def run_doctor(argv: list[str], examine_recipe: ExamineRecipe | None) -> int:
    """Examines the machine, and a recipe if there is one, and returns the exit status.

    Args:
        argv: The arguments of `genesis doctor`.
        examine_recipe: Examines the recipe of the options; None if there is none.
    """
    options, extra = _parse(argv)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    report: dict[str, Any] = {"what": "genesis doctor", "machine": [], "recipe": None}
    saves: PlannedSaves | None = None
    checks: list[Check] = []
    with naming(options.dir or Path()):
        facts = read_facts(options.dir or Path())  # before fits, which set environment variables of their own
    if examine_recipe is not None and options.config:
        found = examine_recipe(options, extra)
        found.show(console)
        report |= {"what": "genesis doctor --config", "recipe": dict(found.plain)}
        checks += found.checks
        saves = found.saves
    machine = examine_machine(facts, saves)
    print_checks("genesis doctor: the machine", machine, console)
    report["machine"] = list_plain(machine)
    checks += machine
    _print_verdict(checks)
    if options.json is not None:
        write_json(options.json, {**report, "verdict": "failed" if has_failed(checks) else "passed"})
    return _FAILED if has_failed(checks) else 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    place = argv.index("--") if "--" in argv else len(argv)
    own, extra = argv[:place], argv[place + 1 :]
    parser = Parser(
        prog="genesis doctor",
        usage="genesis doctor [--config RECIPE] [--json FILE] [--dir DIR] [-- OPTIONS OF FIT]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the table of commands looks for the whole name
    )
    parser.add_argument("--config", type=Path, action="append", help="a recipe; may be given several times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON to FILE")
    parser.add_argument(
        "--dir",
        type=Path,
        help="directory for the fits, on the disk of the checkpoints (default: the working directory)",
    )
    parser.add_argument(
        "--device",
        nargs="?",
        metavar="KIND",
        help="measure the devices of a kind (cpu, cuda, xpu ...) instead; see genesis doctor --device --help",
    )
    options, unknown = parser.parse_known_args(own)
    if unknown:
        raise UserError(f"genesis doctor has no option {unknown[0]}; options of `genesis fit` go behind `--`")
    if extra and not options.config:
        raise UserError(f"{extra[0]} changes a recipe: give one by --config")
    if options.json is not None and options.json.exists() and not options.json.is_file():
        raise UserError(f"--json is {options.json}, which is no file: give the name of a file, such as doctor.json")
    if options.json is not None and not options.json.parent.is_dir():
        raise UserError(f"--json is {options.json}: no such directory: {options.json.parent}")
    if options.dir is not None and not (options.dir.is_dir() and os.access(options.dir, os.W_OK)):
        raise UserError(f"--dir is {options.dir}: it must be a directory that you can write to")
    for path in options.config or ():
        if not path.is_file():
            raise UserError(f"no such recipe: {path}; give a YAML file of `genesis fit` by --config")
    return options, extra


def _print_verdict(checks: Sequence[Check]) -> None:
    counts = Counter(check.status for check in checks)
    failed = ", ".join(check.name for check in checks if check.status == "failed")
    print(
        f"{counts['passed']} passed, {counts['warning']} warnings, {counts['does not apply']} do not apply, "
        f"{counts['failed']} failed" + (f": {failed}" if failed else "")
    )
