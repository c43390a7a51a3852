"""One completion request: runs its texts on a worker, and builds the response from their tokens."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from genesis.base.errors import UserError
from genesis.chat.harmony import HarmonyReader
from genesis.chat.tools import HARMONY, ToolReader, find_form, find_symbols
from genesis.generate.batch import NewToken, Request
from genesis.generate.grammar import TokenGrammar
from genesis.generate.stream import derive_seed
from genesis.serve.choice import Choice, Shown, show_prompt
from genesis.serve.errors import ApiError
from genesis.serve.form import ChatForm, Form, Part, TextForm
from genesis.serve.prompt import EncodedPrompt, Facts
from genesis.serve.request import CompletionRequest
from genesis.serve.worker import PromptScores, Result, TextScore, Ticket, Worker

_END = b"data: [DONE]\n\n"


class Completion:
    """The texts of one request, as a context manager: leaving it cancels the texts and frees their rows in the batch.

    Args:
        asked: The request.
        model: The id of the model that answers.
        worker: The worker that holds the model.
        facts: The facts about the model.
        prompts: The request's prompts.
        client: The client's name in the line of turns.
        grammar: What each text must follow, at its beginning; None for any text.
        scope: Requests of another scope do not use the same computed beginnings of prompts.
    """

    def __init__(
        self,
        asked: CompletionRequest,
        model: str,
        worker: Worker,
        facts: Facts,
        prompts: Sequence[EncodedPrompt],
        client: str,
        grammar: TokenGrammar | None = None,
        scope: str = "",
    ) -> None:
        self._asked, self._worker, self._prompts, self._client = asked, worker, prompts, client
        texts = [prompt for prompt in prompts for _ in range(asked.num_choices)]
        repeated = [prompt.text if asked.has_echo else "" for prompt in texts]
        form = find_form(facts.chat_template)
        has_reader = asked.is_chat and (bool(asked.tools) or form is HARMONY)
        spelled = find_symbols(form, facts.tokenizer) if has_reader else {}
        self._choices = [
            Choice(facts.tokenizer, asked.stop, len(text), stop_ids=facts.stop_ids, spelled=spelled)
            for text in repeated
        ]
        # The worker returns a prompt with log-probabilities as the first part of the text.
        self._num_prompt_logprobs = asked.num_top_logprobs if asked.has_echo else None
        self._echoes = [""] * len(texts) if self._num_prompt_logprobs is not None else repeated
        self._texts, self._tokenizer = texts, facts.tokenizer
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        self._requests = [
            Request(
                prompt=prompt.ids,
                max_new_tokens=prompt.max_new_tokens,
                sampling=asked.sampling,
                seed=derive_seed(seed, prompt.ids, index % asked.num_choices),
                num_top_logprobs=asked.num_top_logprobs or 0,
                grammar=None if grammar is None else grammar.copy(),
                scope=scope,
            )
            for index, prompt in enumerate(texts)
        ]
        called = texts if has_reader else []
        how = {"has_one_call": asked.has_one_call, "is_stream": asked.is_stream}
        readers = [
            HarmonyReader(asked.tools, is_stream=asked.is_stream)
            if form is HARMONY
            else ToolReader(form, asked.tools, **how)
            for _ in called
        ]
        # Those of the form may get a whole answer at once; these see when its first call has ended.
        watched = called if asked.has_one_call and form is not HARMONY else []  # an answer has one call there
        self._watchers = [ToolReader(form, asked.tools) for _ in watched]
        self._form: Form = (
            ChatForm(asked.num_top_logprobs, readers)
            if asked.is_chat
            else TextForm(has_log_probs=asked.num_top_logprobs is not None, has_ids=asked.has_ids)
        )
        self._head = {
            "id": f"{self._form.id_prefix}-{secrets.token_hex(12)}",
            "object": self._form.kind(is_stream=asked.is_stream),
            "created": int(time.time()),
            "model": model,
        }
        self._num_stored = 0
        self._tickets: list[Ticket] = []
        # Bounded by the request's number of tokens, even if a slow client leaves all of its tokens here.
        self._results: asyncio.Queue[tuple[int, Result]] = asyncio.Queue()

    def __enter__(self) -> Self:
        for index, request in enumerate(self._requests):
            receive = partial(self._receive, index)
            self._tickets.append(self._worker.submit(request, receive, self._client, self._num_prompt_logprobs))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    async def collect(self) -> dict[str, Any]:
        """Returns the response once all texts have ended."""
        parts: list[list[Part]] = [[] for _ in self._choices]
        async for part in self._parts():
            parts[part.choice].append(part)
        choices = [self._form.whole(_join(of_one), echo) for of_one, echo in zip(parts, self._echoes, strict=True)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the response in parts, as server-sent events."""
        usage = {"usage": None} if self._asked.has_usage else {}
        for index, echo in enumerate(self._echoes):
            opening = self._form.opening(index, echo)
            if opening is not None:
                yield _event({**self._head, **usage, "choices": [opening]})
        async for part in self._parts():
            piece = self._form.piece(part)
            if piece is not None:
                yield _event({**self._head, **usage, "choices": [piece]})
        if self._asked.has_usage:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield _END

    def _receive(self, index: int, result: Result) -> None:
        self._results.put_nowait((index, result))

    async def _parts(self) -> AsyncIterator[Part]:
        """Yields the new part of each text; several tokens that have arrived together become one part."""
        while any(choice.finish_reason is None for choice in self._choices):
            results = [await self._results.get()]
            while not self._results.empty():
                results.append(self._results.get_nowait())
            by_index: dict[int, list[Part]] = {}
            for index, result in results:
                if isinstance(result, UserError):
                    raise result
                if self._choices[index].finish_reason is None:
                    assert not isinstance(result, TextScore), "of a reward model, which `check_can_answer` refuses"
                    if isinstance(result, PromptScores):
                        part = self._show_prompt(index, result)
                    else:
                        part = self._feed(index, result)
                    by_index.setdefault(index, []).append(part)
            for parts in by_index.values():
                part = self._end_with_call(_join(parts))
                if part.shown.tokens or part.finish_reason:
                    yield part

    def _show_prompt(self, index: int, scores: PromptScores) -> Part:
        choice = self._choices[index]
        if scores.is_last:
            choice.finish_reason = "length"
        shown = Shown(self._texts[index].text, show_prompt(self._tokenizer, scores.tokens))
        return Part(index, shown, choice.finish_reason)

    def _feed(self, index: int, token: NewToken) -> Part:
        choice = self._choices[index]
        if choice.num_tokens == 0 and index % self._asked.num_choices == 0:  # usage counts each prompt once
            self._num_stored += token.num_stored
        shown = choice.feed(token)
        if choice.finish_reason is not None and not token.is_last:
            self._worker.cancel(self._tickets[index])
        return Part(index, shown, choice.finish_reason)

    def _end_with_call(self, part: Part) -> Part:
        """Ends a text that has had its only call."""
        if self._watchers and part.finish_reason is None:
            watcher = self._watchers[part.choice]
            watcher.feed(part.shown.text, is_last=False)
            if watcher.num_calls:
                self._choices[part.choice].finish_reason = "stop"
                self._worker.cancel(self._tickets[part.choice])
                return part._replace(finish_reason="stop")
        return part

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(prompt.ids) for prompt in self._prompts)
        num_new = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": self._num_stored},
        }


def error_event(error: ApiError) -> bytes:
    """Returns the event that ends a failed stream."""
    return _event(error.body())


def _join(parts: Sequence[Part]) -> Part:
    text = "".join(part.shown.text for part in parts)
    tokens = [token for part in parts for token in part.shown.tokens]
    return Part(parts[-1].choice, Shown(text, tokens), parts[-1].finish_reason)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
