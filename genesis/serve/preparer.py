"""Reads requests and encodes their prompts in processes beside the server.

What a request costs here follows its number of bytes: a large one would hold the interpreter for a second, and with it
every other client. There is one process for each class of sizes, which takes one request at a time, so that a request
waits for none of a larger class; within a class, clients take turns. Small bodies are read within the server, but their
texts are encoded in a process, too, if the tokenizer has unknown expressions, which may take minutes for a kilobyte.
"""

import asyncio
import functools
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

from genesis.base.available_memory import give_back_memory
from genesis.base.errors import RunEndedError, UserError, numbered
from genesis.base.limited_workers import LimitedWorkers, LimitReachedError, serve_limited
from genesis.chat.tools import find_form
from genesis.generate.grammar import MAX_GRAMMAR_CHARS, TokenGrammar, compile_grammar
from genesis.serve.connections import MAX_CONNECTIONS
from genesis.serve.errors import ApiError, busy, stopping
from genesis.serve.forced_calls import write_choice
from genesis.serve.prompt import EncodedPrompt, Facts, encode_prompts, write_prompts
from genesis.serve.repeats import RepeatFilter
from genesis.serve.request import CompletionRequest, parse_chat, parse_completion, parse_score
from genesis.serve.turns import Turns
from genesis.tokenizer.open import build_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer

SMALL_BYTES: Final = 2**13
"""The largest body that is read within the server, which takes some milliseconds."""
MAX_BODY_BYTES: Final = 2**22
_MAX_WAITING: Final = 64
"""Large requests that may wait for a process; one client may have half of them."""
_MAX_HELD_BYTES: Final = 2**26
"""Bytes of large bodies in memory."""
_SMALL_SECONDS: Final = 1.0
"""Processor time for a small request, whose encoding takes about a millisecond."""
_JOB_SECONDS: Final = 20.0
"""The same for a large one, and for opening a tokenizer; a request of any size waits no longer for its process."""
_MEMORY_BYTES: Final = 2**32
_GRAMMAR_SECONDS: Final = 1.0
"""Processor time to compile a grammar, which takes some milliseconds."""
_GRAMMAR_BYTES: Final = 2**29
_IDLE_SECONDS: Final = 30.0
"""After which a process of large requests ends: it keeps the memory of its largest one."""
_NICENESS: Final = 5
"""The models and the event loop come before large requests."""


