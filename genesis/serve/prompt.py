"""Turns the prompts of a request into tokens, after a look at whether they can fit the model's context.

This module imports no torch, so that a process that encodes starts fast.
"""

from dataclasses import replace
from typing import NamedTuple

from genesis.base.errors import numbered
from genesis.generate.ids import write_ids
from genesis.serve.conversation import write_conversation
from genesis.serve.errors import ApiError
from genesis.serve.fields import show
from genesis.serve.request import DEFAULT_NEW_TOKENS, ChatPrompt, CompletionRequest, Prompt
from genesis.tokenizer.losses import find_losses, writes
from genesis.tokenizer.tokenizer import Tokenizer, encode_prompt, find_control


class Facts(NamedTuple):
    """Facts about a loaded model for other threads, without a reference to the model, whose memory must become free."""

    tokenizer: Tokenizer | None
    max_seq_len: int
    vocab_size: int
    weights_bytes: int
    """The bytes of the weights, of which `shared_bytes` were in memory already."""
    shared_bytes: int
    chat_template: str | None = None
    stop_ids: frozenset[int] = frozenset()
    has_scores: bool = False
    """Whether it is a reward model, which gives scores to texts."""


class EncodedPrompt(NamedTuple):
    """A prompt as tokens and as text, and the maximum number of new tokens."""

    ids: tuple[int, ...]
    text: str
    max_new_tokens: int


def write_prompts(asked: CompletionRequest, facts: Facts) -> CompletionRequest:
    """Returns the request with its conversation as the text of the chat template, in which spelled symbols are hidden.

    Raises:
        ApiError: The model has no chat template, or it refuses the conversation.
    """
    return replace(
        asked,
        prompts=tuple(
            write_conversation(prompt, facts.tokenizer, facts.chat_template)
            if isinstance(prompt, ChatPrompt)
            else prompt
            for prompt in asked.prompts
        ),
    )


def encode_prompts(asked: CompletionRequest, facts: Facts) -> list[EncodedPrompt]:
    """Returns the prompts as tokens: a text gets a bos token in front, a list of tokens stays as it is.

    Args:
        asked: The request; that of a chat as `write_prompts` returns it.
        facts: The facts about the model.

    Raises:
        ApiError: A prompt does not fit the model's context, or holds a token that the model does not have.
    """
    if facts.tokenizer is None and asked.stop:
        raise ApiError("stop is not supported by this model, which has no tokenizer: remove stop", param="stop")
    lost = next((text for text in asked.stop if facts.tokenizer and not _can_come(facts.tokenizer, text)), None)
    losses = None if lost is None or facts.tokenizer is None else find_losses(facts.tokenizer)
    if losses is not None:
        raise ApiError(f"stop has {show(lost)}, which this model never writes: its tokenizer {losses}", param="stop")
    wrong = next((token for token, _ in asked.sampling.logit_bias if token >= facts.vocab_size), None)
    if wrong is not None:
        raise ApiError(
            f"logit_bias has the token {wrong}: token ids must be from 0 to {facts.vocab_size - 1}", param="logit_bias"
        )
    field = asked.scored_field or "prompt"
    has_list = asked.scored_field is not None and len(asked.prompts) > 1
    names = [f"{field}[{index}] with its question" if has_list else field for index in range(len(asked.prompts))]
    return [_encode(prompt, asked, facts, name) for prompt, name in zip(asked.prompts, names, strict=True)]


def _can_come(tokenizer: Tokenizer, stop: str) -> bool:
    """Whether generated text can have a stop text, up to the control symbol that it spells."""
    control = find_control(tokenizer, stop)
    return writes(tokenizer, stop if control is None else control[0])


def _encode(prompt: Prompt, asked: CompletionRequest, facts: Facts, name: str) -> EncodedPrompt:
    context, max_new_tokens = facts.max_seq_len, asked.max_new_tokens
    assert not isinstance(prompt, ChatPrompt)
    if isinstance(prompt, str) and asked.is_chat:
        tokenizer = facts.tokenizer
        assert tokenizer is not None
        _check_length(tokenizer.min_num_tokens(tokenizer.literal.reveal(prompt)), context, name)
        ids, text = tuple(tokenizer.encode_with_controls(prompt)), ""
    elif isinstance(prompt, str):
        ids, text = _encode_text(prompt, facts)
    else:
        _check_length(len(prompt), context)
        ids, text = prompt, _decode_ids(prompt, facts)
    room = context - len(ids)
    if room < (0 if max_new_tokens == 0 else 1):
        raise _too_long(f"has {numbered(len(ids), 'tokens')}, more than", context, name)
    if max_new_tokens is not None and max_new_tokens > room:
        raise ApiError(
            f"max_tokens is {max_new_tokens:,}, but the prompt of {numbered(len(ids), 'tokens')} leaves room for "
            f"{room:,} in the model's context of {context:,}: set max_tokens to at most {room:,}",
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
    _check_length(tokenizer.min_num_tokens(text), facts.max_seq_len)
    return encode_prompt(tokenizer, text), text


def _check_length(num_tokens: int, context: int, name: str = "prompt") -> None:
    """Refuses what is too long.

    Raises:
        ApiError: So many tokens do not fit the context.
    """
    if num_tokens > context:
        raise _too_long("is longer than", context, name)


def _decode_ids(ids: tuple[int, ...], facts: Facts) -> str:
    """Returns the text of a prompt's tokens; without a tokenizer, the token ids as numbers."""
    vocab_size = facts.vocab_size if facts.tokenizer is None else facts.tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ApiError(
            f"prompt has the token {str(wrong)[:30]}: token ids must be from 0 to {vocab_size - 1}", param="prompt"
        )
    return write_ids(ids) if facts.tokenizer is None else facts.tokenizer.decode(ids)


def _too_long(problem: str, context: int, name: str) -> ApiError:
    shorter = "the prompt" if name == "prompt" else "it"
    return ApiError(
        f"{name} {problem} the model's context of {numbered(context, 'tokens')}: shorten {shorter}",
        param=name.partition("[")[0],
        code="context_length_exceeded",
    )
