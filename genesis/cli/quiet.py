"""Which lines of Lightning reach the terminal. The process stays as it was: a notebook may run the commands."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_USELESS_MESSAGES: Final = re.compile(
    "GPU available|TPU available|distributed_backend|Tip:"
    # `genesis.cli.main` prints the line about an interruption.
    "|Detected KeyboardInterrupt"
    # Advice on the precision of float32 matmuls, printed before `genesis.train.precision` sets that precision.
    "|that has Tensor Cores"
)
_USELESS_WARNINGS: Final = (
    r".*isinstance\(treespec, LeafSpec\).*",
    # Our metrics are already summed over all ranks.
    r".*It is recommended to use `self.log\(.*sync_dist=True.*",
    # The log counts steps across the ends of epochs.
    r".*is smaller than the logging interval.*",
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Drops Lightning's messages that no user can act on, and prints each warning in one line, within the block."""
    messages = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with warned_in_one_line(), _at_level(logging.WARNING, "lightning.fabric"):
        for message in _USELESS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        messages.addFilter(_is_news)
        try:
            yield
        finally:
            messages.removeFilter(_is_news)


@contextmanager
def warned_in_one_line() -> Iterator[None]:
    """Prints each warning in one line within the block."""
    before = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.formatwarning = _warn_in_one_line
        try:
            yield
        finally:
            warnings.formatwarning = before


@contextmanager
def errors_of_lightning() -> Iterator[None]:
    """Drops all of Lightning's messages except errors within the block."""
    with _at_level(logging.ERROR, "lightning.pytorch"), _at_level(logging.ERROR, "lightning.fabric"):
        yield


@contextmanager
def _at_level(level: int, name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def _is_news(record: logging.LogRecord) -> bool:
    return _USELESS_MESSAGES.search(record.getMessage()) is None


def _warn_in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"genesis: warning: {' '.join(str(message).split())}\n"
