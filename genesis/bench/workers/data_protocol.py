"""The messages between `genesis bench data` and its readers, and the tokens that all readers read.

    reader    {"versions": {...}}                         when it has read a first time
    parent    go SECONDS                                  read on for so long
    reader    {"tokens": ..., "seconds": ..., "cpu_seconds": ...}
    parent    quit

Readers take turns on one core, and all of them make the same of it: inputs, labels that stop at a document's end, and
the documents' numbers. It needs Python and nothing else: readers of other projects import it in environments of their
own.
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
        tokens_path: All tokens, flat, uint16.
        corpus_path: The same as a corpus.
        directory: Empty, for what the reader's own format takes.
        seq_len: Tokens of a sequence; the label of its last one is read, too.
        micro_batch_size: Sequences of a batch.
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
    """Returns what `ReadTask.to_json` wrote."""
    return ReadTask(**json.loads(text))


def make_ready(rows: Any, eos_id: int) -> tuple[Any, Any, Any]:
    """Returns inputs, labels and document ids of rows of tokens, each a tensor of int64 with a token more than inputs.

    For readers that give rows alone; ours makes the same, and counts tokens and bytes besides.
    """
    inputs, labels = rows[:, :-1], rows[:, 1:].clone()
    is_end = inputs == eos_id
    labels[is_end] = IGNORE_INDEX
    document_ids = is_end.int().cumsum(1)
    return inputs, labels, document_ids - is_end.int()


def serve(batches: Iterator[int], packages: tuple[str, ...]) -> None:
    """Reads in turns until the parent sends `quit`.

    Args:
        batches: Reads a batch and gives the number of its tokens; endless.
        packages: Whose versions the record names.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    next(batches)
    _say({"versions": {package: version(package) for package in packages}})
    for line in sys.stdin:
        word, _, seconds = line.strip().partition(" ")
        if word == "quit":
            return
        _say(asdict(_read(batches, float(seconds))))


def _read(batches: Iterator[int], limit_seconds: float) -> Reading:
    num_tokens = 0
    begin_seconds, begin_cpu_seconds = time.perf_counter(), time.process_time()
    while (elapsed_seconds := time.perf_counter() - begin_seconds) < limit_seconds:
        num_tokens += next(batches)
    return Reading(num_tokens, elapsed_seconds, time.process_time() - begin_cpu_seconds)


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
