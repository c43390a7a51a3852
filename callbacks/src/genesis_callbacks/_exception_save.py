"""A save of the last window's end when training ends by an exception: each rank does its part without the others."""

import warnings

from lightning.pytorch.utilities import rank_zero_warn

from ._boundary import Boundary
from ._fit_saves import FitSaves, SaveHistory
from ._rank_watch import RankWatch
from ._save_warnings import SaveFailedWarning
from .checkpoint.errors import CheckpointError, SaveFailedError
from .checkpoint.pipeline import SavePipeline
from .checkpoint.save_target import Snapshot

# How long the save in flight may take to end before the last window's end cannot be saved.
_SETTLE_SECONDS = 10.0
ALONE_SECONDS = 60.0
"""How long ranks that end by an exception wait for one another's part of a save: who has not ended has none."""


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
    """Saves the last window's end without the other ranks, if it is still there, and says whether a save began.

    No communication: the receipts in the staging directory bring the ranks' parts together.

    Args:
        saves: The fit's.
        history: The run's.
        boundary: The last window's end.
        rank_watch: Knows which ranks are gone; None where nobody watches.
        exception: Ended training.
        global_step: As it is now.
        is_swapped: Whether a callback may have given the model other weights: an average, for a validation.
    """
    if boundary.step in (0, history.last_step):
        return False
    reason = _why_not(saves, boundary, rank_watch, exception, global_step)
    if reason is None and is_swapped:
        reason = "a callback may have put an average in the place of the weights"
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

    outcome = pipeline.settle_alone(_SETTLE_SECONDS)
    if outcome is not None and outcome.kind == "committed":
        saves.note_saved(pipeline.settled_step)
    if boundary.step == history.last_step:
        return False
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
        return "it was a save that failed"
    if global_step != boundary.step or not boundary.is_untouched:
        return "parameters or buffers have been written since its end"
    if rank_watch is not None and rank_watch.has_lost_process():
        return "another rank's process is gone"
    if saves.pipeline is None:
        return "training had ended already"
    if saves.target.ranks.world_size > 1 and not saves.pipeline.has_plan:
        return "several ranks cannot save without talking to one another before the first save"
    return None
