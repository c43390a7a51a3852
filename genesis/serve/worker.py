"""A loaded model and the thread that runs it: texts can join and leave the batch between steps.

The event loop's thread calls `submit`, `cancel` and `stop`, and also receives the results. Only the worker's own thread
touches the model, so that the model needs no lock.
"""

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from genesis.base.device import is_out_of_memory
from genesis.base.errors import UserError
from genesis.generate.batch import Batch, NewToken, OutOfMemoryError, Request
from genesis.generate.load import Loaded
from genesis.generate.prefix_store import PrefixStore
from genesis.generate.prompt_scores import ScoredToken, score_prompt
from genesis.model.decoder import Decoder
from genesis.model.scores import score_text
from genesis.serve.errors import ApiError, out_of_memory, stopping
from genesis.serve.prompt import Facts
from genesis.serve.turns import Turns

_log = logging.getLogger(__name__)

_JOINING_TOKENS = 2048
"""Tokens of prompts after which no further text joins a step, so that long prompts of one client do not delay those of
others, and running texts, by more than one of them."""


class TextScore(NamedTuple):
    """The score that a reward model gives to a text."""

    value: float


class PromptScores(NamedTuple):
    """The tokens of a prompt with their log-probabilities; `is_last` if no new token follows."""

    tokens: list[ScoredToken]
    is_last: bool


Result = NewToken | PromptScores | TextScore | UserError


@dataclass(eq=False)
class Ticket:
    """One submitted text.

    `receive` is called with the scores of its prompt, if they are asked for, with each of its tokens, or with the error
    that ended it.
    """

    request: Request
    receive: Callable[[Result], None]
    client: str
    num_prompt_logprobs: int | None = None
    is_cancelled: bool = False


