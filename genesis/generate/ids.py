"""Ids in place of text, for models that were trained on tokens without a tokenizer."""

import re

from genesis.base.errors import UserError
from genesis.tokenizer.tokenizer import StreamingDecoder, Tokenizer


class IdWriter:
    """Writes ids as numbers with a space before each, where a `StreamingDecoder` would write their text."""

    def feed(self, token: int) -> str:
        """Returns the text of one id."""
        return f" {token}"

    def flush(self) -> str:
        """Returns an empty text, because no id is held back."""
        return ""


def build_writer(tokenizer: Tokenizer | None) -> StreamingDecoder | IdWriter:
    """Returns the object that turns new tokens into text, or into numbers if there is no tokenizer."""
    return IdWriter() if tokenizer is None else StreamingDecoder(tokenizer)


def write_ids(ids: tuple[int, ...]) -> str:
    """Returns ids as text, in the form that `parse_ids` reads.

    >>> write_ids((5, 17))
    '5 17'
    """
    return " ".join(map(str, ids))


def parse_ids(text: str, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids in a text, which are separated by spaces or commas.

    Args:
        text: Ids such as `5 17 300`.
        vocab_size: The model's vocabulary size.

    Raises:
        UserError: The text has no ids, or one of them is outside the model's vocabulary.
    """
    words = re.findall(r"[^\s,]+", text)
    wrong = next((word for word in words if not re.fullmatch(r"[0-9]{1,10}", word) or int(word) >= vocab_size), None)
    if wrong is not None or not words:
        shown = repr(text[:60]) if wrong is None else repr(wrong[:60])
        raise UserError(f"prompt ids hold {shown}: give ids from 0 to {vocab_size - 1}, separated by spaces")
    return tuple(map(int, words))
