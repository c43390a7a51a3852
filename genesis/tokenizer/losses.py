"""What a tokenizer does not give back of a text, found by texts that it encodes and decodes."""

from typing import Final

from genesis.tokenizer.tokenizer import Tokenizer

_PROBES: Final = (
    ("lower-cases letters", "aB", "ab"),
    ("strips accents", "a\u00e9", "ae"),
    ("replaces characters by compatible ones", "a\ufb01", "afi"),
    ("drops spaces at the ends", " a ", "a"),
    ("joins spaces", "a  b", "a b"),
    ("makes spaces of line breaks", "a\nb", "a b"),
    ("drops line breaks", "a\nb", "ab"),
)
_PUNCTUATED: Final = "a-b (c), d."
_RARE: Final = "a\u4f60\u0531\U0001f469\u2603"


def find_losses(tokenizer: Tokenizer) -> str | None:
    """Returns what a tokenizer changes in texts, such as "lower-cases letters", for one line; None if nothing.

    Texts that Unicode takes for equal, and control characters, are no change here.
    """
    if tokenizer.is_lossless:
        return None

    def round_trip(text: str) -> str:
        return tokenizer.decode(tokenizer.encode(text))

    found = [loss for loss, text, changed in _PROBES if round_trip(text) == changed]
    if moves_spaces(tokenizer):
        found.append("moves spaces beside punctuation")
    if len(round_trip(_RARE)) < len(_RARE):
        found.append("drops characters without a token")
    return ", ".join(found) or None


def moves_spaces(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer puts spaces beside punctuation, as WordPiece does: its words begin with a space."""
    punctuated = tokenizer.decode(tokenizer.encode(_PUNCTUATED))
    return punctuated != _PUNCTUATED and punctuated.replace(" ", "") == _PUNCTUATED.replace(" ", "")


def describe_losses(tokenizer: Tokenizer) -> str | None:
    """Returns a line about what a tokenizer does not give back; None if it gives back all texts."""
    losses = find_losses(tokenizer)
    if losses is None:
        return None
    return (
        f"the tokenizer does not give back every text: it {losses}; bits per byte count the bytes of what it gives back"
    )


def writes(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a tokenizer gives back a text, alone or within others, so that generated text can have it."""
    contexts = ("{}", "a{}a", "a {} a", "a{} a", "a {}a")
    return tokenizer.is_lossless or any(
        text in tokenizer.decode(tokenizer.encode(context.format(text))) for context in contexts
    )
