"""Turns generated tokens into text for a client: whole characters, no part of a stop text, and each token's offset."""

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from genesis.chat.held import count_held
from genesis.generate.batch import NewToken
from genesis.generate.ids import IdWriter, build_writer
from genesis.generate.prompt_scores import ScoredToken
from genesis.tokenizer.tokenizer import Tokenizer, find_control

FinishReason = Literal["stop", "length", "tool_calls"]


class ShownToken(NamedTuple):
    """A token that may be sent; `offset` is the position in the text at which the token's characters begin.

    The first token of a prompt has no log-probability.
    """

    name: str
    offset: int
    log_prob: float | None
    top_logprobs: dict[str, float] | None
    id: int


class Shown(NamedTuple):
    """Text that can no longer change, and the tokens that make up this text."""

    text: str
    tokens: list[ShownToken]

    def log_probs(self) -> dict[str, Any]:
        """Returns the tokens as OpenAI's `logprobs`."""
        return {
            "tokens": [token.name for token in self.tokens],
            "token_logprobs": [token.log_prob for token in self.tokens],
            "top_logprobs": [token.top_logprobs for token in self.tokens],
            "text_offset": [token.offset for token in self.tokens],
        }


class _Held(NamedTuple):
    token: NewToken
    start: int
    end: int


class Choice:
    """Turns the tokens of one generated text into what the client sees.

    Text that may be the beginning of a stop text is held back, with its tokens, until the next tokens decide. If a stop
    text begins inside a token, the client gets the part of the token before the stop text. A stop text that spells a
    control symbol, which is no part of the output, ends the text at that symbol.

    Args:
        tokenizer: The model's tokenizer; None for a model without one, whose tokens are shown as ids.
        stop: Texts that end the generation; the output stops before them.
        offset: Number of characters before this text.
        stop_ids: The tokens that end the model's texts.
        spelled: Control symbols that are part of the text, by their ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        offset: int = 0,
        *,
        stop_ids: Set[int] = frozenset(),
        spelled: Mapping[int, str] | None = None,
    ) -> None:
        self._spelled = spelled or {}
        self._tokenizer, self._stop, self._stop_ids = tokenizer, stop, stop_ids
        controls = [] if tokenizer is None else [find_control(tokenizer, text) for text in stop]
        self._controls = [control for control in controls if control is not None]
        self._decoder = build_writer(tokenizer)
        self._begin = offset  # position at which the held-back text begins
        self._text = ""
        self._held: deque[_Held] = deque()
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def feed(self, token: NewToken) -> Shown:
        """Adds the next token and returns the text that is now final; sets `finish_reason` when the text has ended."""
        assert self.finish_reason is None, "the text has ended"
        self.num_tokens += 1
        start = self._begin + len(self._text)
        before = next(
            (text for text, control in self._controls if token.id == control and self._text.endswith(text)), None
        )
        if before is not None:
            self.finish_reason = "stop"
            return self._end_at(start - len(before))
        has_stopped = token.is_last and token.id in self._stop_ids
        # A token that ends the text is no part of it, even if its tokenizer takes it for text.
        if not has_stopped and (self._tokenizer is None or token.id < self._tokenizer.vocab_size):
            self._text += self._spelled.get(token.id) or self._decoder.feed(token.id)
        if token.is_last:
            self._text += self._decoder.flush()
        self._held.append(_Held(token, start, self._begin + len(self._text)))
        cuts = [cut for cut in map(self._text.find, self._stop) if cut >= 0]
        if cuts:
            self.finish_reason = "stop"
            return self._end_at(self._begin + min(cuts))
        if token.is_last:
            self.finish_reason = "stop" if has_stopped or token.is_complete else "length"
            return self._end_at(self._begin + len(self._text))
        return self._release(self._begin + len(self._text) - count_held(self._text, self._stop))

    def _release(self, end: int) -> Shown:
        """Returns the tokens whose whole text lies before `end`, and removes them from those held back."""
        begin, tokens = self._begin, []
        while self._held and self._held[0].end <= end:
            held = self._held.popleft()
            tokens.append(self._show(held.token, held.start, token_name(self._tokenizer, held.token.id)))
            self._begin = held.end
        text, self._text = self._text[: self._begin - begin], self._text[self._begin - begin :]
        return Shown(text, tokens)

    def _end_at(self, end: int) -> Shown:
        """Returns everything before `end`, including the first part of a token that `end` cuts."""
        text, tokens = self._release(end)
        rest = self._text[: end - self._begin]
        if rest:
            cut = self._held[0]
            tokens.append(self._show(cut.token, cut.start, rest))
        return Shown(text + rest, tokens)

    def _show(self, token: NewToken, start: int, name: str) -> ShownToken:
        top_logprobs = {
            token_name(self._tokenizer, other): log_prob
            for other, log_prob in token.top_logprobs
            if other != token.id and math.isfinite(log_prob)
        }
        return ShownToken(name, start, token.log_prob, {name: token.log_prob, **top_logprobs}, token.id)


def show_prompt(tokenizer: Tokenizer | None, tokens: Sequence[ScoredToken]) -> list[ShownToken]:
    """Returns the tokens of a prompt in the form of generated tokens."""
    writer, shown = build_writer(tokenizer), []
    length = 0 if tokenizer is not None else -1  # ids have spaces between them, but no space before the first id
    for token in tokens:
        name = token_name(tokenizer, token.id)
        top: dict[str, float] | None = None
        if token.log_prob is not None:
            others = {
                token_name(tokenizer, other): log_prob
                for other, log_prob in token.top_logprobs
                if other != token.id and math.isfinite(log_prob)
            }
            top = {name: token.log_prob, **others}
        shown.append(ShownToken(name, max(0, length), token.log_prob, top, token.id))
        if tokenizer is None or token.id < tokenizer.vocab_size:
            length += len(writer.feed(token.id))
    return shown


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """Returns a unique text for a token: its characters, `bytes:\\xe2` for a byte, `</s>` for a control token.

    A model may have more tokens than its tokenizer, to round its vocabulary up; these are `<id 32001>`. Without a
    tokenizer the text is the token's number with a space before it.
    """
    if tokenizer is None:
        return IdWriter().feed(token)
    if token >= tokenizer.vocab_size:
        return f"<id {token}>"
    if tokenizer.is_control(token):
        return tokenizer.pieces[token]
    content = tokenizer.decode_bytes([token])
    if not content:  # of unknown text
        return tokenizer.pieces[token]
    if not tokenizer.is_byte(token):
        with suppress(UnicodeDecodeError):  # a piece may hold only part of a character
            return content.decode()
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
