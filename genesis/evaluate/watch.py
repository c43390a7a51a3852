"""Follows a run that trains elsewhere: each checkpoint that it commits is evaluated, the newest first."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from genesis.base.errors import UserError
from genesis.evaluate.answer import Settings, answer_questions, read_hashes
from genesis.evaluate.log import RunLog
from genesis.evaluate.questions import Question
from genesis.evaluate.results import Result, read_results, select_comparable, write_metrics
from genesis.evaluate.table import select_shown
from genesis_callbacks.checkpoint import list_committed

POLL_SECONDS: Final = 5.0


class Watched(NamedTuple):
    """The number of skipped checkpoints, and of questions that do not apply to a model."""

    num_passed_over: int
    num_unanswered: int


def watch(
    run: Path,
    questions: Sequence[Question],
    settings: Settings,
    out: Path,
    until_step: int | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> Watched:
    """Evaluates every existing and every new checkpoint of a run; returns the numbers of failures.

    The newest checkpoint is always next, so that results are recent even if evaluation is slower than training; older
    checkpoints follow while no new one appears. A checkpoint that retention removes before or during its evaluation is
    skipped with a message, and so is a checkpoint that cannot be evaluated.
    """
    done: set[tuple[str, float]] = set()
    last_step, num_passed_over, num_unanswered = -1, 0, 0
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
                    answers, unanswered = answer_questions(path, questions, settings, out)
                except (UserError, OSError) as error:
                    answers, unanswered = [], []
                    is_there = path.exists()
                    num_passed_over += is_there
                    reason = f"is passed over: {error}" if is_there else "was removed before it was evaluated"
                    print(f"genesis: {path.name} {reason}", file=sys.stderr)
                num_unanswered += len(unanswered)
                for line in unanswered:
                    print(f"genesis: error: {line}", file=sys.stderr)
                if results := [answer for answer in answers if answer not in before]:
                    write_metrics(out, select_comparable(read_results(out), read_hashes(run), results)[0])
                    print(_tell(results), flush=True)
                    for line in log.write(manifest, results):
                        print(f"genesis: {line}", file=sys.stderr)
            elif until_step is not None and last_step >= until_step:
                return Watched(num_passed_over, num_unanswered)
            else:
                time.sleep(poll_seconds)
    finally:
        log.close()


def _tell(results: Sequence[Result]) -> str:
    """Returns a line about a checkpoint's new results."""
    values = [
        f"{measure.subject} {measure.metric} {measure.value:.4f}"
        for _, measure in select_shown(results)
        if measure.value is not None
    ]
    return f"{results[0].checkpoint}: {', '.join(values)}"
