"""Follows a monitored metric from validation to validation: decides which steps are the best, and marks them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from .base.checkpoint_errors import CheckpointError
from .base.run_directory import step_of
from .checkpoint.best import Measured, MonitorMode, mark_best, rank, read_best


class BestWatch:
    """Keeps the best steps so far. A step that they displaced stays known until the save of the new step has ended.

    It does not communicate: rank 0 decides, and its caller broadcasts the decision.

    Args:
        monitor: Key of a metric that validation logs.
        mode: Whether smaller (`min`) or larger (`max`) is better.
        count: How many are the best.

    Attributes:
        measure: What the metric is measured on: values of different measures are never compared. None for no name.
        unnamed_measure: The measure of values that were recorded without a name, by earlier versions.
    """

    def __init__(self, monitor: str, mode: MonitorMode, count: int = 1) -> None:
        self._monitor, self._mode, self._count = monitor, mode, count
        self.measure: str | None = None
        self.unnamed_measure: str | None = None
        self._ranked: tuple[Measured, ...] = ()  # the best first; more than `count` while one of them is open
        self._open: frozenset[int] = frozenset()  # steps that are being saved

    @property
    def best(self) -> tuple[Measured, ...]:
        """The best so far, in their order, with those that are being saved."""
        return self._ranked[: self._count]

    def read_measure(self, trainer: pl.Trainer) -> None:
        """Takes the measure that the data module names, if it does, before a state is loaded.

        `validation_measure` of a data module is a name, such as a hash of the validation data, and the name that values
        without one have.
        """
        data = vars(trainer).get("datamodule")
        self.measure, self.unnamed_measure = getattr(data, "validation_measure", (None, None))

    def read(self, metrics: Mapping[str, Any]) -> float:
        """Returns the monitored metric.

        Raises:
            CheckpointError: It was not logged; the message names those that were.
        """
        if self._monitor not in metrics:
            logged = ", ".join(sorted(metrics)) or "nothing"
            raise CheckpointError(f"monitor is {self._monitor!r}, but validation logged {logged}: give one of these")
        return float(metrics[self._monitor])

    def is_among_best(self, step: int, value: float) -> bool:
        """Returns whether `value`, measured at `step`, is one of the best; on a tie the earlier step stays."""
        measured = Measured(step, value)
        return measured not in self.best and measured in rank((*self.best, measured), self._mode)[: self._count]

    def take(self, step: int, value: float) -> None:
        """Notes that `step`, which is being saved, is one of the best."""
        self._ranked = rank((*self._ranked, Measured(step, value)), self._mode)
        self._open |= {step}

    def drop(self, step: int) -> None:
        """Notes that `step` did not become a checkpoint: the step that it displaced is one of the best again."""
        # A step that is not open was never taken, or its save has ended already: nothing was displaced for it.
        if step in self._open:
            self._ranked = tuple(one for one in self._ranked if one.step != step)
            self._close(step)

    def keep(self, step: int) -> bool:
        """Notes that `step` became a checkpoint, and returns whether the checkpoint is to be marked."""
        self._close(step)
        return any(one.step == step for one in self.best)

    def _close(self, step: int) -> None:
        self._open -= {step}
        # While another save is open, a displaced step may still come back, so the list is cut only after the last one.
        if not self._open:
            self._ranked = self.best

    def mark(self, directory: Path) -> None:
        """Marks the best of those that are saved. Rank 0 calls it.

        Raises:
            UnreadableCheckpointError: One of them cannot be read; the marks stay as they were.
        """
        self._mark(directory, [one for one in self._ranked if one.step not in self._open])

    def _mark(self, directory: Path, measured: Sequence[Measured]) -> list[Measured]:
        ranked = rank(measured, self._mode)
        return mark_best(directory, ranked, self._monitor, self._mode, count=self._count, measure=self.measure)

    def _is_comparable(self, monitor: Any, mode: Any, measure: Any) -> bool:
        named = self.unnamed_measure if measure is None else measure
        return bool((monitor, mode, named) == (self._monitor, self._mode, self.measure))

    def agree_with(self, directory: Path) -> str | None:
        """Merges the marks on the disk with this state, when a run begins or continues. Rank 0 calls it.

        By now the directory holds only checkpoints of this run's past. The marks may be newer than the restored state,
        because a step is saved before it is validated. After a kill, the restored state may be newer than the marks.
        A step whose checkpoint was removed is forgotten. Marks of another measure stay until a new one replaces them.

        Returns:
            A line about marks of another measure, which are not compared; None without such marks.
        """
        found = read_best(directory)
        known = list(self._ranked)
        self._open = frozenset()
        if found is not None and self._is_comparable(found.monitor, found.mode, found.measure):
            known += [Measured(step_of(one.name), one.value) for one in found.ranked]
        elif found is not None and (found.monitor, found.mode) == (self._monitor, self._mode) and not known:
            return (
                f"the best checkpoint so far, {found.name} with {found.monitor} {found.value:.6g}, was measured on "
                "other validation data or by another rule: it is not compared, and stays marked until a validation"
            )
        self._ranked = tuple(self._mark(directory, known))
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values: the best one, and the others beside it."""
        first = self.best[0] if self.best else None
        return {
            "monitor": self._monitor,
            "mode": self._mode,
            "measure": self.measure,
            "step": None if first is None else first.step,
            "value": None if first is None else first.value,
            "others": [{"step": one.step, "value": one.value} for one in self.best[1:]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned, if the metric is the same. Older states hold the best step alone."""
        # Values of another metric, or of the other direction, cannot be compared: the run begins without a best step.
        if not self._is_comparable(state["monitor"], state["mode"], state.get("measure")):
            return
        first = [] if state["step"] is None else [Measured(state["step"], state["value"])]
        others = [Measured(one["step"], one["value"]) for one in state.get("others", ())]
        self._ranked, self._open = rank((*first, *others), self._mode)[: self._count], frozenset()
