"""Follows a run that trains elsewhere: each checkpoint that it commits is evaluated, the newest first."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from genesis.errors import UserError
from genesis.evaluate.answer import Display, Settings, answer_questions
from genesis.evaluate.log import RunLog
from genesis.evaluate.questions import Question
from genesis.evaluate.results import Result, read_results, select_comparable, write_metrics
from genesis.evaluate.table import select_shown
from genesis_callbacks.checkpoint import CheckpointError, list_committed
from genesis_callbacks.checkpoint.manifest import MANIFEST_NAME, read_committed_hash

POLL_SECONDS: Final = 5.0
_FAILED: Final = 2


def watch(
    run: Path,
    questions: Sequence[Question],
    settings: Settings,
    out: Path,
    display: Display,
    until_step: int | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> int:
    """Evaluates every checkpoint that stands in a run and that comes, and returns the exit status.

    The newest is next, so that what is learned is of today even where evaluation is slower than training; older ones
    follow while nothing new comes. One that retention removes before or while it is read is passed over, and one that
    cannot be evaluated, each with a line; the latter makes the status that of a failure.
    """
    done: set[tuple[str, float]] = set()
    last_step, status = -1, 0
    log = RunLog(run)
    try:
        while True:
            there = list_committed(run)
            last_step = max([last_step, *(manifest.step for _, manifest in there)])
            waiting = [item for item in there if (item[0].name, item[1].created_seconds) not in done]
            if waiting:
                path, manifest = waiting[-1]
                done.add((path.name, manifest.created_seconds))
                before = read_results(out)
                try:
                    answers = answer_questions(path, questions, settings, out, display)
                except (UserError, OSError) as error:
                    answers = []
                    status = _FAILED if path.exists() else status
                    reason = f"is passed over: {error}" if path.exists() else "was removed before it was evaluated"
                    print(f"genesis: {path.name} {reason}", file=sys.stderr)
                if results := [answer for answer in answers if answer not in before]:
                    write_metrics(out, select_comparable(read_results(out), read_hashes(run), results)[0])
                    print(_tell(results), flush=True)
                    for line in log.write(manifest, results):
                        print(f"genesis: {line}", file=sys.stderr)
            elif until_step is not None and last_step >= until_step:
                return status
            else:
                time.sleep(poll_seconds)
    finally:
        log.close()


def read_hashes(place: Path) -> dict[str, str]:
    """Returns the hashes of all checkpoints of a run, or of those beside a checkpoint, by name."""
    hashes = {}
    for path, _ in list_committed(place.parent if (place / MANIFEST_NAME).exists() else place):
        with suppress(OSError, CheckpointError):  # retention may remove one at any moment
            hashes[path.name] = read_committed_hash(path)
    return hashes


def _tell(results: Sequence[Result]) -> str:
    """Returns a line that tells a checkpoint's new results."""
    values = [
        f"{measure.subject} {measure.metric} {measure.value:.4f}"
        for _, measure in select_shown(results)
        if measure.value is not None
    ]
    return f"{results[0].checkpoint}: {', '.join(values)}"
