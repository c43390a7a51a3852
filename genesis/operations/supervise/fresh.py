"""Moves a run's checkpoints aside, for `--on_drift fresh`; runs in a child of the launcher, as it imports torch."""

import time
from pathlib import Path

from genesis.operations.supervise.state import write_fresh_seconds
from genesis_callbacks.checkpoint import list_committed, supersede


def main(arguments: list[str]) -> int:
    """Moves all committed checkpoints of the run in `arguments` into a `superseded-N`."""
    # The note comes first: without it a mirror would bring back what is moved aside.
    write_fresh_seconds(Path(arguments[0]), time.time())
    supersede([path for path, _ in list_committed(Path(arguments[0]))])
    return 0
