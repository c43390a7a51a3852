"""What `genesis evaluate` found of a checkpoint, for its card: a table, and the index that the Hub reads."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from genesis.evaluate.results import Result, read_results
from genesis.export.tensors import Source
from genesis.run_directory import RunDirectory
from genesis_callbacks.checkpoint import read_committed_hash

HEADS: Final = ("task", "metric", "value", "shots", "limit", "items")
_VARIANT = re.compile(r"(-\d+shot)*(-limit\d+)?$")
"""What the name of a measured task has behind the task's; it gets columns of its own."""


class Finding(NamedTuple):
    """One number, and how it was come by.

    Args:
        task: Its name, or that of held-out text.
        is_text: Whether it is held-out text.
        is_own: Whether the questions are rows of a folder: under a benchmark's name they need not be the benchmark's.
        metric: Its name.
        value: The number.
        stderr: Its standard error, where one is known.
        num_fewshot: Examples before each question, where that is one number.
        limit: Only so many questions; None for all.
        num_items: Questions, or bytes of text.
        dtype: Of the weights.
    """

    task: str
    is_text: bool
    is_own: bool
    metric: str
    value: float
    stderr: float | None
    num_fewshot: int | None
    limit: int | None
    num_items: int
    dtype: str


def find_results(source: Source) -> list[Finding]:
    """Returns what is filed in the checkpoint's run about just this checkpoint.

    Raises:
        UserError: A file there is no result.
    """
    run = RunDirectory.of(source.path.resolve())
    if run.checkpoints != source.path.resolve().parent:
        return []
    digest = read_committed_hash(source.path)
    results = read_results(run.evaluations)
    return [finding for result in results if result.hash == digest for finding in _read_findings(result)]


def describe_finding(finding: Finding) -> tuple[str, ...]:
    """Returns a row of a table whose heads are `HEADS`."""
    value = f"{finding.value:.4f}" + ("" if finding.stderr is None else f" ± {finding.stderr:.4f}")
    shots, limit = ("" if number is None else f"{number:,}" for number in (finding.num_fewshot, finding.limit))
    task = finding.task + (" (rows of a folder)" if finding.is_own else "")
    return task, finding.metric, value, shots, limit, f"{finding.num_items:,}"


def build_model_index(name: str, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Returns the index of results that the Hub shows beside a model.

    Whole tasks alone, on the data that their names stand for: it cannot show a limit, nor whose rows they were.
    """
    results: list[dict[str, Any]] = [
        {
            "task": {"type": "text-generation", "name": "Text generation"},
            "dataset": {"name": finding.task, "type": finding.task, **_describe_shots(finding.num_fewshot)},
            "metrics": [{"type": finding.metric, "value": finding.value, "args": {"dtype": finding.dtype}}],
        }
        for finding in findings
        if finding.limit is None and not finding.is_text and not finding.is_own
    ]
    return [{"name": name, "results": results}] if results else []


def _describe_shots(number: int | None) -> dict[str, Any]:
    return {} if number is None else {"config": f"{number}-shot", "args": {"num_few_shot": number}}


def _read_findings(result: Result) -> Iterable[Finding]:
    is_text = result.question.get("kind") == "heldout"
    shots = {number or 0 for number in (result.question.get("num_fewshot") or {}).values()}
    for measure in result.measures:
        if measure.value is None or (is_text and measure.metric != "bits_per_byte"):
            continue
        yield Finding(
            f"held-out: {measure.subject}" if is_text else _VARIANT.sub("", measure.subject),
            is_text,
            not is_text and result.question.get("data_hash") is not None,
            measure.metric,
            measure.value,
            measure.stderr,
            min(shots) if len(shots) == 1 else None,
            result.question.get("limit"),
            measure.num_items,
            result.question["dtype"],
        )
