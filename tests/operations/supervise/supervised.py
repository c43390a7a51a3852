"""Runs supervised in the process of the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genesis.operations.supervise.attempt import Limits
from genesis.operations.supervise.decide import Policy
from genesis.operations.supervise.loop import supervise
from genesis.operations.supervise.observers import Observer
from genesis.operations.supervise.options import SuperviseOptions
from tests.cli.tiny import build_recipe, write_recipe

LIMITS = Limits(hang_seconds=60.0, start_seconds=120.0, grace_seconds=2.0, deadline_seconds=60.0)


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
        return supervise(given, self.lines.append, self.output.extend, observers)
