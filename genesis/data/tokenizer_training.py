"""Trains a tokenizer in a process of its own.

The library holds the interpreter while it trains, for minutes: its process could neither show progress nor answer
Ctrl-C.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from genesis.base.errors import RunEndedError, UserError, numbered
from genesis.base.processes import PipedWorker, serve_pipe
from genesis.base.progress import stage
from genesis.data.sources import SourceOptions, sample_texts
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer

_MODULE: Final = "genesis.data.tokenizer_training"
_REPORT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Sample:
    """The text to train on.

    Args:
        sources: Named sources of text.
        num_bytes: Bytes of text, over all sources by weight.
        seed: Seed of the sample.
    """

    sources: tuple[SourceOptions, ...]
    num_bytes: int
    seed: int


@dataclass(frozen=True)
class _Job:
    sample: Sample
    options: TokenizerOptions
    out: Path


_Message = int | str | UserError | Path
"""Of the worker: the bytes of text that are read so far, a warning, why it failed, or the tokenizer's directory."""


def train_in_worker(
    sample: Sample, options: TokenizerOptions, out: Path, warn: Callable[[str], None] = lambda line: None
) -> Path:
    """Does what `genesis.tokenizer.train.train_tokenizer` does with the texts of a sample, and shows its progress.

    Args:
        sample: The text to train on.
        options: The options of the training.
        out: The tokenizer's directory.
        warn: Receives the warnings about the sources.

    Raises:
        UserError: The sources cannot be read or have no text, or the vocabulary does not fit the text.
        RunEndedError: The worker died.
    """
    worker = PipedWorker(_MODULE, has_group=True)  # the library holds the interpreter for hours
    try:
        worker.connection.send(_Job(sample, options, out))
        with stage("reading text", unit="bytes") as shown:  # how much there is, is not known
            message = _receive(worker, warn)
            while isinstance(message, int) and message > shown.done:
                shown.done = message
                message = _receive(worker, warn)
        with stage(f"training {numbered(options.vocab_size, 'pieces')}"):
            while isinstance(message, int):
                message = _receive(worker, warn)
    finally:
        worker.end()
    if isinstance(message, UserError):
        raise message
    assert isinstance(message, Path)
    return message


def _receive(worker: PipedWorker, warn: Callable[[str], None]) -> _Message:
    """Returns the next message that is not a warning."""
    try:
        while isinstance(message := worker.connection.recv(), str):
            warn(message)
        assert isinstance(message, _Message)
        return message
    except (EOFError, ConnectionResetError):
        raise RunEndedError(
            f"the process that trained the tokenizer ended {worker.describe_end()}: give a smaller sample_bytes if "
            "memory is short"
        ) from None


def main(descriptor: int) -> None:
    """Runs the worker."""
    serve_pipe(descriptor, _serve)


def _serve(connection: "Connection[object, object]") -> None:
    job = connection.recv()
    assert isinstance(job, _Job)
    sample = job.sample
    texts = sample_texts(sample.sources, sample.num_bytes, sample.seed, connection.send)
    try:
        connection.send(train_tokenizer(_reported(texts, connection), job.options, job.out))
    except UserError as error:
        connection.send(UserError(str(error)))


def _reported(texts: Iterable[str], connection: "Connection[object, object]") -> Iterator[str]:
    """Yields the texts and sends how much of them was read; the same number twice is the end."""
    num_bytes = num_sent = 0
    for text in texts:
        yield text
        num_bytes += len(text.encode(errors="replace"))
        if num_bytes - num_sent >= _REPORT_BYTES:
            connection.send(num_bytes)
            num_sent = num_bytes
    connection.send(num_sent)
