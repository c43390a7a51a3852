"""The bytes of each piece of a `tokenizer.json`, by its model and its decoder.

Pieces of byte-pair encoding are bytes by GPT-2's map, or characters with a fallback to bytes. Those of unigram models
have a mark for a space. Those of WordPiece are words with a space before them, or ends of words, which a prefix marks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import decoders

from genesis.base.errors import UserError
from genesis.tokenizer.limits import iterate_steps

SPACE_MARK: Final = "\u2581"
NO_EXACT_BYTES: Final = "only tokenizers whose tokens spell bytes can be read"

Spelling = Callable[[str], bytes]


def find_spelling(content: Mapping[str, Any]) -> Spelling:
    """Returns the function from a piece to its bytes, which is not that of control symbols.

    Raises:
        UserError: No function is known to be correct for this tokenizer.
    """
    model = content.get("model") or {}
    steps = {one.get("type"): one for one in iterate_steps(content.get("decoder"), "decoders")}
    kind = find_model_type(content)
    if kind not in ("BPE", "Unigram", "WordPiece"):
        raise UserError(f"its model is {kind}; {NO_EXACT_BYTES}")
    for key in ("dropout", "end_of_word_suffix", *(["continuing_subword_prefix"] if kind == "BPE" else [])):
        if model.get(key):
            raise UserError(f"its {key} is {model[key]!r}; {NO_EXACT_BYTES}")
    if "ByteLevel" in steps:
        return _spell_bytes
    is_marked = "Metaspace" in steps or SPACE_MARK in str(steps.get("Replace"))
    if model.get("byte_fallback") and "ByteFallback" in steps:
        return _spell_marked_characters if is_marked else _spell_characters
    if kind == "Unigram" and is_marked and not model.get("byte_fallback"):
        return lambda piece: piece.replace(SPACE_MARK, " ").encode()
    if kind == "WordPiece" and steps.keys() == {"WordPiece"}:
        return _find_word_spelling(model, steps["WordPiece"])
    raise UserError(f"its decoder is {', '.join(map(str, steps)) or None}; {NO_EXACT_BYTES}")


def find_model_type(content: Mapping[str, Any]) -> str | None:
    """Returns the type of a tokenizer's model; the oldest files do not name byte-pair encoding."""
    model = content.get("model") or {}
    kind: str | None = model.get("type", "BPE" if "merges" in model else None)
    return kind


def find_unknown(content: Mapping[str, Any]) -> str | None:
    """Returns the piece to which a unigram model or WordPiece encodes what it does not know; None for other models.

    Raises:
        UserError: There is no such piece, so that some texts cannot be encoded.
    """
    kind, model = find_model_type(content), content.get("model") or {}
    vocabulary = model.get("vocab")
    if kind == "WordPiece":
        piece = model.get("unk_token")
        if isinstance(vocabulary, dict) and piece in vocabulary:
            return str(piece)
        raise UserError(f"its unk_token {piece!r} is not in its vocabulary, so that it cannot encode every text")
    if kind == "Unigram":
        number = model.get("unk_id")
        if isinstance(vocabulary, list) and isinstance(number, int) and 0 <= number < len(vocabulary):
            return str(vocabulary[number][0])
        raise UserError(f"its unk_id {number!r} is no id of its vocabulary, so that it cannot encode every text")
    return None


def _spell_bytes(piece: str) -> bytes:
    """Returns the bytes of a piece whose characters stand for bytes by GPT-2's map; other pieces are plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def _spell_characters(piece: str) -> bytes:
    if len(piece) == len("<0x41>") and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:-1], 16)])
    return piece.encode()


def _spell_marked_characters(piece: str) -> bytes:
    return _spell_characters(piece).replace(SPACE_MARK.encode(), b" ")


def _find_word_spelling(model: Mapping[str, Any], step: Mapping[str, Any]) -> Spelling:
    """Returns what the library's decoder writes for a piece behind another one."""
    prefix = model.get("continuing_subword_prefix")
    if not prefix or step.get("prefix") != prefix:
        raise UserError(f"its decoder joins words at {step.get('prefix')!r}, and its model at {prefix!r}")
    decoder = decoders.WordPiece(prefix=prefix, cleanup=bool(step.get("cleanup")))
    return lambda piece: decoder.decode(["a", piece])[1:].encode()


def _map_bytes() -> dict[str, int]:
    """Returns GPT-2's map from characters to bytes: printable ones stand for themselves, others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF: Final = _map_bytes()
