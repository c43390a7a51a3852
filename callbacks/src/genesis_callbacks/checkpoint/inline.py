"""Runs a save in the training threads of all ranks together; no rank trains meanwhile, so collectives are possible.

The operations are those of `job.perform`, except that receipts reach rank 0 by a collective of the engine's own group.
Rank 0 thus learns immediately that a rank failed or is gone.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from .job import Outcome, RankReceipt, WriteJob, commit_save, error_from, failed_outcome, hold_staging, write_part
from .ranks import Ranks
from .stage import Staged


def begin_together(ranks: Ranks, begin: Callable[[], None]) -> None:
    """Starts the save on rank 0. Communicates once.

    Raises:
        SaveFailedError: Rank 0 could not start the save; every rank raises the error.
    """
    failure = None
    if ranks.is_first:
        try:
            begin()
        except Exception as error:
            failure = failed_outcome(error)
    failure = ranks.broadcast(failure)  # also of None: the other ranks must not write before it
    if failure is not None:
        raise error_from(failure.kind, failure.text)


def perform_together(ranks: Ranks, stage: Callable[[], tuple[WriteJob, Staged]]) -> Outcome:
    """Stages and writes this rank's part and, on rank 0, commits the save. Communicates once.

    Only rank 0 gets the receipts: with a thousand ranks they are many megabytes. The others return the outcome of
    their own part, and get the outcome of the save from rank 0 (`SavePipeline.finish`).

    Raises:
        SaveFailedError: On rank 0: the part of a rank failed, or the commit did.
    """
    begin_seconds = time.monotonic()
    job: WriteJob | None = None
    ours: RankReceipt | Outcome
    try:
        job, staged = stage()
        with hold_staging(job.staging):
            ours = write_part(job, staged)
    # A KeyboardInterrupt is not caught: it ends this process, and its closed connections end the wait of the others.
    except Exception as error:
        ours = failed_outcome(error)
    # A rank that failed takes part, too: without it the others would wait until the group's timeout.
    answers = ranks.gather_first(ours)
    outcome = ours if isinstance(ours, Outcome) else Outcome("written")
    if answers is not None:
        receipts = _check_all(answers)
        assert job is not None
        assert job.commit is not None
        with hold_staging(job.staging):
            outcome = commit_save(job.staging, job.commit, receipts, may_retain=lambda: True)
    return dataclasses.replace(outcome, write_seconds=time.monotonic() - begin_seconds)


def _check_all(answers: Sequence[RankReceipt | Outcome]) -> list[RankReceipt]:
    receipts = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, Outcome):
            raise error_from(answer.kind, answer.text if rank == 0 else f"rank {rank}: {answer.text}")
        receipts.append(answer)
    return receipts
