"""The two forms of a response: a text completion, and a turn of a chat."""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from genesis.chat.harmony import HarmonyReader
from genesis.chat.tools import ToolReader, ToolText
from genesis.serve.choice import FinishReason, Shown, ShownToken

_BYTE = re.compile(r"bytes:\\x([0-9a-f]{2})")
"""The name of a token that is one byte of a character, as `token_name` writes it."""


class Part(NamedTuple):
    """The new part of one generated text since the last event."""

    choice: int
    shown: Shown
    finish_reason: FinishReason | None


class Form(Protocol):
    """Describes generated text in the way that a route of OpenAI's API does."""

    id_prefix: str

    def kind(self, *, is_stream: bool) -> str:
        """Returns the value of the response's field `object`."""

    def opening(self, choice: int, echo: str) -> dict[str, Any] | None:
        """Returns the choice in a stream's first event, before any text; None if there is no such event."""

    def piece(self, part: Part) -> dict[str, Any] | None:
        """Returns the choice in an event of a stream; None if there is nothing to send yet."""

    def whole(self, part: Part, echo: str) -> dict[str, Any]:
        """Returns the choice in a response that is not a stream."""


class TextForm:
    """`/v1/completions`.

    Args:
        has_log_probs: Whether tokens come with their log-probabilities.
        has_ids: Whether the ids of the tokens come, as vLLM has them: with the id that ends the text.
    """

    id_prefix = "cmpl"

    def __init__(self, *, has_log_probs: bool, has_ids: bool = False) -> None:
        self._has_log_probs, self._has_ids = has_log_probs, has_ids

    def kind(self, *, is_stream: bool) -> str:
        """Returns the same value for streams and whole responses."""
        return "text_completion"

    def opening(self, choice: int, echo: str) -> dict[str, Any] | None:
        """Returns the prompt, if it is to be repeated."""
        return self.whole(Part(choice, Shown("", []), None), echo) if echo else None

    def piece(self, part: Part) -> dict[str, Any]:
        """Returns the new text."""
        return self.whole(part, "")

    def whole(self, part: Part, echo: str) -> dict[str, Any]:
        """Returns the text, after the prompt if that is to be repeated."""
        return {
            "index": part.choice,
            "text": echo + part.shown.text,
            "logprobs": part.shown.log_probs() if self._has_log_probs else None,
            "finish_reason": part.finish_reason,
            **({"token_ids": [token.id for token in part.shown.tokens]} if self._has_ids else {}),
        }


class ChatForm:
    """`/v1/chat/completions`: text of the assistant, and its calls of tools.

    Args:
        num_top_logprobs: How many alternatives each token comes with; None for tokens without log-probabilities.
        readers: What finds the calls and the reasoning in each text; none where there is nothing to find.
    """

    id_prefix = "chatcmpl"

    def __init__(self, num_top_logprobs: int | None, readers: Sequence[ToolReader | HarmonyReader] = ()) -> None:
        self._num_top_logprobs, self._readers = num_top_logprobs, readers

    def kind(self, *, is_stream: bool) -> str:
        """Returns another value for the events of a stream."""
        return "chat.completion.chunk" if is_stream else "chat.completion"

    def opening(self, choice: int, echo: str) -> dict[str, Any] | None:
        """Returns the role, without text."""
        return self._describe(Part(choice, Shown("", []), None), "delta", {"role": "assistant", "content": ""})

    def piece(self, part: Part) -> dict[str, Any] | None:
        """Returns the new text, the calls that it completes, and parts of arguments."""
        found, finish_reason = self._read(part)
        texts = {"reasoning_content": found.reasoning, "content": found.content, "tool_calls": found.calls}
        delta = {key: value for key, value in texts.items() if value}
        if not delta and finish_reason is None and self._num_top_logprobs is None:
            return None
        return self._describe(part._replace(finish_reason=finish_reason), "delta", delta)

    def whole(self, part: Part, echo: str) -> dict[str, Any]:
        """Returns the message."""
        found, finish_reason = self._read(part)
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.calls:
            message |= {"content": found.content or None, "tool_calls": found.calls}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        return self._describe(part._replace(finish_reason=finish_reason), "message", message)

    def _read(self, part: Part) -> tuple[ToolText, FinishReason | None]:
        """Returns the text outside of calls, the calls that end in it, and why the answer has ended."""
        if not self._readers:
            return ToolText(part.shown.text, []), part.finish_reason
        reader = self._readers[part.choice]
        found = reader.feed(part.shown.text, is_last=part.finish_reason is not None)
        has_called = part.finish_reason == "stop" and reader.num_calls > 0
        return found, "tool_calls" if has_called else part.finish_reason

    def _describe(self, part: Part, key: Literal["delta", "message"], content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": part.choice,
            key: content,
            "logprobs": None if self._num_top_logprobs is None else {"content": self._log_probs(part.shown.tokens)},
            "finish_reason": part.finish_reason,
        }

    def _log_probs(self, tokens: Sequence[ShownToken]) -> list[dict[str, Any]]:
        found = []
        for token in tokens:
            assert token.log_prob is not None  # only a prompt's first token has none; chats return no prompt
            assert token.top_logprobs is not None
            top = sorted(token.top_logprobs.items(), key=lambda item: -item[1])[: self._num_top_logprobs]
            alternatives = [_describe_token(name, log_prob) for name, log_prob in top]
            found.append({**_describe_token(token.name, token.log_prob), "top_logprobs": alternatives})
        return found


def _describe_token(name: str, log_prob: float) -> dict[str, Any]:
    single = _BYTE.fullmatch(name)
    content = bytes.fromhex(single[1]) if single else name.encode("utf-8", "replace")
    return {"token": name, "logprob": log_prob, "bytes": list(content)}
