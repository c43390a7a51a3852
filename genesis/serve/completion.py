"""One completion request: runs its texts on a worker, and builds the response from their tokens."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from genesis.errors import UserError
from genesis.generate.batch import NewToken, Request
from genesis.generate.ids import write_ids
from genesis.generate.stream import derive_seed
from genesis.serve.choice import Choice, Shown, show_prompt
from genesis.serve.conversation import encode_conversation
from genesis.serve.errors import ApiError
from genesis.serve.form import ChatForm, Form, Part, TextForm
from genesis.serve.request import DEFAULT_NEW_TOKENS, ChatPrompt, CompletionRequest, Prompt
from genesis.serve.worker import Facts, PromptScores, Result, Ticket, Worker
from genesis.tokenizer.tokenizer import encode_prompt

_END = b"data: [DONE]\n\n"


class EncodedPrompt(NamedTuple):
    """A prompt as tokens and as text, and the maximum number of new tokens."""

    ids: tuple[int, ...]
    text: str
    max_new_tokens: int


def encode_prompts(asked: CompletionRequest, facts: Facts) -> list[EncodedPrompt]:
    """Returns the prompts as tokens: a text gets a bos token in front, a list of tokens stays as it is.

    Args:
        asked: The request.
        facts: The facts about the model.

    Raises:
        ApiError: A prompt does not fit the model's context, or holds a token that the model does not have.
    """
    if facts.tokenizer is None and asked.stop:
        raise ApiError("stop is not supported by this model, which has no tokenizer: remove stop", param="stop")
    return [_encode(prompt, asked, facts) for prompt in asked.prompts]


def _encode(prompt: Prompt, asked: CompletionRequest, facts: Facts) -> EncodedPrompt:
    context, max_new_tokens = facts.max_seq_len, asked.max_new_tokens
    if isinstance(prompt, ChatPrompt):
        _check_num_bytes(sum(map(_count_bytes, prompt.messages)), facts)
        ids, text = encode_conversation(prompt, facts.tokenizer, facts.chat_template), ""
    elif isinstance(prompt, str):
        ids, text = _encode_text(prompt, facts)
    else:
        ids, text = prompt, _decode_ids(prompt, facts)
    room = context - len(ids)
    if room < (0 if max_new_tokens == 0 else 1):
        raise _too_long(f"has {len(ids):,} tokens", context)
    if max_new_tokens is not None and max_new_tokens > room:
        raise ApiError(
            f"max_tokens is {max_new_tokens:,}, but the prompt's {len(ids):,} tokens leave room for {room:,} in the "
            f"model's context of {context:,}: set max_tokens to at most {room:,}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if max_new_tokens is None:
        # OpenAI's defaults: a completion has 16 tokens; a turn of a chat has no limit of its own.
        max_new_tokens = room if asked.is_chat else min(DEFAULT_NEW_TOKENS, room)
    return EncodedPrompt(ids, text, max_new_tokens)


def _encode_text(text: str, facts: Facts) -> tuple[tuple[int, ...], str]:
    tokenizer = facts.tokenizer
    if tokenizer is None:
        raise ApiError(
            "prompt is a text, but this model has no tokenizer: send a list of token ids (the response holds ids, too)",
            param="prompt",
            code="no_tokenizer",
        )
    _check_num_bytes(len(text.encode()), facts)
    return encode_prompt(tokenizer, text), text


def _check_num_bytes(num_bytes: int, facts: Facts) -> None:
    """Refuses a text that is too long under any tokenization, which would take seconds for a text of megabytes.

    Raises:
        ApiError: The text does not fit the model's context.
    """
    context = facts.max_seq_len
    if facts.tokenizer is not None and num_bytes > context * int(facts.tokenizer.token_num_bytes.max()):
        raise _too_long(f"has more than {context:,} tokens", context)


def _count_bytes(message: Mapping[str, Any]) -> int:
    """Returns the bytes of a message's text; 0 for the assistant, of whose turns a template may leave out parts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if message.get("role") == "assistant":
        return 0
    return sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))


def _decode_ids(ids: tuple[int, ...], facts: Facts) -> str:
    """Returns the text of a prompt's tokens; without a tokenizer, the token ids as numbers."""
    vocab_size = facts.vocab_size if facts.tokenizer is None else facts.tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ApiError(
            f"prompt has the token {str(wrong)[:30]}: token ids must be from 0 to {vocab_size - 1}", param="prompt"
        )
    return write_ids(ids) if facts.tokenizer is None else facts.tokenizer.decode(ids)


def _too_long(problem: str, context: int) -> ApiError:
    return ApiError(
        f"prompt {problem}, more than the model's context of {context:,}: shorten the prompt",
        param="prompt",
        code="context_length_exceeded",
    )


class Completion:
    """The texts of one request, as a context manager: leaving it cancels the texts and frees their rows in the batch.

    Args:
        asked: The request.
        model: The id of the model that answers.
        worker: The worker that holds the model.
        facts: The facts about the model.
        prompts: The request's prompts.
    """

    def __init__(
        self, asked: CompletionRequest, model: str, worker: Worker, facts: Facts, prompts: Sequence[EncodedPrompt]
    ) -> None:
        self._asked, self._worker, self._prompts = asked, worker, prompts
        texts = [prompt for prompt in prompts for _ in range(asked.num_choices)]
        repeated = [prompt.text if asked.has_echo else "" for prompt in texts]
        self._choices = [Choice(facts.tokenizer, asked.stop, len(text), stop_ids=facts.stop_ids) for text in repeated]
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
            )
            for index, prompt in enumerate(texts)
        ]
        self._form: Form = (
            ChatForm(asked.num_top_logprobs)
            if asked.is_chat
            else TextForm(has_log_probs=asked.num_top_logprobs is not None)
        )
        self._head = {
            "id": f"{self._form.id_prefix}-{secrets.token_hex(12)}",
            "object": self._form.kind(is_stream=asked.is_stream),
            "created": int(time.time()),
            "model": model,
        }
        self._tickets: list[Ticket] = []
        # Bounded by the request's number of tokens, even if a slow client leaves all of its tokens here.
        self._results: asyncio.Queue[tuple[int, Result]] = asyncio.Queue()

    def __enter__(self) -> Self:
        for index, request in enumerate(self._requests):
            receive = partial(self._receive, index)
            self._tickets.append(self._worker.submit(request, receive, self._num_prompt_logprobs))
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
            yield _event({**self._head, **usage, "choices": [self._form.piece(part)]})
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
                    if isinstance(result, PromptScores):
                        part = self._show_prompt(index, result)
                    else:
                        part = self._feed(index, result)
                    by_index.setdefault(index, []).append(part)
            for parts in by_index.values():
                part = _join(parts)
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
        shown = choice.feed(token)
        if choice.finish_reason is not None and not token.is_last:
            self._worker.cancel(self._tickets[index])
        return Part(index, shown, choice.finish_reason)

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(len(prompt.ids) for prompt in self._prompts)
        num_new = sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def error_event(error: ApiError) -> bytes:
    """Returns the event that ends a failed stream."""
    return _event(error.body())


def _join(parts: Sequence[Part]) -> Part:
    text = "".join(part.shown.text for part in parts)
    tokens = [token for part in parts for token in part.shown.tokens]
    return Part(parts[-1].choice, Shown(text, tokens), parts[-1].finish_reason)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
