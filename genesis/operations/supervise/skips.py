"""Which data may have caused the end of an attempt, and whether the run may skip them: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from genesis.base.errors import numbered
from genesis.data.skipped import Ranges, count, describe, merge, subtract
from genesis.operations.supervise.ends import EndClass


@dataclass(frozen=True)
class Blame:
    """The windows of data in which a run has failed.

    Args:
        first: The first position.
        stop: The position after the last one.
        global_batch_size: Sequences of a window.
        before_step: The newest step before these windows that changed the weights.
    """

    first: int
    stop: int
    global_batch_size: int
    before_step: int


def find_blame(
    end_class: EndClass, step: int | None, clocks: Mapping[str, int], global_batch_size: int
) -> Blame | None:
    """Returns the windows in which an attempt failed; None if the class has none, or they are not known.

    A storm of steps that are not finite began after the last update. A step without memory is the one that follows.

    Args:
        end_class: The class of the end.
        step: The step of the rank's last heartbeat, which it wrote when it failed.
        clocks: That heartbeat's.
        global_batch_size: Sequences of a window; 0 if unknown.

    Example:
        >>> find_blame("non_finite", 14, {"data_position": 112, "last_update_step": 11}, 8)
        Blame(first=88, stop=112, global_batch_size=8, before_step=11)
    """
    position = clocks.get("data_position")
    if position is None or step is None or global_batch_size < 1:
        return None
    if end_class == "out_of_memory_in_step":
        return Blame(position, position + global_batch_size, global_batch_size, step)
    updated_step = clocks.get("last_update_step")
    if end_class != "non_finite" or updated_step is None or updated_step >= step:
        return None
    first = position - (step - updated_step) * global_batch_size
    return Blame(max(0, first), position, global_batch_size, updated_step)


@dataclass(frozen=True)
class Skips:
    """What a run has skipped so far.

    Args:
        positions: Positions that are skipped.
        num_windows: Windows that the run has skipped, whatever became of them: so many of the budget are used.
    """

    positions: Ranges = ()
    num_windows: int = 0

    def allow(self, blame: Blame | None, may_skip: int) -> Ranges:
        """Returns the positions of the blamed windows that are not skipped yet, if all of them may be; else nothing."""
        if blame is None or self.num_windows + self._count_new(blame) > may_skip:
            return ()
        return self._find_new(blame)

    def add(self, positions: Ranges, global_batch_size: int) -> "Skips":
        """Returns what is skipped with these positions, too; none of them was before."""
        num_windows = self.num_windows + _count_windows(positions, global_batch_size)
        return Skips(merge(self.positions, positions), num_windows)

    def describe(self, blame: Blame, may_skip: int) -> str:
        """Returns what is skipped by an action, with the budget afterwards."""
        new = self._count_new(blame)
        return (
            f"skip {numbered(new, 'windows')} of data, positions {describe(self._find_new(blame))} "
            f"({self.num_windows + new} of --may_skip_data {may_skip} used)"
        )

    def explain(self, blame: Blame | None, may_skip: int) -> str:
        """Returns why data are not skipped, for the end of a line; nothing where nobody has allowed it."""
        if not may_skip:
            return ""
        if blame is None:
            return "; no rank has reported which data to skip"
        new = self._count_new(blame)
        if not new:
            return f"; the data at positions {describe([(blame.first, blame.stop)])} are skipped already"
        return (
            f"; to skip {numbered(new, 'more windows')} of data, positions {describe(self._find_new(blame))}, "
            f"--may_skip_data {may_skip} is too few: {self.num_windows} are used"
        )

    def _find_new(self, blame: Blame) -> Ranges:
        return subtract(((blame.first, blame.stop),), self.positions)

    def _count_new(self, blame: Blame) -> int:
        return _count_windows(self._find_new(blame), blame.global_batch_size)


def _count_windows(positions: Ranges, global_batch_size: int) -> int:
    return -(-count(positions) // global_batch_size)


NO_SKIPS: Final = Skips()


def choose_newest(found: Sequence[Skips]) -> Skips:
    """Returns the newest of what several sources know of a run: the count never falls. The first wins a tie. Pure.

    Example:
        >>> choose_newest([Skips(), Skips(((0, 8),), 1)]).num_windows
        1
    """
    return max(found, key=lambda skips: skips.num_windows)
