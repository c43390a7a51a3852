"""The messages between the benchmark `data` and its readers, and the tokens that all readers read.

    reader    {"versions": {...}}                         after its first batch
    parent    go SECONDS                                  read for this time
    reader    {"tokens": ..., "seconds": ..., "cpu_seconds": ...}
    parent    quit

Readers take turns on one core, and all build the same tensors from the tokens: inputs, labels that end with each
document, and document ids. This module imports only the standard library at its top level, because readers of other
projects import it in their own environments.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

IGNORE_INDEX = -100


@dataclass(frozen=True)
class ReadTask:
    """The task of a reader.

    Args:
        tokens_path: A flat uint16 file of all tokens.
        corpus_path: A corpus of the same tokens.
        directory: An empty directory, for files in the reader's own format.
        seq_len: Tokens per sequence; a reader also reads the label of the last token.
        micro_batch_size: Sequences per batch.
        eos_id: The token that ends a document.
    """

    tokens_path: str
    corpus_path: str
    directory: str
    seq_len: int
    micro_batch_size: int
    eos_id: int

    def to_json(self) -> str:
        """Returns the one line that `task_from_json` reads."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Reading:
    """A reader's measurements in one turn."""

    tokens: int
    seconds: float
    cpu_seconds: float


def task_from_json(text: str) -> ReadTask:
    """Returns the task that `ReadTask.to_json` wrote."""
    return ReadTask(**json.loads(text))


def make_ready(rows: Any, eos_id: int) -> tuple[Any, Any, Any]:
    """Returns inputs, labels and document ids of rows of tokens, each a tensor of int64 with a token more than inputs.

    Readers that only return rows call this function. Our reader builds the same tensors, and also counts tokens and
    bytes.
    """
    inputs, labels = rows[:, :-1], rows[:, 1:].clone()
    is_end = inputs == eos_id
    labels[is_end] = IGNORE_INDEX
    document_ids = is_end.int().cumsum(1)
    return inputs, labels, document_ids - is_end.int()


def serve(batches: Iterator[int], packages: tuple[str, ...]) -> None:
    """Reads in turns until the parent sends `quit`.

    Args:
        batches: Reads one batch per item and yields its number of tokens, without end.
        packages: The packages whose versions the record lists.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    next(batches)
    _send({"versions": {package: version(package) for package in packages}})
    for line in sys.stdin:
        word, _, seconds = line.strip().partition(" ")
        if word == "quit":
            return
        _send(asdict(_read(batches, float(seconds))))


def _read(batches: Iterator[int], limit_seconds: float) -> Reading:
    num_tokens = 0
    begin_seconds, begin_cpu_seconds = time.perf_counter(), time.process_time()
    while (elapsed_seconds := time.perf_counter() - begin_seconds) < limit_seconds:
        num_tokens += next(batches)
    return Reading(num_tokens, elapsed_seconds, time.process_time() - begin_cpu_seconds)


def _send(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
