"""Makes lm-eval and Hugging Face's packages quiet: no telemetry, no bars, no processes of their own.

They read the environment when they are imported, so this stands before them. What they warn of a user of `genesis
evaluate` cannot change; what matters is raised.
"""

import logging
import os
from functools import partialmethod

import tqdm

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
logging.getLogger("lm_eval").setLevel(logging.ERROR)
# Its own variable would come too late: torch imports tqdm.
tqdm.tqdm.__init__ = partialmethod(tqdm.tqdm.__init__, disable=True)
