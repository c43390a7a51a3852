"""Where everything lies in `runs/NAME`. Nothing else spells the name of a file in a run.

    config.yaml, config.resume-N.yaml   resolved recipes, one for each start of `genesis fit`
    metrics.csv                         the log of training
    data_places.json                    where the run's data lie as seen from here (`genesis.data.places`)
    evaluations/                        results of `genesis evaluate`
    recipe.yaml, proof.json             written by `genesis import`, and so is the tokenizer's file
    loss.png                            written by `genesis demo`
    checkpoints/, events/, .ranks/      what the callbacks write: `genesis_callbacks.run_directory`

What names a run or a checkpoint for a command is resolved by `genesis.checkpoint_reference`.
"""

import os
from pathlib import Path
from typing import Final

from genesis_callbacks.checkpoint import MANIFEST_NAME
from genesis_callbacks.run_directory import RunDirectory as CallbacksDirectory

RUNS_NAME: Final = "runs"
"""The directory, in the working directory, in which the name of a run is looked for."""


class RunDirectory:
    """The places in one run's directory. A place need not exist.

    Args:
        path: The run's directory.

    Attributes:
        path: As given.
        checkpoints: Holds the checkpoints.
        metrics: The log of training.
        recipe: The first start's resolved recipe.
        data_places: Where the run's data lie.
        evaluations: Holds the results of evaluations.
        imported_recipe: How to train on from an import.
        loss_plot: The demo's picture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CallbacksDirectory(path).checkpoints
        self.metrics = path / "metrics.csv"
        self.recipe = path / "config.yaml"
        self.data_places = path / "data_places.json"
        self.evaluations = path / "evaluations"
        self.imported_recipe = path / "recipe.yaml"
        self.loss_plot = path / "loss.png"

    @classmethod
    def of(cls, path: Path) -> "RunDirectory":
        """Returns the run of a path, which is the run's directory, its `checkpoints`, or one of its checkpoints."""
        if (path / MANIFEST_NAME).exists():
            return cls(Path(os.path.normpath(path.absolute())).parent.parent)
        holding = CallbacksDirectory.holding(path)
        if holding is not None and holding.checkpoints == path.absolute():
            return cls(holding.path)
        return cls(path)

    def next_recipe(self) -> Path:
        """Returns where the resolved recipe of one more start goes."""
        path, number = self.recipe, 0
        while path.exists():
            number += 1
            path = self.path / f"config.resume-{number}.yaml"
        return path
