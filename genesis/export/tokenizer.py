"""The tokenizer as a fast one of Hugging Face's: the same ids for every text, or refused.

A space is spelled as itself in its pieces, not as SentencePiece's U+2581; so no normalizer is needed, and a U+2581 of
the text falls back to its three bytes, as ours has it.
"""

import json
import random
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import sentencepiece
import tokenizers
from tokenizers import decoders, models, processors

from genesis.errors import UserError
from genesis.export.texts import SCRIPTS
from genesis.tokenizer.tokenizer import Tokenizer

_SPACE_MARK: Final = "\u2581"
_UNK = "<unk>"
_CHARACTERS_AT_ONCE = 64
_NUM_PIECE_TEXTS = 2000
_PIECES_IN_TEXT = 12
_RUN_LENGTHS = (*range(2, 40), 100, 257)


def build_fast_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Returns the fast tokenizer that gives the same ids; bos is put before a text where special tokens are asked for.

    Raises:
        UserError: There is none: it is not byte-pair encoding with all bytes, or texts come out otherwise.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    unk_id = processor.unk_id()
    pieces = {
        token: _spell(piece) for token, piece in enumerate(tokenizer.pieces) if _is_text(tokenizer, processor, token)
    }
    ids = {piece: token for token, piece in pieces.items()}
    special = {token: piece for token, piece in enumerate(tokenizer.pieces) if tokenizer.is_control(token)}
    vocab = ids | {piece: token for token, piece in enumerate(tokenizer.pieces) if token not in pieces}
    if len(vocab) != tokenizer.vocab_size:
        raise UserError(
            "two pieces of this tokenizer are spelled alike: it has no exact fast form; nothing is exported"
        )
    scored = sorted(pieces, key=lambda token: (-processor.get_score(token), token))
    merges = [split for token in scored for split in _splits(pieces[token], ids)]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token=tokenizer.pieces[unk_id], byte_fallback=True, fuse_unk=False
    )
    fast = tokenizers.Tokenizer(model)
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens(
        [tokenizers.AddedToken(piece, special=True, normalized=False) for _, piece in sorted(special.items())]
    )
    bos = tokenizer.pieces[tokenizer.bos_id]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
    )
    fast.encode_special_tokens = True
    return fast


def tokenizer_config(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, Any]:
    """Returns the content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.pieces[tokenizer.bos_id],
        "eos_token": tokenizer.pieces[tokenizer.eos_id],
        "pad_token": tokenizer.pieces[tokenizer.pad_id],
        "unk_token": _UNK,
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        # For llama.cpp's converter, which takes a missing key for true and puts a space before every text.
        "add_prefix_space": False,
        # A text that spells a control symbol is text, as it was in training.
        "split_special_tokens": True,
    }


def write_tokenizer(tokenizer: Tokenizer, fast: tokenizers.Tokenizer, max_seq_len: int, directory: Path) -> None:
    """Writes the files of the tokenizer: the fast one, its configuration, and the SentencePiece model itself."""
    config = tokenizer_config(tokenizer, max_seq_len)
    names = {key: config[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    # Its own `save` says of a full disk neither that nor which.
    (directory / "tokenizer.json").write_text(fast.to_str(pretty=True), encoding="utf-8")
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / "tokenizer.model").write_bytes(tokenizer.model)


def compare_tokenizers(
    tokenizer: Tokenizer,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    *,
    has_space_mark: bool = True,
) -> dict[str, int]:
    """Returns how many texts of each kind were compared, ids and the way back; all are equal.

    Args:
        tokenizer: Ours.
        encode: The other's, without bos and eos.
        decode: The other's.
        has_space_mark: Whether texts hold U+2581, which tokenizers of others take for a space.

    Raises:
        UserError: A text comes out otherwise; the line quotes it.
    """
    counts: dict[str, int] = {}
    for kind, texts in _comparison_texts(tokenizer):
        for full_text in texts:
            text = full_text if has_space_mark else full_text.replace(_SPACE_MARK, "")
            ours, theirs = tokenizer.encode(text), encode(text)
            if ours != theirs:
                raise UserError(
                    f"the tokenizer has no exact fast form: {text[:40]!r} ({kind}) is {_shorten(ours)} here and "
                    f"{_shorten(theirs)} there; use one of `genesis tokenizer train`, or --format safetensors"
                )
            if decode(theirs) != text:
                raise UserError(f"the fast tokenizer does not give {text[:40]!r} ({kind}) back: nothing is exported")
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _is_text(tokenizer: Tokenizer, processor: Any, token: int) -> bool:
    return not (tokenizer.is_control(token) or tokenizer.is_byte(token) or processor.is_unused(token))


def _spell(piece: str) -> str:
    return piece.replace(_SPACE_MARK, " ")


def _splits(piece: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the ways to merge `piece`, the longest left part first: in a run of one character the odd one is last."""
    for cut in range(len(piece) - 1, 0, -1):
        if piece[:cut] in ids and piece[cut:] in ids:
            yield piece[:cut], piece[cut:]


def _comparison_texts(tokenizer: Tokenizer) -> Iterator[tuple[str, Iterable[str]]]:
    yield "bytes", (chr(code) for code in range(256))
    yield "characters", _every_character()
    yield "scripts", (text for text in SCRIPTS.values())
    yield "pieces", _piece_texts(tokenizer)
    yield "runs", _run_texts(tokenizer)
    yield "control symbols", (f"a{piece} {piece}b" for piece in tokenizer.pieces[:300])
    yield (
        "spaces",
        (_SPACE_MARK, f" {_SPACE_MARK} {_SPACE_MARK}{_SPACE_MARK}x", "", " ", "\t \r\n  \n", "a  b   c    d"),
    )


def _every_character() -> Iterator[str]:
    """Yields every assigned character that UTF-8 has, many in one text, first one of each category alone."""
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


def _piece_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yields every piece, and pieces in a row: where a wrong order of merges shows."""
    pieces = [
        _spell(piece)
        for token, piece in enumerate(tokenizer.pieces)
        if not (tokenizer.is_control(token) or tokenizer.is_byte(token))
    ]
    yield from pieces
    chooser = random.Random(0)
    for _ in range(_NUM_PIECE_TEXTS):
        yield "".join(chooser.choices(pieces, k=_PIECES_IN_TEXT))


def _run_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yields runs of each character that has a piece of two of it: the other place where the order of merges shows."""
    for piece in sorted({_spell(piece)[:1] for piece in tokenizer.pieces if len(set(piece)) == 1 and len(piece) > 1}):
        for length in _RUN_LENGTHS:
            yield piece * length
            yield f"x{piece * length}y"


def _shorten(ids: list[int]) -> str:
    return str(ids[:8])[:-1] + (", ...]" if len(ids) > 8 else "]")