_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A request that a process reads, if it is still a body, and encodes, if there are facts.

    `facts` has no tokenizer, but the hash of one, whose files the process has got. With a `grammar`, the process only
    tries to compile it.
    """

    asked: bytes | CompletionRequest
    is_chat: bool
    max_texts: int
    facts: Facts | None = None
    tokenizer_hash: str | None = None
    grammar: str | None = None
    is_score: bool = False


class Preparer:
    """Reads requests and encodes their prompts. All calls must come from the event loop's thread.

    Args:
        max_texts: The largest allowed number of prompts times choices of a request.
    """

    def __init__(self, max_texts: int) -> None:
        self._max_texts = max_texts
        self._lanes = [
            _Lane(SMALL_BYTES, _SMALL_SECONDS, MAX_CONNECTIONS, None),
            _Lane(2**18, _JOB_SECONDS, _MAX_WAITING, _IDLE_SECONDS),
            _Lane(MAX_BODY_BYTES, _JOB_SECONDS, _MAX_WAITING, _IDLE_SECONDS),
        ]
        self._grammar_lane = _Lane(0, _GRAMMAR_SECONDS, _MAX_WAITING, _IDLE_SECONDS, _GRAMMAR_BYTES)
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

    async def read(self, body: bytes, *, is_chat: bool, client: str, is_score: bool = False) -> CompletionRequest:
        """Returns the request in a body; a large one has no prompts.

        Args:
            body: JSON.
            is_chat: Whether the request is a conversation.
            client: The client's name in the line of turns.
            is_score: Whether whole conversations are scored.

        Raises:
            ApiError: The request is invalid, or too many of its size wait.
        """
        job = Job(body, is_chat, self._max_texts, is_score=is_score)
        if len(body) <= SMALL_BYTES:
            return _read(job)
        found = await self._find_lane(len(body)).run(client, job, None)
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
        plain, num_bytes = facts._replace(tokenizer=None), len(body)
        job = Job(body, asked.is_chat, self._max_texts, plain, is_score=asked.is_score)
        if asked.prompts:
            if asked.is_chat:  # several templates are rendered at a time: an endless one delays no other
                asked = await asyncio.to_thread(write_prompts, asked, facts)
                num_bytes = max(num_bytes, sum(len(text) for text in asked.prompts if isinstance(text, str)))
            if facts.tokenizer is None or not (facts.tokenizer.has_unknown_expressions or num_bytes > SMALL_BYTES):
                return await asyncio.to_thread(encode_prompts, asked, facts)
            job = job._replace(asked=asked)
        found = await self._find_lane(num_bytes).run(client, job, facts.tokenizer)
        assert isinstance(found, list)
        return found

    async def compile(self, asked: CompletionRequest, facts: Facts, *, client: str) -> TokenGrammar | None:
        """Returns what the texts of a request must follow; None for any text.

        A process tries the grammar first: what takes too much there is refused.

        Args:
            asked: The request.
            facts: The facts about the model.
            client: The client's name in the line of turns.

        Raises:
            ApiError: The grammar is invalid or takes too much work, or too many wait.
        """
        grammar = asked.grammar
        if asked.must_call:
            form = find_form(facts.chat_template)
            grammar = await asyncio.to_thread(write_choice, form, asked.tools, facts.tokenizer)
        if grammar is None:
            return None
        if facts.tokenizer is None:
            raise ApiError(
                f"{asked.grammar_field} is not supported by this model, which has no tokenizer: remove it",
                param=asked.grammar_field,
            )
        if len(grammar) > MAX_GRAMMAR_CHARS:  # that of many tools
            raise ApiError(
                f"tool_choice asks for a grammar of {numbered(len(grammar), 'characters')}, and {MAX_GRAMMAR_CHARS:,} "
                'are the most: name one tool, or set it to "auto"',
                param="tool_choice",
            )
        job = Job(asked, asked.is_chat, self._max_texts, facts._replace(tokenizer=None), grammar=grammar)
        await self._grammar_lane.run(client, job._replace(asked=replace(asked, prompts=())), facts.tokenizer)
        return await asyncio.to_thread(_compile, grammar, facts, asked.grammar_field)

    def close(self) -> None:
        """Ends the processes."""
        for lane in (*self._lanes, self._grammar_lane):
            lane.close()

    def _find_lane(self, num_bytes: int) -> "_Lane":
        return next((lane for lane in self._lanes if num_bytes <= lane.max_bytes), self._lanes[-1])


class _Lane:
    """A process for requests up to a size, and those that wait for it."""

    def __init__(
        self,
        max_bytes: int,
        seconds: float,
        max_waiting: int,
        idle_seconds: float | None,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        self.max_bytes, self._seconds, self._idle_seconds = max_bytes, seconds, idle_seconds
        self._memory_bytes = memory_bytes
        self._line = TurnLine(max_waiting)
        # Of its own: a job that waited for a thread of the server would spend its time limit there.
        self._thread = ThreadPoolExecutor(1, f"genesis-serve-{max_bytes}")
        self.workers = LimitedWorkers(__name__, 1)
        self._retirement: asyncio.TimerHandle | None = None

    async def run(self, client: str, job: Job, tokenizer: Tokenizer | None) -> object:
        """Returns the result of a job."""
        await self._line.enter(client)
        if self._retirement is not None:
            self._retirement.cancel()
        loop = asyncio.get_running_loop()
        # The process goes on with a job whose client has disconnected, and only then takes the next one.
        exchange = loop.run_in_executor(self._thread, self._exchange, job, tokenizer)

        def finish(done: "asyncio.Future[object]") -> None:
            self._line.leave()
            done.exception()  # marks it as retrieved
            if self._idle_seconds is not None:
                self._retirement = loop.call_later(self._idle_seconds, self._retire)

        exchange.add_done_callback(finish)
        found = await asyncio.shield(exchange)
        if isinstance(found, UserError):
            raise found
        return found

    def _retire(self) -> None:
        self.workers.end_idle()
        give_back_memory()

    def close(self) -> None:
        self.workers.end()
        self._thread.shutdown(wait=False)

    def _exchange(self, job: Job, tokenizer: Tokenizer | None) -> object:
        try:
            if tokenizer is None:
                return self._ask(job, self._seconds)
            job = job._replace(tokenizer_hash=tokenizer.hash)
            found = self._ask(job, self._seconds)
            if found is None:  # the process has just started
                self._ask((tokenizer.hash, tokenizer.files), _JOB_SECONDS)
                if job.grammar is not None:  # the first one spells out the vocabulary
                    self._ask(job._replace(grammar='start: "a"'), _JOB_SECONDS)
                found = self._ask(job, self._seconds)
            return found
        except LimitReachedError as error:
            if job.grammar is not None:
                field = job.asked.grammar_field if isinstance(job.asked, CompletionRequest) else None
                return ApiError(f"{field} {error} to compile: simplify it", param=field, code="request_too_costly")
            return ApiError(f"reading the request and its prompts {error}: shorten it", code="request_too_costly")
        except RunEndedError:
            return stopping()

    def _ask(self, message: object, seconds: float) -> object:
        return pickle.loads(self.workers.ask(pickle.dumps(message), seconds, self._memory_bytes, _JOB_SECONDS))


class TurnLine:
    """Lets one holder enter at a time; clients take turns, however many requests each of them has.

    Args:
        max_waiting: How many may wait, and half of them for one client.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self.is_taken = False

    async def enter(self, client: str) -> None:
        """Waits for the client's turn.

        Raises:
            ApiError: Too many wait.
        """
        if self.is_taken:
            if self._waiting.count(client) >= self._max_waiting // 2 or len(self._waiting) >= self._max_waiting:
                raise busy("too many large requests wait: retry a little later")
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(client, future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self.leave()
                else:
                    self._waiting.remove(client, future)
                raise
        self.is_taken = True

    def leave(self) -> None:
        """Gives the turn to the next client."""
        while self._waiting:
            future = self._waiting.take()
            if not future.done():  # a client that has just gone still stands in the line
                future.set_result(None)
                return
        self.is_taken = False


def _compile(grammar: str, facts: Facts, field: str | None) -> TokenGrammar:
    assert facts.tokenizer is not None
    try:
        return compile_grammar(grammar, facts.tokenizer, facts.vocab_size, facts.stop_ids)
    except UserError as error:
        raise ApiError(f"{field} {error}", param=field) from None


def _read(job: Job) -> CompletionRequest:
    if isinstance(job.asked, CompletionRequest):
        return job.asked
    if job.is_score:
        return parse_score(job.asked)
    return (parse_chat if job.is_chat else parse_completion)(job.asked, job.max_texts)


# ---- in the process


def main(descriptor: int) -> None:
    """Runs jobs from a pipe until the server is gone."""
    _log.addFilter(RepeatFilter())
    serve_limited(descriptor, _answer)


_tokenizers: dict[str, Tokenizer] = {}


def _answer(message: bytes) -> bytes:
    job: Job | tuple[str, Mapping[str, bytes]] = pickle.loads(message)
    try:
        found = _run(job) if isinstance(job, Job) else _open(*job)
    except UserError as error:
        found = error
    except MemoryError:
        raise
    except Exception:
        _log.exception("a request failed")
        found = ApiError("internal error; see the server's log", status=500, code="server_failed")
    return pickle.dumps(found)


def _open(tokenizer_hash: str, files: Mapping[str, bytes]) -> object:
    _tokenizers[tokenizer_hash] = build_tokenizer(files)
    return None


@functools.cache
def _give_way() -> None:
    """Lets the server come first, whatever its own priority is."""
    os.nice(_NICENESS)


def _run(job: Job) -> object:
    """Returns the prompts, the request, or None if the process lacks the tokenizer."""
    if isinstance(job.asked, bytes) or sum(len(one) for one in job.asked.prompts if isinstance(one, str)) > SMALL_BYTES:
        _give_way()
    if job.tokenizer_hash is not None and job.tokenizer_hash not in _tokenizers:
        return None
    if job.grammar is not None:
        assert job.facts is not None
        assert job.tokenizer_hash is not None
        assert isinstance(job.asked, CompletionRequest)
        _compile(job.grammar, job.facts._replace(tokenizer=_tokenizers[job.tokenizer_hash]), job.asked.grammar_field)
        return []
    asked = _read(job)
    if job.facts is None:
        return replace(asked, prompts=())  # they are long, and are encoded here
    tokenizer = None if job.tokenizer_hash is None else _tokenizers[job.tokenizer_hash]
    facts = job.facts._replace(tokenizer=tokenizer)
    return encode_prompts(write_prompts(asked, facts), facts)
