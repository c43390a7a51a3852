"""The names of all files in `runs/NAME`. No other module spells the name of a file in a run.

    config.yaml, config.resume-N.yaml   the resolved recipe of each start of `genesis fit`
    metrics.csv                         the log of training
    data_paths.json                     paths of the run's data, relative to this directory (`genesis.data.paths`)
    chat/template.jinja                 the chat template that the model has learned (`genesis.chat.learned`)
    evaluations/                        results of `genesis evaluate`
    rollouts/POSITION.rank-N.jsonl      training on prompts: some answers of each rollout, or episodes, with rewards
    served/weights/, served/answers/    rollouts by a server: weights for it, and its answers (`train.server_rollouts`)
    crashes/NUMBER-CLASS/               a record of each crash, by `genesis supervise` (`operations.supervise.crashes`)
    supervisor/                         state of `genesis supervise`: status.json, its lock, the output of each attempt
    recipe.yaml, proof.json             written by `genesis import` and `genesis model add-tokens`, with the tokenizer
    loss.png                            written by `genesis demo`
    tensorboard/, wandb/                written by these loggers (`configs/loggers/`)
    report.html                         written by `genesis report`
    pictures/                           written by `genesis demo`: the report's charts
    mirrors/                            what is known of each mirror of the run: `genesis mirror`
    bases/                              bases of checkpoints that `genesis mirror restore` has put there
    reference/                          log-probabilities of a reference model (`genesis.objectives.reference`)
    checkpoints/, events/,              written by the callbacks: `genesis_callbacks.base.run_directory`
    heartbeats/, .ranks/

`genesis.generate.checkpoint_reference` resolves the names of runs and checkpoints that users give to commands.
"""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from genesis.base.errors import UserError
from genesis_callbacks.base.run_directory import MANIFEST_NAME
from genesis_callbacks.base.run_directory import RunDirectory as CallbacksDirectory

RUNS_NAME: Final = "runs"
"""The directory, relative to the working directory, in which commands look for a run by its name."""

CHAT_TEMPLATE_NAME: Final = "chat/template.jinja"
"""The chat template in a run and in a corpus: no file of the tokenizer, which may have another."""

_WANDB_RUN: Final = re.compile(r"(?P<offline>offline-)?run-(?P<time>\d{8}_\d{6})-(?P<id>.+)")
_TENSORBOARD_VERSION: Final = re.compile(r"version_(\d{1,9})")


class WandbRun(NamedTuple):
    """The newest files of W&B in a run's directory: the id, and whether they wait for an upload."""

    id: str
    is_offline: bool


def find_wandb_run(root: Path) -> WandbRun | None:
    """Returns what W&B's files in `root` belong to; None if there are none."""
    found = [match for path in (root / "wandb").glob("*run-*") if (match := _WANDB_RUN.fullmatch(path.name))]
    newest = max(found, key=lambda match: match["time"], default=None)
    return None if newest is None else WandbRun(newest["id"], newest["offline"] is not None)


def find_tensorboard_version(root: Path) -> int | None:
    """Returns the number of the newest `version_N` in TensorBoard's directory; None if there is none."""
    found = (_TENSORBOARD_VERSION.fullmatch(path.name) for path in root.glob("version_*"))
    return max((int(match[1]) for match in found if match), default=None)


def tensorboard_directory(root: Path, version: int) -> Path:
    """Returns the directory of a version in TensorBoard's directory."""
    return root / f"version_{version}"


class RunDirectory:
    """The paths in one run's directory. A path need not exist.

    Args:
        path: The run's directory.

    Attributes:
        path: The run's directory.
        checkpoints: The directory of the checkpoints.
        metrics: The log of training.
        recipe: The first start's resolved recipe.
        data_paths: The recorded paths of the run's data.
        old_data_paths: The same file under the name that versions before 0.2 gave it.
        chat_template: The chat template that the model has learned.
        evaluations: The directory of evaluation results.
        rollouts: The directory of answers that were written in training.
        served: What a server that writes answers gets and gives: `served_weights` and `served_answers` in it.
        crashes: Holds a directory for each crash.
        supervisor: The state of the supervisor.
        supervisor_status: The supervisor's snapshot for other programs.
        imported_recipe: The recipe for training that starts from an import.
        loss_plot: The loss curve that `genesis demo` plots.
        report: The page that `genesis report` writes.
        pictures: The report's charts, of `genesis demo`.
        mirrors: The directory of the states of the run's mirrors.
        bases: The directory of restored bases.
        reference: Log-probabilities of a reference model, for preference optimisation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CallbacksDirectory(path).checkpoints
        self.metrics = path / "metrics.csv"
        self.recipe = path / "config.yaml"
        self.data_paths = path / "data_paths.json"
        self.old_data_paths = path / "data_places.json"
        self.chat_template = path / CHAT_TEMPLATE_NAME
        self.evaluations = path / "evaluations"
        self.rollouts = path / "rollouts"
        self.served = path / "served"
        self.served_weights = self.served / "weights"
        self.served_answers = self.served / "answers"
        self.crashes = path / "crashes"
        self.supervisor = path / "supervisor"
        self.supervisor_status = self.supervisor / "status.json"
        self.imported_recipe = path / "recipe.yaml"
        self.loss_plot = path / "loss.png"
        self.report = path / "report.html"
        self.pictures = path / "pictures"
        self.mirrors = path / "mirrors"
        self.bases = CallbacksDirectory(path).bases
        self.reference = path / "reference"

    @classmethod
    def of(cls, path: Path) -> "RunDirectory":
        """Returns the run that `path` belongs to: the run's directory, its `checkpoints`, or one of its checkpoints."""
        if (path / MANIFEST_NAME).exists():
            return cls(Path(os.path.normpath(path.absolute())).parent.parent)
        holding = CallbacksDirectory.holding(path)
        if holding is not None and holding.checkpoints == path.absolute():
            return cls(holding.path)
        return cls(path)

    def check_own(self) -> None:
        """Refuses a run, which may come from others, whose directories for records are links to elsewhere.

        `checkpoints` may be a link: a user may keep them on another disk.

        Raises:
            UserError: A directory into which commands write is such a link.
        """
        shared = CallbacksDirectory(self.path)
        written = (
            *(self.evaluations, self.rollouts, self.crashes, self.supervisor, self.pictures, self.mirrors),
            *(self.reference, self.bases, self.served, self.chat_template.parent, shared.events),
            *(shared.heartbeats, shared.ranks, shared.memory, shared.traces, shared.hangs),
        )
        home = self.path.resolve()
        for directory in written:
            if directory.is_symlink() and not directory.resolve().is_relative_to(home):
                raise UserError(
                    f"{directory} is a link to {directory.resolve()}: what is written about a run stays in its "
                    "directory; put a directory in the place of the link"
                )

    def rollout(self, position: int, rank: int) -> Path:
        """Returns the path for answers of the rollout that begins at `position` on a rank."""
        return self.rollouts / f"{position:010d}.rank-{rank}.jsonl"

    def next_recipe(self) -> Path:
        """Returns the path for the resolved recipe of the next start."""
        path, number = self.recipe, 0
        while path.exists():
            number += 1
            path = self.path / f"config.resume-{number}.yaml"
        return path
