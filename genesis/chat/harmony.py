"""The messages in an answer of GPT-OSS (harmony): reasoning in the channel `analysis`, calls of tools, and text."""

import re
from typing import Final

from genesis.chat.held import count_held
from genesis.chat.tools import HARMONY, Tools, ToolText, describe_call, parse_calls

_CHANNEL, _START, _MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", _START)
"""The ends of messages. Those that end the answer are no part of its text, unless the server does not know them."""
_RECIPIENT: Final = " to="
_FUNCTION: Final = re.compile(r" to=functions\.([\w.-]{1,200})")
_ANALYSIS: Final = re.compile(r"<\|channel\|>analysis\b")
_MAX_HEADER_CHARS: Final = 500


class HarmonyReader:
    """Divides an answer into its messages while it comes: a `ToolReader` for the harmony format.

    A message begins with a header, up to `<|message|>`, which names its channel, and the tool that it calls. Text
    without a header is text of the answer, and so is a call that cannot be read, or that names no tool of the request.

    Args:
        tools: The tools of the request.
        is_stream: Whether calls have their index, as in a stream. Each is given when it is whole.
    """

    def __init__(self, tools: Tools, *, is_stream: bool = False) -> None:
        self._tools, self._is_stream = tools, is_stream
        self._held = ""
        self._header: str | None = None  # None before that of a message is whole
        self._num_searched = 0  # characters of a call in which no sign begins
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool) -> ToolText:
        """Returns what can be sent after more text of the answer."""
        self._held += text
        found = ToolText("", [])
        while self._held:
            if self._header is None and not self._read_header(is_last=is_last):
                break
            ends = [place for sign in _ENDS if (place := self._held.find(sign, self._num_searched)) >= 0]
            part = self._read_body(min(ends, default=None), is_last=is_last)
            found = ToolText(found.content + part.content, found.calls + part.calls, found.reasoning + part.reasoning)
            if not ends:
                break
        return found

    def _read_header(self, *, is_last: bool) -> bool:
        """Takes the header of the next message, or that of text without one, if it is known which of both comes.

        A header that the end of the answer cuts is no text.
        """
        held, signs = self._held, (_START, _CHANNEL, _RECIPIENT)
        may_begin = held.startswith(signs) or (not is_last and any(sign.startswith(held) for sign in signs))
        place = held.find(_MESSAGE, 0, _MAX_HEADER_CHARS)
        is_long = len(held) >= _MAX_HEADER_CHARS
        if place < 0 and is_last and not is_long and held.startswith((_START, _CHANNEL)):
            self._held = ""
            return False
        if not may_begin or (place < 0 and (is_last or is_long)):
            # Without `<|start|>`, at which the body would end at once.
            self._header, self._held = "", held.removeprefix(_START)
            return True
        if place < 0:
            return False
        self._header, self._held = held[:place], held[place + len(_MESSAGE) :]
        return True

    def _read_body(self, end: int | None, *, is_last: bool) -> ToolText:
        """Returns what can be sent of a message, which ends at `end`; None if its end has not come."""
        assert self._header is not None
        header, is_whole = self._header, end is not None or is_last
        function = _FUNCTION.search(header)
        shown = len(self._held) if end is None else end
        if not is_whole:
            shown = 0 if function else shown - count_held(self._held, _ENDS)
        body, self._held = self._held[:shown], self._held[shown:]
        self._num_searched = max(0, len(self._held) - max(map(len, _ENDS))) if end is None else 0
        if end is not None:
            sign = next(sign for sign in _ENDS if self._held.startswith(sign))
            self._held = self._held[0 if sign == _START else len(sign) :]
            self._header = None
        if function and is_whole:
            calls = parse_calls(f"{function[1]}{body}", HARMONY, self._tools) or []
            first, self.num_calls = self.num_calls, self.num_calls + len(calls)
            indices = range(first, self.num_calls) if self._is_stream else [None] * len(calls)
            return ToolText("" if calls else body, [describe_call(*one) for one in zip(calls, indices, strict=True)])
        return ToolText("", [], body) if _ANALYSIS.search(header) else ToolText(body, [])