class Worker:
    """Loads a model in a thread of its own, then continues up to `num_rows` texts together.

    Args:
        load: Loads the model; called in the worker's thread.
        num_rows: Maximum number of texts in the batch. Of those that wait, the next one is that of the client with the
            fewest rows.
        prefix_bytes: Bytes of computed beginnings of prompts that are kept; 0 to keep none.
        before: A stopped worker whose memory must be freed before this worker loads its model.
    """

    def __init__(
        self, load: Callable[[], Loaded], num_rows: int, prefix_bytes: int = 0, before: "Worker | None" = None
    ) -> None:
        self._load, self._num_rows, self._before = load, num_rows, before
        self._prefix_bytes = prefix_bytes
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._waiting: Turns[Ticket] = Turns()
        self._unscored: Turns[Ticket] = Turns()
        self._live: dict[int, Ticket] = {}
        self._is_stopped = False
        self._reason: UserError = stopping()
        self.loaded: asyncio.Future[Facts] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="genesis-serve-worker")
        self._thread.start()

    @property
    def num_busy(self) -> int:
        """The number of rows that hold a text."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """The number of texts that have no row yet."""
        return len(self._waiting) + len(self._unscored)

    @property
    def has_ended(self) -> bool:
        """Whether the worker no longer accepts texts, because it was stopped or has failed."""
        return self._is_stopped

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive and may still hold the model's memory."""
        return self._thread.is_alive()

    def submit(
        self,
        request: Request,
        receive: Callable[[Result], None],
        client: str,
        num_prompt_logprobs: int | None = None,
    ) -> Ticket:
        """Queues a text; `receive` is called in the event loop's thread.

        Args:
            request: The text to continue; if only its prompt is scored, it may ask for no new tokens.
            receive: Called with each result.
            client: The client's name in the line of turns.
            num_prompt_logprobs: The number of alternatives for each token of the prompt; None to return no scores of
                the prompt.
        """
        ticket = Ticket(request, receive, client, num_prompt_logprobs)
        with self._changed:
            if self._is_stopped:
                raise self._reason
            self._waiting.add(client, ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a text; its `receive` is not called any more."""
        with self._changed:
            ticket.is_cancelled = True
            self._waiting.remove(ticket.client, ticket)
            self._unscored.remove(ticket.client, ticket)
            self._changed.notify()

    def stop(self) -> None:
        """Stops the worker; its thread ends after the current step or load."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._fail_loading(stopping())

    def join(self) -> None:
        """Waits until the thread has ended and the model's memory is free."""
        self._thread.join()

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        if self._is_stopped:
            return
        try:
            loaded = self._load()
            _check_is_finite(loaded)
            chat_template, stop_ids = loaded.chat_template, loaded.stop_ids
            has_scores = loaded.decoder.config.num_scores is not None
            if has_scores:  # texts are scored one by one
                batch = Batch(loaded.decoder, self._num_rows, stop_ids, has_cache=False)
            else:
                store = PrefixStore(self._prefix_bytes) if self._prefix_bytes else None
                batch = Batch(loaded.decoder, self._num_rows, stop_ids, has_blocks=True, store=store)
        except Exception as error:
            self._reason = error if isinstance(error, UserError) else self._explain(error)
            self._is_stopped = True
            self._post(self._fail_loading, self._reason)
            return
        config = loaded.decoder.config
        weights_bytes = sum(parameter.nbytes for parameter in loaded.decoder.parameters())
        facts = Facts(
            loaded.tokenizer,
            config.max_seq_len,
            config.vocab_size,
            weights_bytes,
            shared_bytes=loaded.shared_bytes,
            chat_template=chat_template,
            stop_ids=stop_ids,
            has_scores=has_scores,
        )
        self._post(self._finish_loading, facts)
        decoder = loaded.decoder
        del loaded
        try:
            while self._admit(batch):
                self._score_next(decoder)
                results: list[tuple[Ticket, Result]] = []
                for token in _step(batch):
                    ticket = self._live.pop(token.request) if token.is_last else self._live[token.request]
                    results.append((ticket, token))
                self._post(self._deliver, results)
            self._end(stopping())
        except Exception as error:
            self._end(self._explain(error))

    def _admit(self, batch: Batch) -> bool:
        """Updates the batch and waits until it holds a text. Returns False once the worker is stopped."""
        with self._changed:
            while not self._is_stopped:
                for handle in [handle for handle, ticket in self._live.items() if ticket.is_cancelled]:
                    batch.remove(handle)
                    del self._live[handle]
                num_tokens = 0
                while self._waiting and batch.num_free and num_tokens < _JOINING_TOKENS:
                    next_ = self._waiting.take(Counter(ticket.client for ticket in self._live.values()))
                    num_tokens += len(next_.request.prompt)
                    self._add(batch, next_)
                if self._live or self._unscored:
                    return True
                if not self._waiting:  # else the texts of this turn were all refused, and the next ones have theirs
                    self._changed.wait()
        return False

    def _add(self, batch: Batch, ticket: Ticket) -> None:
        if ticket.num_prompt_logprobs is not None:
            self._unscored.add(ticket.client, ticket)
            return
        try:
            self._live[batch.add(ticket.request)] = ticket
        except (UserError, MemoryError, RuntimeError) as error:
            self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """Sends the error of one text; one that is not about the text is raised again."""
        if isinstance(error, UserError):
            self._post(self._deliver, [(ticket, error)])
        elif is_out_of_memory(error):
            self._post(self._deliver, [(ticket, out_of_memory())])
        else:
            raise error

    def _score_next(self, decoder: Decoder) -> None:
        """Scores one waiting prompt; only one per step, so that running texts do not wait for all prompts."""
        with self._changed:
            ticket = self._unscored.take() if self._unscored else None
        if ticket is None:
            return
        assert ticket.num_prompt_logprobs is not None
        prompt, result = ticket.request.prompt, None
        try:
            if decoder.config.num_scores is not None:
                result = TextScore(score_text(decoder, prompt))
            else:
                tokens = score_prompt(decoder, prompt, ticket.num_prompt_logprobs)
        except (MemoryError, RuntimeError) as error:
            self._refuse(ticket, error)
            return
        if result is not None:
            self._post(self._deliver, [(ticket, result)])
            return
        is_last = ticket.request.max_new_tokens == 0
        if not is_last:
            ticket.num_prompt_logprobs = None
            with self._changed:
                if not ticket.is_cancelled:
                    self._waiting.put_first(ticket.client, ticket)
        self._post(self._deliver, [(ticket, PromptScores(tokens, is_last))])

    def _end(self, error: UserError) -> None:
        with self._changed:
            self._is_stopped, self._reason = True, error
            tickets = [*self._live.values(), *self._unscored, *self._waiting]
            self._live.clear()
            self._unscored.clear()
            self._waiting.clear()
        self._post(self._deliver, [(ticket, error) for ticket in tickets])

    def _explain(self, error: Exception) -> ApiError:
        """Returns the error for clients; the server's log gets the traceback, which contains no prompt."""
        if is_out_of_memory(error):
            _log.error("a model ended: the memory is not enough for it")
            return out_of_memory()
        _log.error("a model failed", exc_info=error)
        return ApiError(f"the model failed: {type(error).__name__}", status=500, code="model_failed")

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Calls `call` in the event loop's thread."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed, so that no client is connected any more
            return

    def _finish_loading(self, facts: Facts) -> None:
        if not self.loaded.done():
            self.loaded.set_result(facts)

    def _fail_loading(self, error: UserError) -> None:
        if not self.loaded.done():
            self.loaded.set_exception(error)
            self.loaded.exception()  # marks it as retrieved: the client that asked for it may have disconnected

    @staticmethod
    def _deliver(results: list[tuple[Ticket, Result]]) -> None:
        for ticket, result in results:
            if not ticket.is_cancelled:
                ticket.receive(_check(result))


def _check_is_finite(loaded: Loaded) -> None:
    """Checks that all weights are finite: sampling one row that is not finite would fail for the whole batch."""
    # One number for all weights, so that the host waits for the device once.
    are_finite = torch.stack([parameter.isfinite().all() for parameter in loaded.decoder.parameters()])
    if not bool(are_finite.all()):
        raise ApiError(
            f"{loaded.checkpoint} has weights that are not finite, training diverged: request an earlier checkpoint",
            status=500,
            code="model_diverged",
        )


def _step(batch: Batch) -> list[NewToken]:
    """Returns the next tokens; if the memory is not enough for them, all texts fail, and the model goes on."""
    try:
        return batch.step()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    return batch.fail()  # behind the handler, which keeps the tensors of the failed forward


def _check(result: Result) -> Result:
    if isinstance(result, NewToken) and isinstance(result.failure, OutOfMemoryError):
        return out_of_memory()
    if isinstance(result, NewToken) and result.failure is not None:
        return ApiError(f"the grammar of the request {result.failure}", code="grammar_failed")
    log_probs: list[float | None] = []
    if isinstance(result, NewToken):
        log_probs = [result.log_prob]
    elif isinstance(result, PromptScores):
        log_probs = [token.log_prob for token in result.tokens]
    elif isinstance(result, TextScore):
        log_probs = [result.value]
    if not all(log_prob is None or math.isfinite(log_prob) for log_prob in log_probs):
        return ApiError(
            "what the model computes is not finite, its weights have diverged: request an earlier checkpoint",
            status=500,
            code="model_diverged",
        )
    return result
