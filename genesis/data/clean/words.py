"""Divides a text into words and sentences, and hashes them, for the comparisons of filters and deduplications.

datatrove's own tokenizers need spaCy or a model from the network for each language; one rule for all scripts needs
neither. A word is a run of characters between spaces, as in Gopher's rules, without the punctuation around the run; a
run of punctuation alone is also a word. A character of a script that is written without spaces counts as a word.
"""

from collections.abc import Iterator
from typing import Final

import regex
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TERMINAL_PUNCTUATION
from datatrove.utils.word_tokenizers import WordTokenizer

HASH: Final = HashConfig(precision=64, hash_fc="sha1")
"""datatrove's default, xxhash, fails with xxhash 4, which takes bytes alone."""

_UNSPACED: Final = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
_CORE: Final = rf"[\w--[{_UNSPACED}]]"
_WORD: Final = regex.compile(
    rf"{_CORE}(?:[^\s{_UNSPACED}]*{_CORE})?|[{_UNSPACED}]|(?<!\S)[^\w\s]+(?!\S)", regex.VERSION1
)
_SPACED_ENDS: Final = "".join(sorted(mark for mark in TERMINAL_PUNCTUATION if mark.isascii()))
_OTHER_ENDS: Final = "".join(sorted(mark for mark in TERMINAL_PUNCTUATION if not mark.isascii()))
_SENTENCE_END: Final = regex.compile(
    rf"[{regex.escape(_SPACED_ENDS)}]+[\"'”\u2019)\]]*(?=\s|$)|[{regex.escape(_OTHER_ENDS)}]+[\"'”\u2019)\]」』]*|\n+"
)


class Words(WordTokenizer):  # type: ignore[misc]
    """Divides a text of any language into words and sentences. All objects of this class are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words)

    def __hash__(self) -> int:
        return hash(Words)

    def word_tokenize(self, text: str) -> list[str]:
        """Returns the words of `text`."""
        return list(_WORD.findall(text))

    def sent_tokenize(self, text: str) -> list[str]:
        """Returns the sentences of `text`, without the space around them."""
        return [text[start:end].strip() for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Returns where each sentence of `text` begins and ends."""
        return list(self._spans(text))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        start = 0
        for match in _SENTENCE_END.finditer(text):
            if text[start : match.end()].strip():
                yield start, match.end()
                start = match.end()
        if text[start:].strip():
            yield start, len(text)
