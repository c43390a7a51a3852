"""Results into the loggers of the run that is followed, where those take a second process."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from genesis.evaluate.results import Result
from genesis_callbacks.checkpoint import Manifest

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None  # type: ignore[assignment,misc]  # an extra

_TENSORBOARD: Final = "TensorBoardLogger"
_VERSION: Final = "version_"


class RunLog:
    """Writes to TensorBoard, in a file of its own beside those of training; tells once what it cannot write to.

    W&B takes metrics of a run from one process: who would follow them there finds them in `metrics.csv`.

    Args:
        run: The run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._writers: dict[Path, Any] = {}
        self._told: set[str] = set()

    def write(self, manifest: Manifest, results: Sequence[Result]) -> list[str]:
        """Writes results of a checkpoint, and returns what is to be told."""
        lines = []
        for kind, settings in _list_loggers(manifest.recipe):
            directory = self._find_directory(settings, manifest.recipe) if kind == _TENSORBOARD else None
            if SummaryWriter is None and kind == _TENSORBOARD:
                lines.append("TensorBoard is not installed here (pip install 'genesis-lm[tensorboard]')")
            elif kind != _TENSORBOARD:
                lines.append(f"{kind} takes the metrics of a run from one process, which is training")
            elif directory is None:
                lines.append("the run's TensorBoard directory is not there")
            else:
                self._write_events(directory, results)
        new = [f"{line}: results are in metrics.csv alone" for line in lines if line not in self._told]
        self._told.update(lines)
        return new

    def close(self) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()

    def _write_events(self, directory: Path, results: Sequence[Result]) -> None:
        if directory not in self._writers:
            self._writers[directory] = SummaryWriter(str(directory), filename_suffix=".evaluate")
        writer = self._writers[directory]
        for result in results:
            for measure in result.measures:
                if measure.value is not None:
                    writer.add_scalar(measure.key, measure.value, result.step)
        writer.flush()

    def _find_directory(self, settings: dict[str, Any], recipe: dict[str, Any]) -> Path | None:
        """Returns where the newest attempt of training writes its events."""
        place = settings.get("save_dir")
        # What lies in the run may have moved with it.
        root = self._run if place in (None, recipe.get("run_dir")) else Path(place)
        root = root / (settings.get("name") or "")
        versions = [path for path in root.glob(f"{_VERSION}*") if path.name.removeprefix(_VERSION).isdigit()]
        return max(versions, key=lambda path: int(path.name.removeprefix(_VERSION)), default=None)


def _list_loggers(recipe: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the class and the settings of each logger that a recipe names beside the run's own file."""
    named = (recipe.get("trainer") or {}).get("logger")
    for logger in named if isinstance(named, list) else [named]:
        if isinstance(logger, dict) and isinstance(logger.get("class_path"), str):
            yield logger["class_path"].rsplit(".", 1)[-1], logger.get("init_args") or {}
