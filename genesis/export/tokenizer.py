"""Compares a tokenizer of Hugging Face's with ours: both must give the same ids for all test texts."""

import random
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.export.texts import SCRIPTS
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.huggingface import open_library, read_json
from genesis.tokenizer.limited import TextSearch
from genesis.tokenizer.limits import list_expressions
from genesis.tokenizer.tokenizer import Tokenizer

_SPACE_MARK: Final = "\u2581"
"""The replacement of spaces in the pieces of many tokenizers, which makes a text with this character a hard case."""
_CHARACTERS_AT_ONCE = 64
_SYMBOLS: Final = "control symbols"
_NUM_PIECE_TEXTS = 2000
_REMEDY: Final = "use one of `genesis tokenizer train`, or --format safetensors"
_PIECES_IN_TEXT = 12
_RUN_LENGTHS = (*range(2, 40), 100, 257)


def compare_fast_tokenizer(tokenizer: Tokenizer, fast: bytes, *, left_out: str = "") -> dict[str, int]:
    """Returns the result of `compare_tokenizers` for the content of a `tokenizer.json`.

    Raises:
        UserError: A text is encoded or decoded differently, or the content is not a tokenizer.
    """
    files = {FAST_NAME: fast}
    theirs = open_library(files)
    theirs.encode_special_tokens = True
    texts = TextSearch(theirs, list_expressions(read_json(files, FAST_NAME)))
    return compare_tokenizers(
        tokenizer,
        lambda text: texts.encode(text).tolist(),
        lambda ids: texts.decode(ids, has_controls=True),
        left_out=left_out,
    )


def compare_tokenizers(
    tokenizer: Tokenizer,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    *,
    left_out: str = "",
    remedy: str = _REMEDY,
    num_pieces: int | None = None,
    num_runs: int | None = None,
) -> dict[str, int]:
    """Compares ids and decoded text for all test texts, and returns the number of texts of each kind.

    Args:
        tokenizer: Our tokenizer.
        encode: The other tokenizer's encoding, without bos and eos.
        decode: The other tokenizer's decoding.
        left_out: Characters to remove from the texts, because the other tokenizer changes them.
        remedy: What the user can do about a difference.
        num_pieces: Number of pieces to compare one by one, spread evenly over the vocabulary; None for all.
        num_runs: Number of runs of one character, spread evenly; None for all.

    Raises:
        UserError: A text is encoded or decoded differently; the message quotes it.
    """
    counts: dict[str, int] = {}
    none_of_them = str.maketrans("", "", left_out)
    kinds = {kind: list(texts) for kind, texts in _comparison_texts(tokenizer, num_pieces, num_runs)}
    all_texts = [(kind, text) for kind, texts in kinds.items() for text in texts]
    with stage("comparing the tokenizers", len(all_texts), "texts") as shown:
        for kind, full_text in shown.each(all_texts):
            text = full_text.translate(none_of_them)
            ours, theirs = tokenizer.encode(text), encode(text)
            if kind == _SYMBOLS and ours != theirs and not all(tokenizer.token_num_bytes[token] for token in theirs):
                read = f"{kind} that are none here"
                counts[read] = counts.get(read, 0) + 1
                continue
            if ours != theirs:
                raise UserError(
                    f"the tokenizer has no exact fast form: {text[:40]!r} ({kind}) is {_shorten(ours)} here and "
                    f"{_shorten(theirs)} there; {remedy}"
                )
            spelled = [token for token in theirs if tokenizer.token_num_bytes[token]]  # without the unknown token
            if decode(spelled) != (text if tokenizer.is_lossless else tokenizer.decode(ours)):
                raise UserError(
                    f"the fast tokenizer does not decode {text[:40]!r} ({kind}) exactly: nothing is exported"
                )
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _comparison_texts(
    tokenizer: Tokenizer, num_pieces: int | None, num_runs: int | None
) -> Iterator[tuple[str, Iterable[str]]]:
    yield "bytes", (chr(code) for code in range(256))
    yield "characters", _every_character()
    yield "scripts", (text for text in SCRIPTS.values())
    yield "pieces", _piece_texts(tokenizer, num_pieces)
    yield "runs", _spread(list(_run_texts(tokenizer)), num_runs)
    yield _SYMBOLS, (f"a{piece} {piece}b" for piece in tokenizer.pieces[:300])
    yield (
        "spaces",
        (_SPACE_MARK, f" {_SPACE_MARK} {_SPACE_MARK}{_SPACE_MARK}x", "", " ", "\t \r\n  \n", "a  b   c    d"),
    )


def _every_character() -> Iterator[str]:
    """Yields every assigned character, first one of each category alone, then many in one text."""
    by_category: dict[str, str] = {}
    characters = []
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category == "Cs" or (category in ("Cn", "Co") and category in by_category):
            continue
        by_category.setdefault(category, chr(code))
        characters.append(chr(code))
    yield from by_category.values()
    for start in range(0, len(characters), _CHARACTERS_AT_ONCE):
        yield "".join(characters[start : start + _CHARACTERS_AT_ONCE])


def _spread(texts: Sequence[str], limit: int | None) -> Sequence[str]:
    """Returns at most `limit` of the texts, spread evenly from the first one on; all without a limit."""
    if limit is None or len(texts) <= limit:
        return texts
    return [texts[number * len(texts) // limit] for number in range(limit)]


def _piece_texts(tokenizer: Tokenizer, limit: int | None) -> Iterator[str]:
    """Yields pieces one by one, and sequences of all pieces, which detect a wrong order of merges."""
    pieces = list(_piece_spellings(tokenizer))
    yield from _spread(pieces, limit)
    chooser = random.Random(0)
    for _ in range(_NUM_PIECE_TEXTS):
        yield "".join(chooser.choices(pieces, k=_PIECES_IN_TEXT))


def _run_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yields runs of each character that has a piece for a pair of it, which also detect a wrong order of merges."""
    pieces = _piece_spellings(tokenizer)
    for piece in sorted({piece[:1] for piece in pieces if len(set(piece)) == 1 and len(piece) > 1}):
        for length in _RUN_LENGTHS:
            yield piece * length
            yield f"x{piece * length}y"


def _piece_spellings(tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of every piece that consists of whole characters."""
    for token in range(tokenizer.vocab_size):
        if not (tokenizer.is_control(token) or tokenizer.is_byte(token)):
            with suppress(UnicodeDecodeError):
                yield tokenizer.decode_bytes([token]).decode()


def _shorten(ids: list[int]) -> str:
    return str(ids[:8])[:-1] + (", ...]" if len(ids) > 8 else "]")
