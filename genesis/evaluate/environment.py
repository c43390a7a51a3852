"""Makes lm-eval and Hugging Face's packages quiet: no telemetry, no bars, no processes of their own.

They read the environment when they are imported, so this stands before them. What they warn of a user of `genesis
evaluate` cannot change; what matters is raised.
"""

import logging
import os
from functools import partialmethod

import tqdm

from genesis.errors import UserError

os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_UPDATE_DOWNLOAD_COUNTS="0",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    HF_HUB_VERBOSITY="error",
    DATASETS_VERBOSITY="error",
    LMEVAL_LOG_LEVEL="ERROR",
    DISABLE_MULTIPROC="1",
    TOKENIZERS_PARALLELISM="false",
)


_SHOWN_CHARS = 300


class _Refusal(logging.Handler):
    """Makes an error of what lm-eval only warns of, and then counts as a wrong answer; other warnings are dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raises for a row whose answer is none of its choices."""
        message = record.getMessage()
        if message.startswith("Label index was not in within range"):
            row = " ".join(message.partition("Sample:")[2].split())
            raise UserError(f"a row's answer is none of its choices: {row[:_SHOWN_CHARS]}; mend it or remove it")


logging.getLogger("lm_eval").setLevel(logging.ERROR)
_task_log = logging.getLogger("lm_eval.api.task")
_task_log.setLevel(logging.WARNING)
_task_log.propagate = False
_task_log.addHandler(_Refusal())
# Its own variable would come too late: torch imports tqdm.
tqdm.tqdm.__init__ = partialmethod(tqdm.tqdm.__init__, disable=True)
