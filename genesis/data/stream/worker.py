"""A process that reads and tokenizes for a rank: a job is a lane, a source and a cursor, the result is the block.

The process is a `PipedWorker`. It receives a `Setup` and then `Job`s from its connection, and answers each job, in
order, with a `Made` or a `Failure`. It ends with the connection when its rank is gone. Its state does not affect the
results: any worker builds the same block for the same job.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

from genesis.base.errors import UserError
from genesis.base.processes import serve_pipe
from genesis.data.stream.block import Block, BlockReader, BlockRecipe, Cursor, LanePart
from genesis.tokenizer.open import build_tokenizer


class LaneSource(NamedTuple):
    """One source in one lane."""

    lane: int
    source: int


@dataclass(frozen=True)
class Job:
    """The block of a lane and source that begins at a cursor."""

    key: LaneSource
    cursor: Cursor


@dataclass(frozen=True)
class Setup:
    """Settings of all jobs; `tokenizer_files` is the tokenizer's `files`."""

    tokenizer_files: Mapping[str, bytes]
    recipe: BlockRecipe
    parts: Mapping[LaneSource, LanePart]


@dataclass(frozen=True)
class Made:
    """The block of a job, and the time it took to build."""

    job: Job
    block: Block
    seconds: float


@dataclass(frozen=True)
class Failure:
    """A user's mistake or a shard's damage, in one line."""

    job: Job
    message: str


class BlockMaker:
    """Runs jobs, with a reader for each lane and source."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._tokenizer = build_tokenizer(setup.tokenizer_files)
        self._readers: dict[LaneSource, BlockReader] = {}

    def make(self, job: Job) -> Made | Failure:
        """Returns the block, or the failure."""
        if job.key not in self._readers:
            part = self._setup.parts[job.key]
            self._readers[job.key] = BlockReader(part, self._setup.recipe, self._tokenizer)
        begin_seconds = time.perf_counter()
        try:
            block = self._readers[job.key].read(job.cursor)
            return Made(job, block, time.perf_counter() - begin_seconds)
        except UserError as error:
            return Failure(job, str(error))


def main(descriptor: int) -> None:
    """Serves the connection with the file descriptor `descriptor` until its other end is closed."""
    serve_pipe(descriptor, _serve)


def _serve(connection: "Connection[object, object]") -> None:
    setup = connection.recv()
    assert isinstance(setup, Setup)
    maker = BlockMaker(setup)
    while True:
        job = connection.recv()
        assert isinstance(job, Job)
        connection.send(maker.make(job))
