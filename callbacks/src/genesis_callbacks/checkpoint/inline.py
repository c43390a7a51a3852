"""A save that the training threads of all ranks do together: nobody trains meanwhile, so they may talk to one another.

The work is that of `job.perform`. Only the way is another in which rank 0 learns of the others' parts: a collective of
the engine's own group, which knows at once of a rank that failed or is gone.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from .job import Outcome, RankReceipt, WriteJob, commit_save, error_from, failed_outcome, hold_staging, write_part
from .ranks import Ranks
from .stage import Staged


def begin_together(ranks: Ranks, begin: Callable[[], None]) -> None:
    """Lets rank 0 begin the save. Communicates once.

    Raises:
        SaveFailedError: It could not; on every rank alike.
    """
    failure = None
    if ranks.is_first:
        try:
            begin()
        except Exception as error:
            failure = failed_outcome(error)
    failure = ranks.broadcast(failure)
    if failure is not None:
        raise error_from(failure.kind, failure.text)


def perform_together(ranks: Ranks, stage: Callable[[], tuple[WriteJob, Staged]]) -> Outcome:
    """Stages and writes this rank's part and, on rank 0, commits the save. Communicates once.

    Rank 0 alone gets the receipts: with a thousand ranks they are many megabytes. The others return the outcome of
    their own part, and learn that of the save from rank 0 (`SavePipeline.finish`).

    Raises:
        SaveFailedError: On rank 0: some rank's part failed, or the commit did.
    """
    begin_seconds = time.monotonic()
    job: WriteJob | None = None
    ours: RankReceipt | Outcome
    try:
        job, staged = stage()
        with hold_staging(job.staging):
            ours = write_part(job, staged)
    except Exception as error:
        ours = failed_outcome(error)
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
