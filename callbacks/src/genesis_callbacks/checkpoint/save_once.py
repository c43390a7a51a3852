"""A save for whoever does not train: an import, a tool, a test."""

import warnings
from collections.abc import Callable
from pathlib import Path

from .job import error_from
from .manifest import checkpoint_name
from .pipeline import Progress, SavePipeline
from .save_target import RetentionWarning, SaveTarget, Snapshot


def save_blocking(target: SaveTarget, take_snapshot: Callable[[], Snapshot]) -> Path:
    """Saves and returns the checkpoint, for whoever does not train. Every rank calls it. Communicates.

    Args:
        target: Says where, for whom and under which heading; it learns of the commit.
        take_snapshot: Gives this rank's snapshot.

    Raises:
        SaveFailedError: On every rank alike. Every checkpoint from before is as it was.
    """
    snapshot = target.ranks.attempt("reporting what to save", take_snapshot)
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
