"""Makes lm-eval and Hugging Face's packages quiet: no telemetry, no bars, no processes of their own.

Importing this changes nothing. The table of commands calls `make_quiet` before it imports a command that evaluates,
because these packages read the environment when they are imported. What they warn of a user of `genesis evaluate`
cannot change; what matters is raised (`refuse_wrong_answers`).
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partialmethod
from typing import Final

import tqdm

from genesis.errors import UserError

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
    """Sets the environment, lm-eval's log level and tqdm for the rest of the process; a second call does nothing."""
    os.environ.update(_VARIABLES)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Its own variable would come too late where torch, which imports tqdm, is already there.
    tqdm.tqdm.__init__ = partialmethod(tqdm.tqdm.__init__, disable=True)


@contextmanager
def refuse_wrong_answers() -> Iterator[None]:
    """Makes an error of what lm-eval only warns of while it scores, and then counts as a wrong answer.

    Raises:
        UserError: The answer of a row is none of its choices.
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
    """Raises for a row whose answer is none of its choices; other warnings are dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Looks at one warning."""
        message = record.getMessage()
        if message.startswith("Label index was not in within range"):
            row = " ".join(message.partition("Sample:")[2].split())
            raise UserError(f"a row's answer is none of its choices: {row[:_SHOWN_CHARS]}; fix it or remove it")
