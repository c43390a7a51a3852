"""Writes results to the loggers of the run that is watched, if these loggers accept a second process.

TensorBoard accepts another event file next to those of training. W&B offline merges directories with the same id into
one run when they are uploaded. W&B online accepts a second process only for a run that was opened in shared mode, which
training does not use; for such runs the results are only in `metrics.csv`.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import wandb

from genesis.base.errors import UserError
from genesis.base.run_directory import find_tensorboard_version, find_wandb_run, tensorboard_directory
from genesis.evaluate.results import Result
from genesis_callbacks.checkpoint import Manifest

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None  # type: ignore[assignment,misc]  # an extra

_TENSORBOARD: Final = "TensorBoardLogger"
_WANDB: Final = "WandbLogger"
_STEP: Final = "evaluation/step"


class RunLog:
    """Writes results to the loggers of a run, and reports each logger that it cannot write to once.

    Args:
        run: The run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._writers: dict[Path, Any] = {}
        self._wandb: Any = None
        self._reported: set[str] = set()

    def write(self, manifest: Manifest, results: Sequence[Result]) -> list[str]:
        """Writes results of a checkpoint, and returns lines to report."""
        lines = []
        for kind, settings in _list_loggers(manifest.recipe):
            try:
                if kind == _TENSORBOARD:
                    self._write_tensorboard(self._find_root(settings, manifest.recipe), settings, results)
                elif kind == _WANDB:
                    self._write_wandb(self._find_root(settings, manifest.recipe), settings, results)
                else:
                    raise UserError(f"the logger {kind} is not supported")
            except UserError as error:
                lines.append(f"{error}: results are only in metrics.csv")
        new = [line for line in lines if line not in self._reported]
        self._reported.update(lines)
        return new

    def close(self) -> None:
        """Closes all open loggers."""
        for writer in self._writers.values():
            writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _find_root(self, settings: dict[str, Any], recipe: dict[str, Any]) -> Path:
        """Returns the directory of a logger, also after the run's directory was moved."""
        place = settings.get("save_dir")
        return self._run if place in (None, recipe.get("run_dir")) else Path(place)

    def _write_tensorboard(self, root: Path, settings: dict[str, Any], results: Sequence[Result]) -> None:
        if SummaryWriter is None:
            raise UserError("TensorBoard is not installed here (pip install 'genesis-lm[tensorboard]')")
        directory = root / (settings.get("name") or "")
        version = find_tensorboard_version(directory)
        if version is None:
            raise UserError("the run's TensorBoard directory does not exist")
        newest = tensorboard_directory(directory, version)
        if newest not in self._writers:
            self._writers[newest] = SummaryWriter(str(newest), filename_suffix=".evaluate")
        for result in results:
            for measure in result.measures:
                if measure.value is not None:
                    self._writers[newest].add_scalar(measure.key, measure.value, result.step)
        self._writers[newest].flush()

    def _write_wandb(self, root: Path, settings: dict[str, Any], results: Sequence[Result]) -> None:
        newest = find_wandb_run(root)
        if newest is None:
            raise UserError("the run's W&B directory does not exist")
        if not newest.is_offline:
            raise UserError("W&B accepts metrics of an online run only from training")
        if self._wandb is None or self._wandb.id != newest.id:
            self._open_wandb(root, newest.id, settings)
        for result in results:
            values = {measure.key: measure.value for measure in result.measures if measure.value is not None}
            self._wandb.log({_STEP: result.step, **values})

    def _open_wandb(self, root: Path, run_id: str, settings: dict[str, Any]) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        os.environ.setdefault(
            "WANDB_DISABLE_WEAVE", "true"
        )  # otherwise it prints an advertisement if openai is installed
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True)
        self._wandb = wandb.init(
            id=run_id, project=settings.get("project"), dir=str(root), mode="offline", settings=quiet
        )
        self._wandb.define_metric("evaluation/*", step_metric=_STEP)


def _list_loggers(recipe: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the class and the settings of each logger that a recipe names beside the run's own file."""
    named = (recipe.get("trainer") or {}).get("logger")
    for logger in named if isinstance(named, list) else [named]:
        if isinstance(logger, dict) and isinstance(logger.get("class_path"), str):
            yield logger["class_path"].rsplit(".", 1)[-1], logger.get("init_args") or {}
