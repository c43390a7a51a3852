"""One request under way: its texts on a worker, and what is answered of them as their tokens come."""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from genesis.errors import UserError
from genesis.generate.batch import NewToken, Request
from genesis.generate.ids import write_ids
from genesis.serve.choice import Choice, FinishReason, Shown
from genesis.serve.errors import ApiError
from genesis.serve.request import DEFAULT_NEW_TOKENS, CompletionRequest
from genesis.serve.worker import Facts, Ticket, Worker
from genesis.tokenizer.tokenizer import encode_prompt

_END = b"data: [DONE]\n\n"


class Prompt(NamedTuple):
    """What a text begins with: the tokens given to the model, and how many may come."""

    ids: tuple[int, ...]
    text: str
    max_new_tokens: int


class _Part(NamedTuple):
    """What has come of one text since the last look."""

    choice: int
    shown: Shown
    finish_reason: FinishReason | None


def encode_prompts(asked: CompletionRequest, facts: Facts) -> list[Prompt]:
    """Returns the prompts as tokens: a text after bos, tokens as they are.

    Raises:
        ApiError: One does not fit the model's context, or holds a token that it does not have.
    """
    if facts.tokenizer is None and asked.stop:
        raise ApiError("stop is not supported by this model: it has no tokenizer, so that it has no text", param="stop")
    return [_encode(prompt, asked.max_new_tokens, facts) for prompt in asked.prompts]


def _encode(prompt: str | tuple[int, ...], max_new_tokens: int | None, facts: Facts) -> Prompt:
    context = facts.max_seq_len
    ids, text = _encode_text(prompt, facts) if isinstance(prompt, str) else (prompt, _decode_ids(prompt, facts))
    room = context - len(ids)
    if room < 1:
        raise _too_long(f"has {len(ids):,} tokens", context)
    if max_new_tokens is not None and max_new_tokens > room:
        raise ApiError(
            f"max_tokens is {max_new_tokens:,}, and the prompt's {len(ids):,} tokens leave room for {room:,} in the "
            f"model's context of {context:,}: ask for at most {room:,}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return Prompt(ids, text, max_new_tokens or min(DEFAULT_NEW_TOKENS, room))


def _encode_text(text: str, facts: Facts) -> tuple[tuple[int, ...], str]:
    tokenizer, context = facts.tokenizer, facts.max_seq_len
    if tokenizer is None:
        raise ApiError(
            "prompt is text, and this model has no tokenizer: give a list of token ids; it answers with ids",
            param="prompt",
            code="no_tokenizer",
        )
    longest = int(tokenizer.token_num_bytes.max())
    if len(text.encode()) > context * longest:  # however it is cut
        raise _too_long(f"has more than {context:,} tokens", context)
    return encode_prompt(tokenizer, text), text


def _decode_ids(ids: tuple[int, ...], facts: Facts) -> str:
    """Returns the text of a prompt's tokens; without a tokenizer, their numbers."""
    vocab_size = facts.vocab_size if facts.tokenizer is None else facts.tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ApiError(
            f"prompt holds the token {str(wrong)[:30]}: it must be from 0 to {vocab_size - 1}", param="prompt"
        )
    return write_ids(ids) if facts.tokenizer is None else facts.tokenizer.decode(ids)


def _too_long(problem: str, context: int) -> ApiError:
    return ApiError(
        f"prompt {problem}, and the model's context is {context:,}: shorten it",
        param="prompt",
        code="context_length_exceeded",
    )


def derive_seed(seed: int, index: int) -> int:
    """Returns the seed of a prompt's text number `index`; that of the first is the seed itself."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little") >> 1


class Completion:
    """A request's texts, from when it is entered until it is left: then their rows are free.

    Args:
        asked: The request.
        model: The id of the model that answers.
        worker: Has it.
        facts: About it.
        prompts: The request's.
    """

    def __init__(
        self, asked: CompletionRequest, model: str, worker: Worker, facts: Facts, prompts: Sequence[Prompt]
    ) -> None:
        self._asked, self._worker, self._prompts = asked, worker, prompts
        texts = [prompt for prompt in prompts for _ in range(asked.num_choices)]
        self._echoes = [prompt.text if asked.has_echo else "" for prompt in texts]
        self._choices = [Choice(facts.tokenizer, asked.stop, len(echo)) for echo in self._echoes]
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        self._requests = [
            Request(
                prompt=prompt.ids,
                max_new_tokens=prompt.max_new_tokens,
                sampling=asked.sampling,
                seed=derive_seed(seed, index % asked.num_choices),
                num_top_logprobs=asked.num_top_logprobs or 0,
            )
            for index, prompt in enumerate(texts)
        ]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tickets: list[Ticket] = []
        # As long as the request's tokens at most: a reader that is slow finds here what it has not taken yet.
        self._results: asyncio.Queue[tuple[int, NewToken | UserError]] = asyncio.Queue()

    def __enter__(self) -> Self:
        for index, request in enumerate(self._requests):
            self._tickets.append(self._worker.submit(request, partial(self._receive, index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    async def collect(self) -> dict[str, Any]:
        """Returns the answer, once all texts have ended."""
        parts: list[list[_Part]] = [[] for _ in self._choices]
        async for part in self._parts():
            parts[part.choice].append(part)
        choices = [self._describe(_join(of_one), echo) for of_one, echo in zip(parts, self._echoes, strict=True)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the answer piece by piece, as server-sent events."""
        usage = {"usage": None} if self._asked.has_usage else {}
        for index, echo in enumerate(self._echoes):
            if echo:
                part = _Part(index, Shown("", []), None)
                yield _event({**self._head, **usage, "choices": [self._describe(part, echo)]})
        async for part in self._parts():
            yield _event({**self._head, **usage, "choices": [self._describe(part)]})
        if self._asked.has_usage:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield _END

    def _receive(self, index: int, result: NewToken | UserError) -> None:
        self._results.put_nowait((index, result))

    async def _parts(self) -> AsyncIterator[_Part]:
        """Yields what becomes certain of each text; where several tokens have come, what they make together."""
        while any(choice.finish_reason is None for choice in self._choices):
            results = [await self._results.get()]
            while not self._results.empty():
                results.append(self._results.get_nowait())
            by_index: dict[int, list[_Part]] = {}
            for index, result in results:
                if isinstance(result, UserError):
                    raise result
                if self._choices[index].finish_reason is None:
                    by_index.setdefault(index, []).append(self._feed(index, result))
            for parts in by_index.values():
                part = _join(parts)
                if part.shown.tokens or part.finish_reason:
                    yield part

    def _feed(self, index: int, token: NewToken) -> _Part:
        choice = self._choices[index]
        shown = choice.feed(token)
        if choice.finish_reason is not None and not token.is_last:
            self._worker.cancel(self._tickets[index])
        return _Part(index, shown, choice.finish_reason)

    def _describe(self, part: _Part, echo: str = "") -> dict[str, Any]:
        has_log_probs = self._asked.num_top_logprobs is not None
        return {
            "index": part.choice,
            "text": echo + part.shown.text,
            "logprobs": part.shown.log_probs() if has_log_probs else None,
            "finish_reason": part.finish_reason,
        }

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(len(prompt.ids) for prompt in self._prompts)
        num_new = sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def error_event(error: ApiError) -> bytes:
    """Returns the event that ends a stream which failed."""
    return _event(error.body())


def _join(parts: Sequence[_Part]) -> _Part:
    text = "".join(part.shown.text for part in parts)
    tokens = [token for part in parts for token in part.shown.tokens]
    return _Part(parts[-1].choice, Shown(text, tokens), parts[-1].finish_reason)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
