"""The files of evaluation results: plain JSON. This module imports neither torch nor lm-eval.

RUN/evaluations/step-00000150/NAME.json      the result of one question about one checkpoint
                              NAME.jsonl     its items, one per line
RUN/evaluations/metrics.csv                  all results of the run, one row per checkpoint
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_file

METRICS_NAME: Final = "metrics.csv"
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True)
class Measure:
    """One number.

    Args:
        subject: The data: a task, with shots and limit if there are any, or a source of held-out text.
        metric: The metric's name: `acc_norm`, `bits_per_byte`.
        value: The value; None if it is not a number.
        stderr: Standard error of the value; None if it is unknown.
        is_higher_better: Whether higher values are better; None if it is unknown.
        num_items: Number of items in the value: questions, or bytes of text.
    """

    subject: str
    metric: str
    value: float | None
    stderr: float | None
    is_higher_better: bool | None
    num_items: int

    @property
    def key(self) -> str:
        """Returns the name of the measure in logs."""
        return f"evaluation/{self.subject}_{self.metric}"


@dataclass(frozen=True)
class Result:
    """The answer to one question about one checkpoint.

    Args:
        checkpoint: The checkpoint's name.
        step: The checkpoint's step.
        hash: The hash of the checkpoint's manifest, which its commit marker confirms.
        name: The name of the question, and of the file.
        question: Everything else that determines the answer: task or text, version, shots, limit, dtype, hashes.
        measures: The answer.
        versions: Versions of the packages that affect the answer.
        seconds: Duration of the evaluation.
    """

    checkpoint: str
    step: int
    hash: str
    name: str
    question: dict[str, Any]
    measures: tuple[Measure, ...]
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def answers(self, question: dict[str, Any], checkpoint_hash: str) -> bool:
        """Returns whether the result is for exactly this checkpoint and question."""
        return self.hash == checkpoint_hash and self.question == question


def write_result(directory: Path, result: Result, items: Iterable[dict[str, Any]] = ()) -> None:
    """Writes a result and its items into `directory`; each file appears atomically."""
    place = directory / result.checkpoint
    place.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(plain(item), ensure_ascii=False, default=str) + "\n" for item in items]
    if lines:
        replace_file(place / f"{result.name}.jsonl", "".join(lines).encode(), has_rivals=True)
    content = {"schema": SCHEMA_VERSION, **asdict(result)}
    text = json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n"
    replace_file(place / f"{result.name}.json", text.encode(), has_rivals=True)


def read_results(directory: Path) -> list[Result]:
    """Returns all results in `directory`, of a run's `evaluations`, by step, checkpoint and name.

    Raises:
        UserError: A file is not a result, or is of a newer version.
    """
    results = [read_result(path) for path in sorted(directory.glob("*/*.json"))]
    return sorted(results, key=lambda result: (result.step, result.checkpoint, result.name))


def read_result(path: Path) -> Result:
    """Returns the result in the file `path`.

    Raises:
        UserError: The file is not a result, or is of a newer version.
    """
    try:
        content = load_json(read_file(path))
        schema, measures = content.pop("schema"), content.pop("measures")
        if schema > SCHEMA_VERSION:
            raise UserError(f"{path} has schema {schema}, but this version reads {SCHEMA_VERSION}: update genesis")
        return Result(**content, measures=tuple(Measure(**measure) for measure in measures))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not the result of an evaluation ({error}); remove it") from None


def select_comparable(
    results: Sequence[Result], hashes: Mapping[str, str], asked: Sequence[Result] = ()
) -> tuple[list[Result], list[str]]:
    """Returns the results that can be compared with each other, and a line about each kind of other results.

    Results of a checkpoint that was replaced since are left out. Of several results with the same name, those of
    another question are left out: other rows, other settings, another dtype, another lm-eval.

    Args:
        results: All results, by step.
        hashes: Hashes of the existing checkpoints by name; results of removed checkpoints are kept.
        asked: Results whose questions are the reference; for other names, the last result is the reference.
    """
    questions = {result.name: result.question for result in [*results, *asked]}
    lines, comparable = [], []
    for result in results:
        if hashes.get(result.checkpoint, result.hash) != result.hash:
            lines.append(f"{result.checkpoint} was replaced after its evaluation on {result.name}")
        elif result.question != questions[result.name]:
            lines.append(f"{result.checkpoint} has a result of {result.name} with other settings")
        else:
            comparable.append(result)
    return comparable, [f"{line}: left out; run the evaluation again" for line in lines]


def write_metrics(directory: Path, results: Sequence[Result]) -> None:
    """Writes `metrics.csv`: a row for each checkpoint, sorted by step, and a column for each measure."""
    keys = list(dict.fromkeys(measure.key for result in results for measure in result.measures))
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for result in results:
        row = rows.setdefault((result.step, result.checkpoint), {"step": result.step, "checkpoint": result.checkpoint})
        row |= {measure.key: measure.value for measure in result.measures}
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", "checkpoint", *keys])
    writer.writeheader()
    writer.writerows(rows[place] for place in sorted(rows))
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / METRICS_NAME, text.getvalue().encode(), has_rivals=True)


def plain(value: Any) -> Any:
    """Returns `value` with None in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
