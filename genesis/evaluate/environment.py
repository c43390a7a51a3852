"""Makes lm-eval and Hugging Face's packages quiet: no telemetry, no progress bars, no worker processes.

Importing this module changes no state. The table of commands calls `make_quiet` before it imports a command that
evaluates, because these packages read the environment when they are imported. Users of `genesis evaluate` cannot act on
their warnings, except for one that `refuse_wrong_answers` turns into an error.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partialmethod
from typing import Final

import tqdm

from genesis.base.errors import UserError

_VARIABLES: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "LMEVAL_LOG_LEVEL": "ERROR",
    "DISABLE_MULTIPROC": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_TASK_LOG: Final = "lm_eval.api.task"
_SHOWN_CHARS: Final = 300


@cache
def make_quiet() -> None:
    """Sets the environment, lm-eval's log level and tqdm for the rest of the process; a second call has no effect."""
    os.environ.update(_VARIABLES)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # tqdm's own variable would come too late if torch, which imports tqdm, is already imported.
    tqdm.tqdm.__init__ = partialmethod(tqdm.tqdm.__init__, disable=True)


@contextmanager
def refuse_wrong_answers() -> Iterator[None]:
    """Raises an error for invalid rows, about which lm-eval only warns before it counts them as wrong answers.

    Raises:
        UserError: The answer of a row is not among its choices.
    """
    log, refusal = logging.getLogger(_TASK_LOG), _Refusal()
    before = log.level, log.propagate
    log.setLevel(logging.WARNING)
    log.propagate = False
    log.addHandler(refusal)
    try:
        yield
    finally:
        log.removeHandler(refusal)
        log.setLevel(before[0])
        log.propagate = before[1]


class _Refusal(logging.Handler):
    """Raises for a row whose answer is not among its choices; drops other warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Handles one warning."""
        message = record.getMessage()
        if message.startswith("Label index was not in within range"):
            row = " ".join(message.partition("Sample:")[2].split())
            raise UserError(f"a row's answer is not among its choices: {row[:_SHOWN_CHARS]}; fix it or remove it")
