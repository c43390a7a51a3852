"""Prepares results of `genesis evaluate` for the model card: a table, and the index that the Hub reads."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from genesis.base.run_directory import RunDirectory
from genesis.evaluate.results import Result, read_results
from genesis.export.tensors import Source
from genesis_callbacks.base.manifest import read_committed_hash

HEADS: Final = ("task", "metric", "value", "shots", "limit", "items")
_VARIANT = re.compile(r"(-\d+shot)*(-limit\d+)?$")
"""The suffix of a result's task name, with shots and limit, which get columns of their own."""


class Finding(NamedTuple):
    """One value of a result, with the settings that led to it.

    Args:
        task: The name of the task, or of the held-out text.
        is_text: Whether the data are held-out text.
        is_own: Whether the questions are a user's rows, which may differ from the benchmark of the same name.
        metric: The metric's name.
        value: The value.
        stderr: The value's standard error; None if it is unknown.
        num_fewshot: Examples before each question; None if tasks differ.
        limit: Number of questions; None for all.
        num_items: Number of questions, or of bytes of text.
        dtype: The type of the weights.
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
    """Returns the results in the checkpoint's run that are for exactly this checkpoint.

    Raises:
        UserError: A file in the run's evaluations is not a result.
    """
    run = RunDirectory.of(source.path.resolve())
    if run.checkpoints != source.path.resolve().parent:
        return []
    digest = read_committed_hash(source.path)
    results = read_results(run.evaluations)
    return [finding for result in results if result.hash == digest for finding in _read_findings(result)]


def describe_finding(finding: Finding) -> tuple[str, ...]:
    """Returns a row of the table with the columns `HEADS`."""
    value = f"{finding.value:.4f}" + ("" if finding.stderr is None else f" ± {finding.stderr:.4f}")
    shots, limit = ("" if number is None else f"{number:,}" for number in (finding.num_fewshot, finding.limit))
    task = finding.task + (" (rows of a folder)" if finding.is_own else "")
    return task, finding.metric, value, shots, limit, f"{finding.num_items:,}"


def build_model_index(name: str, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Returns the index of results that the Hub shows next to a model.

    It contains only whole tasks on the original data, because the index cannot express limits or a user's own rows.
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
