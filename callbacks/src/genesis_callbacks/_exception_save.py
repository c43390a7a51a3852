"""A save of the last window's end when training ends by an exception: each rank does its part without the others."""

import warnings
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from ._compat import write_counts
from ._fit_saves import FitSaves, SaveHistory
from ._rank_watch import RankWatch
from ._save_options import SaveFailedWarning
from .base.checkpoint_errors import CheckpointError, SaveFailedError
from .checkpoint.device import read_rng_state
from .checkpoint.pipeline import SavePipeline
from .checkpoint.save_target import Snapshot

# How long the save in flight may take to end before the last window's end cannot be saved.
_SETTLE_SECONDS = 10.0
ALONE_SECONDS = 60.0
"""How long ranks that end by an exception wait for the parts of other ranks; a rank that still trains writes none."""


class Boundary:
    """Records a window's end: the random generators, and the number of writes to each parameter and buffer.

    Args:
        step: Windows attempted.
        module: Holds the live tensors.
    """

    def __init__(self, step: int, module: LightningModule) -> None:
        self.step = step
        self.rng: dict[str, Any] = read_rng_state()
        self._module = module
        self._writes = self._count_writes()

    @property
    def is_untouched(self) -> bool:
        """Whether no parameter and no buffer was written since."""
        return self._count_writes() == self._writes

    def _count_writes(self) -> list[tuple[int, int]]:
        # Torch's version counters are read on the host, so a look costs no wait for the device and works after the
        # device has failed. The identity is compared, too: a replaced tensor begins to count at 0.
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return list(zip(map(id, tensors), write_counts(tensors), strict=True))


def begin_alone(
    saves: FitSaves,
    history: SaveHistory,
    boundary: Boundary,
    rank_watch: RankWatch | None,
    exception: BaseException,
    global_step: int,
    *,
    is_swapped: bool,
) -> bool:
    """Saves the last window's end without the other ranks, if the state is unchanged; returns whether a save began.

    No communication: receipts in the staging directory bring the ranks' parts together. A collective here could wait
    for a rank that is gone, or that waits in a collective of the training itself.

    Args:
        saves: The fit's.
        history: The run's.
        boundary: The last window's end.
        rank_watch: Knows which ranks are gone; None without a watch.
        exception: The exception that ended training.
        global_step: Lightning's, as it is now.
        is_swapped: Whether a callback may have given the model other weights: an average, for a validation.
    """
    if boundary.step in (0, history.last_step):
        return False
    reason = _why_not(saves, boundary, rank_watch, exception, global_step)
    if reason is None and is_swapped:
        reason = "a callback may have replaced the weights by an average"
    if reason is not None:
        rank_zero_warn(f"step {boundary.step} is not saved: {reason}", category=SaveFailedWarning)
        return False
    assert saves.pipeline is not None
    try:
        return _begin(saves, saves.pipeline, history, boundary)
    except Exception as error:  # a device that has failed fails here, too, in its own way
        warnings.warn(f"step {boundary.step} is not saved: {error}", SaveFailedWarning, stacklevel=2)
        return False


def _begin(saves: FitSaves, pipeline: SavePipeline, history: SaveHistory, boundary: Boundary) -> bool:
    def take() -> Snapshot:
        return saves.take_snapshot(rng=boundary.rng)

    # A pipeline holds one save at a time. The one in flight may also be the save of this very step.
    outcome = pipeline.settle_alone(_SETTLE_SECONDS)
    if outcome is not None and outcome.kind == "committed":
        saves.note_saved(pipeline.settled_step)
    if boundary.step == history.last_step:
        return False
    # The generators of the boundary, not of now: the window that raised has drawn from them (dropout, loaders).
    is_alone = saves.target.ranks.world_size > 1
    pipeline.begin(boundary.step, take, saves.progress(), alone_within_seconds=ALONE_SECONDS if is_alone else None)
    return True


def _why_not(
    saves: FitSaves,
    boundary: Boundary,
    rank_watch: RankWatch | None,
    exception: BaseException,
    global_step: int,
) -> str | None:
    if isinstance(exception, CheckpointError | SaveFailedError):
        return "the error is that of a failed save"
    if global_step != boundary.step or not boundary.is_untouched:
        return "parameters or buffers have changed since the end of that step"
    if rank_watch is not None and rank_watch.has_lost_process():
        return "another rank's process is gone"
    if saves.pipeline is None:
        return "training had already ended"
    # The first save gathers what each rank writes; without that plan no rank knows which replica is its own to write.
    if saves.target.ranks.world_size > 1 and not saves.pipeline.has_plan:
        return "before the first save, several ranks cannot save without communication"
    return None
