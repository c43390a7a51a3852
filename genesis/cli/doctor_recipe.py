"""`genesis doctor --config`: the debug protocol on a recipe, which trains and therefore imports Lightning."""

import argparse
import contextlib
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.cli.doctor import RecipeReport, run_doctor
from genesis.cli.fit import GenesisCLI
from genesis.cli.option_names import check_fit
from genesis.cli.quiet import errors_of_lightning, warned_in_one_line
from genesis.model.float8 import check_float8
from genesis.operations.doctor.capacity import measure_capacity
from genesis.operations.doctor.checks import list_plain, print_checks
from genesis.operations.doctor.facts import PlannedSaves
from genesis.operations.doctor.planned import plan_saves
from genesis.operations.doctor.protocol import Examination, examine
from genesis.operations.doctor.recipe import BuiltRecipe, Options, to_arguments
from genesis.operations.plan.recipe import read_recipe
from genesis.recipe.resolved import ResolvedRecipe, list_steps


def main(argv: list[str]) -> int:
    """Runs `genesis doctor --config` and returns its exit status."""
    with _interrupted_by_termination(), errors_of_lightning():
        return run_doctor(argv, _examine_recipe)


class _UnstartedCLI(GenesisCLI):
    """Builds what `genesis fit` trains, and does not train."""

    def _run_subcommand(self, subcommand: str) -> None:
        self.start: Path | None = self._prepare_subcommand_kwargs(subcommand)["ckpt_path"]

    def _check_strategy(self) -> None:
        """Checks all but the strategy: axes do not fit one device, and each fit of the doctor checks its own."""
        check_float8(self.model.decoder_config, self.model.float8)


def build_recipe(arguments: Sequence[str], options: Options) -> BuiltRecipe:
    """Returns what `genesis fit` would train.

    Args:
        arguments: Of `genesis fit`.
        options: Options that replace those of the arguments.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is deprecated has been reported
        cli = _UnstartedCLI("fit", ["fit", *arguments, *to_arguments(options)])
    resolved = ResolvedRecipe.complete(cli.config_dump, "the recipe")
    return BuiltRecipe(cli.model, cli.datamodule, cli.trainer, cli.checkpoint, resolved, cli.start)


def _examine_recipe(options: argparse.Namespace, extra: Sequence[str]) -> RecipeReport:
    arguments = [word for path in options.config for word in ("--config", str(path))] + list(extra)
    check_fit(arguments)  # at once and in one line, before anything is built
    with warned_in_one_line():
        recipe = ResolvedRecipe.read(list_steps(arguments))
    progress = Console(stderr=True, highlight=False)
    parent = options.dir or Path()
    with tempfile.TemporaryDirectory(dir=parent, prefix=".genesis-doctor-", ignore_cleanup_errors=True) as directory:
        found = examine(
            partial(build_recipe, arguments),
            Path(directory).resolve(),
            measure_capacity,
            lambda line: progress.print(f"doctor: {line}", markup=False),
        )
    saves = _plan_saves(recipe, found)
    plain = {
        "config": [str(path) for path in options.config],
        "notes": found.notes,
        "changes": [{"key": each.key, "before": each.before, "now": each.now} for each in found.changes],
        "checks": list_plain(found.checks),
    }
    return RecipeReport(found.checks, plain, saves, partial(_print_examination, found))


def _plan_saves(recipe: ResolvedRecipe, found: Examination) -> PlannedSaves | None:
    """Returns the checkpoints of the whole recipe, as `genesis plan` computes them."""
    try:
        return plan_saves(read_recipe(recipe))
    except UserError as error:
        found.notes.append(f"a disk that is not compared with planned checkpoints: {error}")
        return None


@contextlib.contextmanager
def _interrupted_by_termination() -> Iterator[None]:
    """Handles SIGTERM and SIGHUP like Ctrl-C within the block, so that ranks end and no directory stays."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_examination(found: Examination, console: Console) -> None:
    if found.sample is not None:
        console.print(found.sample)
    for note in found.notes:
        console.print(f"trained with {note}", markup=False)
    for change in found.changes:
        console.print(f"changed: {change.key} {change.before} -> {change.now}: {change.reason}", markup=False)
    print_checks("genesis doctor: the recipe", found.checks, console)
