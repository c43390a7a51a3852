"""Runs supervised in the process of the tests, with a launcher that is forked and need not import."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from genesis.base.processes import Mark
from genesis.operations.supervise import launcher_client
from genesis.operations.supervise.attempt import Limits
from genesis.operations.supervise.decide import Policy
from genesis.operations.supervise.loop import SuperviseOptions, Supervisor
from genesis.operations.supervise.observers import Observer
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import STDOUT, ForkedCommand

LIMITS = Limits(hang_seconds=60.0, start_seconds=120.0, grace_seconds=2.0, deadline_seconds=60.0)


def fork_launcher(directory: Path, mark: Mark) -> Any:
    """Does what `start_launcher` does, without its imports; the mark is missing in what /proc shows."""
    with (directory / "launcher.log").open("wb") as log:
        return ForkedCommand("genesis.operations.supervise.launcher", directory, mark.value, stdout=log, stderr=STDOUT)


class Run:
    """A supervised run of a tiny recipe.

    Args:
        corpus: The corpus.
        directory: Holds the recipe and the run.
        changes: To the recipe.
    """

    def __init__(self, corpus: Path, directory: Path, changes: dict[str, Any] | None = None) -> None:
        self.run_dir = directory / "run"
        self.recipe = directory / "recipe.yaml"
        self._corpus = corpus
        self.lines: list[str] = []
        self.output = bytearray()
        self.write(changes or {})

    def write(self, changes: dict[str, Any]) -> None:
        """Writes the recipe."""
        write_recipe(
            self.recipe,
            build_recipe(self._corpus, self.run_dir),
            {"trainer.max_steps": 40, "trainer.val_check_interval": 1000, "checkpoint.every_n_steps": 4, **changes},
        )

    def supervise(
        self, observers: Sequence[Observer] = (), policy: Policy | None = None, fit: Sequence[str] = (), **options: Any
    ) -> int:
        """Supervises to the end, and returns the exit status."""
        options.setdefault("limits", LIMITS)
        given = SuperviseOptions(
            fit=("fit", "--config", str(self.recipe), *fit),
            run_dir=self.run_dir,
            policy=policy or Policy(max_ends_without_progress=3),
            **options,
        )
        return Supervisor(given, self.lines.append, self.output.extend, observers).run()


@pytest.fixture
def forked_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs take a launcher that is forked from a process with the imports done."""
    monkeypatch.setattr(launcher_client, "start_launcher", fork_launcher)
