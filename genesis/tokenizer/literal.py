"""Control symbols that are only text: what a message spells must not become a symbol of the template.

A *hidden* spelling has a noncharacter of Unicode, which no text uses, in place of its first character. Texts keep their
length, so a template may write hidden spellings like any text, and offsets hold. `encode_with_controls` and
`encode_with_offsets` of a tokenizer take a hidden spelling for the text that it stands for.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

_FIRST: Final = 0xFDD0
_NUM_NONCHARACTERS: Final = 32
_HIDDEN: Final = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + _NUM_NONCHARACTERS - 1)}]")


class LiteralControls:
    """Hides the spellings of control symbols in texts, and finds hidden ones.

    Args:
        spellings: The spellings of the symbols. Those that begin with one of the first 32 characters, in their order,
            can be hidden.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        spelled = sorted(filter(None, spellings), key=lambda spelling: (-len(spelling), spelling))
        self._characters = sorted({spelling[0] for spelling in spelled})[:_NUM_NONCHARACTERS]
        self._to_hidden = {character: chr(_FIRST + index) for index, character in enumerate(self._characters)}
        self._to_plain = {hidden: character for character, hidden in self._to_hidden.items()}
        plain = [spelling for spelling in spelled if spelling[0] in self._to_hidden]
        self._plain = re.compile("|".join(map(re.escape, plain)) or r"(?!)")
        self._both = re.compile(
            "|".join(re.escape(one) for each in plain for one in (each, self._turn(each))) or r"(?!)"
        )

    def hide(self, value: Any) -> Any:
        """Returns a text with hidden spellings, or a value of JSON with such texts; what spells none stays itself."""
        if isinstance(value, str):
            if not any(character in value for character in self._characters):
                return value
            while (hidden := self._plain.sub(lambda found: self._turn(found[0]), value)) != value:
                value = hidden
            return value
        if isinstance(value, Mapping):
            return {key: self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def swap(self, text: str) -> str:
        """Returns a text in which hidden spellings are plain, and plain ones hidden."""
        return self._both.sub(lambda found: self._turn(found[0]), text)

    def reveal(self, text: str) -> str:
        """Returns a text in which all spellings are plain."""
        return self._both.sub(lambda found: self._to_plain.get(found[0][0], found[0][0]) + found[0][1:], text)

    def _turn(self, spelling: str) -> str:
        first = spelling[0]
        return self._to_hidden.get(first, self._to_plain.get(first, first)) + spelling[1:]


def may_have_hidden(text: str) -> bool:
    """Returns whether a text has a character with which a hidden spelling begins."""
    return _HIDDEN.search(text) is not None
