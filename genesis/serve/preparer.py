"""Reads requests and encodes their prompts: small ones within the server, larger ones in processes beside it.

What a request costs here follows its number of bytes. A large one would hold the interpreter for a second, and with it
every other client. There is one process for each class of sizes, which takes one request at a time, so that a request
waits for none of a larger class; within a class, clients take turns.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

from genesis.base.errors import UserError
from genesis.base.processes import PipedWorker, serve_pipe
from genesis.serve.errors import ApiError, busy
from genesis.serve.prompt import EncodedPrompt, Facts, encode_prompts
from genesis.serve.repeats import RepeatFilter
from genesis.serve.request import CompletionRequest, parse_chat, parse_completion
from genesis.tokenizer.open import build_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer

SMALL_BYTES: Final = 2**13
"""The largest body that is read within the server, which takes some milliseconds."""
_CLASS_BYTES: Final = (2**18, 2**23)
"""The largest body of each process."""
_MAX_WAITING: Final = 64
"""Requests that may wait for a process; one client may have half of them."""
_MAX_HELD_BYTES: Final = 2**26
"""Bytes of large bodies in memory."""
_JOB_SECONDS: Final = 20.0
_IDLE_SECONDS: Final = 30.0
"""After which a process without work ends: it keeps the memory of its largest request."""
_NICENESS: Final = 5
"""The models and the event loop come first."""


_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A request that a process reads, and encodes if there are facts.

    `facts` has no tokenizer, but the hash of one; `files` are that tokenizer's, if the process has not got them yet.
    """

    body: bytes
    is_chat: bool
    max_texts: int
    facts: Facts | None = None
    tokenizer_hash: str | None = None
    files: Mapping[str, bytes] | None = None


class Preparer:
    """Reads requests and encodes their prompts. All calls must come from the event loop's thread.

    Args:
        max_texts: The largest allowed number of prompts times choices of a request.
    """

    def __init__(self, max_texts: int) -> None:
        self._max_texts = max_texts
        self._lanes = [_Lane(num_bytes) for num_bytes in _CLASS_BYTES]
        self._num_held_bytes = 0

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that counts bytes of a body in memory, until the end of the `with`.

        The function raises an ApiError if too many bytes of large bodies are in memory.
        """
        num_bytes = 0

        def hold(num_more: int) -> None:
            nonlocal num_bytes
            if num_bytes + num_more > SMALL_BYTES and self._num_held_bytes + num_more > _MAX_HELD_BYTES:
                raise busy("too many large requests arrive at the same time: retry a little later")
            num_bytes += num_more
            self._num_held_bytes += num_more

        try:
            yield hold
        finally:
            self._num_held_bytes -= num_bytes

    async def read(self, body: bytes, *, is_chat: bool, client: str) -> CompletionRequest:
        """Returns the request in a body; a large one has no prompts.

        Args:
            body: JSON.
            is_chat: Whether the request is a conversation.
            client: The client's name in the line of turns.

        Raises:
            ApiError: The request is invalid, or too many of its size wait.
        """
        job = Job(body, is_chat, self._max_texts)
        if len(body) <= SMALL_BYTES:
            return _read(job)
        found = await self._find_lane(body).run(client, job, None)
        assert isinstance(found, CompletionRequest)
        return found

    async def encode(self, asked: CompletionRequest, body: bytes, facts: Facts, *, client: str) -> list[EncodedPrompt]:
        """Returns the prompts of a request as tokens.

        Args:
            asked: The request, as `read` returned it.
            body: JSON, as `read` got it.
            facts: The facts about the model.
            client: The client's name in the line of turns.

        Raises:
            ApiError: A prompt does not fit the model, or too many of its size wait.
        """
        if asked.prompts:
            return await asyncio.to_thread(encode_prompts, asked, facts)
        job = Job(body, asked.is_chat, self._max_texts, facts._replace(tokenizer=None))
        found = await self._find_lane(body).run(client, job, facts.tokenizer)
        assert isinstance(found, list)
        return found

    def close(self) -> None:
        """Ends the processes."""
        for lane in self._lanes:
            lane.close()

    def _find_lane(self, body: bytes) -> "_Lane":
        return next(lane for lane in self._lanes if len(body) <= lane.max_bytes)


class _Lane:
    """A process for requests up to a size, and those that wait for it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._line = TurnLine(_MAX_WAITING)
        # Of its own: a job that waited for a thread of the server would spend its time limit there.
        self._thread = ThreadPoolExecutor(1, f"genesis-serve-{max_bytes}")
        self._worker: PipedWorker | None = None
        self._known: set[str] = set()
        self._is_closed = False
        self._retirement: asyncio.TimerHandle | None = None

    async def run(self, client: str, job: Job, tokenizer: Tokenizer | None) -> object:
        """Returns the result of a job."""
        await self._line.enter(client)
        if self._retirement is not None:
            self._retirement.cancel()
        loop = asyncio.get_running_loop()
        # The process goes on with a job whose client has disconnected, and only then takes the next one.
        exchange = loop.run_in_executor(self._thread, self._exchange, job, tokenizer)
        limit = loop.call_later(_JOB_SECONDS, self._end)

        def finish(done: "asyncio.Future[object]") -> None:
            limit.cancel()
            self._line.leave()
            done.exception()  # marks it as retrieved
            self._retirement = loop.call_later(_IDLE_SECONDS, self._retire)

        exchange.add_done_callback(finish)
        found = await asyncio.shield(exchange)
        if isinstance(found, UserError):
            raise found
        return found

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _exchange(self, job: Job, tokenizer: Tokenizer | None) -> object:
        if self._worker is not None and self._worker.process.poll() is not None:  # killed from outside
            self._worker.end()
            self._worker = None
        if self._worker is None:
            self._worker, self._known = PipedWorker(__name__), set()
            if self._is_closed:
                self._end()
        if tokenizer is not None:
            is_known = tokenizer.hash in self._known
            job = job._replace(tokenizer_hash=tokenizer.hash, files=None if is_known else tokenizer.files)
            self._known.add(tokenizer.hash)
        try:
            self._worker.connection.send(job)
            return self._worker.connection.recv()
        except (OSError, EOFError):
            self._worker.end()
            self._worker = None
            return ApiError(
                f"reading the request and its prompts took more than {_JOB_SECONDS:.0f} s, or all memory: shorten it",
                code="request_too_costly",
            )

    def _retire(self) -> None:
        if self._worker is not None and not self._line.is_taken:
            self._worker.end()
            self._worker = None

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.process.kill()


