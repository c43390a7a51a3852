"""Saves a checkpoint outside of training: in an import, a tool or a test."""

import warnings
from collections.abc import Callable
from pathlib import Path

from ..base.run_directory import checkpoint_name
from .job import error_from
from .one_save import Progress
from .pipeline import SavePipeline
from .save_target import RetentionWarning, SaveTarget, Snapshot


def save_blocking(target: SaveTarget, take_snapshot: Callable[[], Snapshot]) -> Path:
    """Saves a checkpoint outside of training and returns its path. Every rank calls this function. Communicates.

    Args:
        target: The directory, the ranks and the manifest's header; the commit is reported to it.
        take_snapshot: Returns this rank's snapshot.

    Raises:
        SaveFailedError: The save failed, on every rank alike. Older checkpoints are unchanged.
    """
    snapshot = target.ranks.attempt("reporting the tensors to save", take_snapshot)
    pipeline = SavePipeline(target, mode="sync")
    try:
        pipeline.begin(snapshot.step, lambda: snapshot, Progress(lambda: 0))
        outcome = pipeline.finish()
    finally:
        pipeline.close(0.0)
    assert outcome is not None
    if outcome.kind != "committed":
        raise error_from(outcome.kind, outcome.text)
    if outcome.warning is not None:
        warnings.warn(outcome.warning, RetentionWarning, stacklevel=2)
    return target.directory / checkpoint_name(snapshot.step)
