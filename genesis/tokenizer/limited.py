"""Searches texts by the expressions of a stranger's tokenizer in a process with limits, which the kernel ends.

An expression may search a text of a kilobyte for minutes, and nothing interrupts the library meanwhile. So every call
that searches a text goes through `TextSearch`, which asks such a process where a tokenizer has other expressions than
those that are known to take linear time. A process that has limits itself, as a worker of `genesis data prepare`,
calls the library directly.
"""

import hashlib
import pickle
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.base.limited_workers import (
    TEXTS_BYTES,
    LimitedWorkers,
    LimitReachedError,
    count_encoding_seconds,
    is_limited,
    serve_limited,
)
from genesis.tokenizer.limits import has_unknown, quote
from genesis.tokenizer.panics import refusing_panics, without_panics_printed

_WORKERS: Final = LimitedWorkers(__name__, 1)
_PART_CHARS: Final = 1 << 16
_PLACE: Final = re.compile("(?<=[A-Za-z])[ \\n](?=[A-Za-z])")


class TextSearch:
    """The calls of a tokenizer of the library that search a text. Several threads may call.

    Each raises a UserError if the expressions take too long for a text, or the library fails on it.

    Args:
        built: The tokenizer, which does not change any more.
        expressions: Its regular expressions, as `list_expressions` returns them.
        can_cut: Whether long texts are encoded in parts, as `genesis.tokenizer.limits.can_cut` says: the library takes
            hundreds of bytes for each token.
    """

    def __init__(self, built: tokenizers.Tokenizer, expressions: Sequence[str], *, can_cut: bool = False) -> None:
        self._built, self._expressions, self._can_cut = built, expressions, can_cut
        self._is_direct = is_limited() or not has_unknown(expressions)

    def encode(self, text: str, *, is_framed: bool = False) -> NDArray[np.int32]:
        """Returns the ids of a text; `is_framed` with those that the tokenizer adds before and after it."""
        parts = [text] if is_framed else self._cut(text)
        found: list[NDArray[np.int32]] = [self._call(_encode, len(part), part, is_framed) for part in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids of a text, and in rows the start and end (exclusive) of each in characters."""
        ids, offsets, start = list[NDArray[np.int32]](), list[NDArray[np.int32]](), 0
        for part in self._cut(text):
            of_part, places = self._call(_encode_with_offsets, len(part), part)
            ids.append(of_part)
            offsets.append(places + np.int32(start) if start else places)
            start += len(part)
        if len(ids) == 1:
            return ids[0], offsets[0]
        joined = np.concatenate(ids)
        ids.clear()  # before the places of all tokens are twice in memory
        return joined, np.concatenate(offsets)

    def _cut(self, text: str) -> list[str]:
        parts, start = [], 0
        while self._can_cut and len(text) - start > 2 * _PART_CHARS:
            found = _PLACE.search(text, start + _PART_CHARS)
            if found is None:
                break
            parts.append(text[start : found.start()])
            start = found.start()
        return [*parts, text[start:]]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, by several threads."""
        found: list[NDArray[np.int32]] = self._call(_encode_batch, sum(map(len, texts)), [*texts])
        return found

    def decode(self, ids: list[int], *, has_controls: bool) -> str:
        """Returns the text of ids as the library's decoder gives it."""
        text: str = self._call(_decode, len(ids), ids, has_controls)
        return text

    def check(self, texts: Sequence[str]) -> None:
        """Checks the expressions on texts, unless another process has done so."""
        if not self._is_direct:
            self.encode_batch(texts)

    def _call(self, function: Callable[..., Any], size: int, *arguments: Any) -> Any:
        if self._is_direct:
            return function(self._built, *arguments)
        call, seconds = (self._key, function, arguments), count_encoding_seconds(size)
        try:
            found = _exchange(call, seconds)
            while found is None:  # the process has just started, or another thread's text has ended it
                _exchange((self._key, _read, self._state), seconds)
                found = _exchange(call, seconds)
        except LimitReachedError as error:
            raise UserError(
                f"a search of its expressions ({quote(self._expressions[0])}, ...) in {numbered(size, 'characters')} "
                f"{error}: use another tokenizer"
            ) from None
        if isinstance(found, UserError):
            raise found
        return found

    @cached_property
    def _state(self) -> tuple[str, bool]:
        return self._built.to_str(), self._built.encode_special_tokens

    @cached_property
    def _key(self) -> bytes:
        return hashlib.blake2b(repr(self._state).encode()).digest()


@refusing_panics
def _encode(built: tokenizers.Tokenizer, text: str, is_framed: bool) -> NDArray[np.int32]:
    return np.array(built.encode(text, add_special_tokens=is_framed).ids, np.int32)


@refusing_panics
def _encode_with_offsets(built: tokenizers.Tokenizer, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    encoded = built.encode(text, add_special_tokens=False)
    ids = np.array(encoded.ids, np.int32)
    # One at a time: the library's list of all would take more memory than the rest.
    found = map(encoded.token_to_chars, range(len(ids)))
    places = np.fromiter(chain.from_iterable(filter(None, found)), np.int32)
    if len(places) < 2 * len(ids):  # of a text that a post-processor has written twice, one has no places there
        places = np.array(encoded.offsets, np.int32)
    return ids, places.reshape(-1, 2)


@refusing_panics
def _encode_batch(built: tokenizers.Tokenizer, texts: list[str]) -> list[NDArray[np.int32]]:
    return [np.array(one.ids, np.int32) for one in built.encode_batch_fast(texts, add_special_tokens=False)]


@refusing_panics
def _decode(built: tokenizers.Tokenizer, ids: list[int], has_controls: bool) -> str:
    text: str = built.decode(ids, skip_special_tokens=not has_controls)
    return text


def _exchange(message: object, seconds: float) -> Any:
    return pickle.loads(_WORKERS.ask(pickle.dumps(message), seconds, TEXTS_BYTES))


# ---- in the process


_tokenizers: dict[bytes, tokenizers.Tokenizer] = {}


def main(descriptor: int) -> None:
    """Searches texts until the process at the other end of the pipe is gone."""
    serve_limited(descriptor, _answer)


def _answer(message: bytes) -> bytes:
    key, function, arguments = pickle.loads(message)
    found: object = None
    if function is _read:
        _tokenizers[key] = _read(*arguments)
    elif key in _tokenizers:
        try:
            with without_panics_printed():
                found = function(_tokenizers[key], *arguments)
        except UserError as error:
            found = error
    return pickle.dumps(found)


def _read(content: str, has_no_controls: bool) -> tokenizers.Tokenizer:
    read = tokenizers.Tokenizer.from_str(content)
    read.encode_special_tokens = has_no_controls
    return read