class TurnLine:
    """Lets one holder enter at a time; clients take turns, however many requests each of them has.

    Args:
        max_waiting: How many may wait, and half of them for one client.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # the client whose turn is next is the first
        self.is_taken = False

    async def enter(self, client: str) -> None:
        """Waits for the client's turn.

        Raises:
            ApiError: Too many wait.
        """
        if self.is_taken:
            num_own, limit = len(self._lines.get(client, ())), self._max_waiting
            if num_own >= limit // 2 or sum(map(len, self._lines.values())) >= limit:
                raise busy("too many large requests wait: retry a little later")
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._lines.setdefault(client, deque()).append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self.leave()
                elif future in (line := self._lines.get(client, deque())):
                    line.remove(future)
                    if not line:
                        del self._lines[client]
                raise
        self.is_taken = True

    def leave(self) -> None:
        """Gives the turn to the next client."""
        while self._lines:
            client, line = next(iter(self._lines.items()))
            del self._lines[client]
            future = line.popleft()
            if line:
                self._lines[client] = line  # behind all others
            if not future.done():  # a client that has just gone still stands in the line
                future.set_result(None)
                return
        self.is_taken = False


def _read(job: Job) -> CompletionRequest:
    parse: Callable[[bytes, int], CompletionRequest] = parse_chat if job.is_chat else parse_completion
    return parse(job.body, job.max_texts)


def main(descriptor: int) -> None:
    """Runs jobs from a pipe until the server is gone."""
    os.nice(_NICENESS)
    serve_pipe(descriptor, _serve)


def _serve(connection: "Connection[object, object]") -> None:
    _log.addFilter(RepeatFilter())
    tokenizers: dict[str, Tokenizer] = {}
    while True:
        job = connection.recv()
        assert isinstance(job, Job)
        try:
            found = _run(job, tokenizers)
        except UserError as error:
            found = error
        except Exception:
            _log.exception("a request failed")
            found = ApiError("internal error; see the server's log", status=500, code="server_failed")
        connection.send(found)


def _run(job: Job, tokenizers: dict[str, Tokenizer]) -> object:
    asked = _read(job)
    if job.facts is None:
        return replace(asked, prompts=())  # they are long, and are encoded here
    if job.tokenizer_hash is not None and job.files is not None:
        tokenizers[job.tokenizer_hash] = build_tokenizer(job.files)
    tokenizer = None if job.tokenizer_hash is None else tokenizers[job.tokenizer_hash]
    return encode_prompts(asked, job.facts._replace(tokenizer=tokenizer))
