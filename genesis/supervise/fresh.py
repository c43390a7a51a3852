"""Moves a run's checkpoints aside, for `--on-drift fresh`; runs in a child of the launcher, as it imports torch."""

from pathlib import Path

from genesis_callbacks.checkpoint import list_committed, supersede


def main(arguments: list[str]) -> int:
    """Moves all committed checkpoints of the run in `arguments` into a `superseded-N`."""
    supersede([path for path, _ in list_committed(Path(arguments[0]))])
    return 0
