"""How `genesis fit` ends where another rank is gone."""

import torch.distributed as dist

from genesis.base.errors import RunEndedError
from genesis.strategies.start import EXIT_STATUS
from genesis_callbacks.checkpoint import CheckpointError, SaveFailedError


class LostRankError(RunEndedError):
    """A rank that ends because another one is gone; a job script may start the run again."""

    exit_status = EXIT_STATUS


def is_lost_connection(error: Exception) -> bool:
    """Returns whether a process group failed because a rank was lost; gloo's errors have no class of their own."""
    if isinstance(error, SaveFailedError | CheckpointError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # an exchange of a save or a restore
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
