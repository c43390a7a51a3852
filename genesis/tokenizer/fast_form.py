"""Converts a SentencePiece vocabulary to the files of a fast tokenizer, which transformers opens.

Merges have the order of SentencePiece's scores. Pieces contain a space as itself, not as SentencePiece's U+2581; so no
normalizer is needed, and a U+2581 in a text falls back to its three bytes, as in `SentencePieceTokenizer`. The files
are JSON and depend on the vocabulary alone, so that writing them does not need the library `tokenizers`. The export
compares the fast tokenizer with the original one.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from genesis.base.errors import UserError

FAST_NAME: Final = "tokenizer.json"
CONFIG_NAME: Final = "tokenizer_config.json"
SPECIAL_NAME: Final = "special_tokens_map.json"


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary of byte-pair encoding with byte fallback.

    Args:
        pieces: The piece of each id, with spaces as themselves.
        text_ids: Ids that stand for their piece as text, in the order of their merges.
        control_ids: Ids that stand for no text, in ascending order.
        bos_id: The id before a text if special tokens are requested.
        eos_id: The id at the end of a document.
        pad_id: The id that fills positions without a token; None if the vocabulary has no such id.
        unk_id: The id of unknown characters, which is never used because every character has bytes.
        has_prefix_space: Whether encoding adds a space before a text.
    """

    pieces: Sequence[str]
    text_ids: Sequence[int]
    control_ids: Sequence[int]
    bos_id: int
    eos_id: int
    pad_id: int | None
    unk_id: int
    has_prefix_space: bool = False


def describe_fast_tokenizer(vocabulary: Vocabulary, max_seq_len: int) -> dict[str, bytes]:
    """Returns the files of the fast tokenizer by name; it adds bos before a text if special tokens are requested.

    Raises:
        UserError: The vocabulary has no exact fast form, because two pieces have the same spelling.
    """
    config = _describe_config(vocabulary, max_seq_len)
    names: dict[str, Any] = {
        key: config[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if key in config
    }
    # The library writes no newline at the end of its own file; the other files end with one for people's editors.
    return {
        FAST_NAME: _to_json(_describe_tokenizer(vocabulary)),
        CONFIG_NAME: _to_json(config) + b"\n",
        SPECIAL_NAME: _to_json(names) + b"\n",
    }


def _describe_tokenizer(vocabulary: Vocabulary) -> dict[str, Any]:
    pieces = vocabulary.pieces
    ids = {pieces[token]: token for token in sorted(vocabulary.text_ids)}
    vocab = {piece: token for token, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise UserError(
            "two pieces of this tokenizer have the same spelling: it has no exact fast form; nothing is exported"
        )
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    stripped = [strip] if vocabulary.has_prefix_space else []
    bos = {"SpecialToken": {"id": pieces[vocabulary.bos_id], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_describe_control(token, pieces[token]) for token in vocabulary.control_ids],
        "normalizer": {"type": "Prepend", "prepend": " "} if vocabulary.has_prefix_space else None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, bos, second],
            "special_tokens": {
                pieces[vocabulary.bos_id]: {
                    "id": pieces[vocabulary.bos_id],
                    "ids": [vocabulary.bos_id],
                    "tokens": [pieces[vocabulary.bos_id]],
                }
            },
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[vocabulary.unk_id],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(split) for token in vocabulary.text_ids for split in _splits(pieces[token], ids)],
        },
    }


def _describe_control(token: int, piece: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": piece, **flags}


def _describe_config(vocabulary: Vocabulary, max_seq_len: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.pieces[vocabulary.bos_id],
        "eos_token": vocabulary.pieces[vocabulary.eos_id],
        **({} if vocabulary.pad_id is None else {"pad_token": vocabulary.pieces[vocabulary.pad_id]}),
        "unk_token": vocabulary.pieces[vocabulary.unk_id],
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        # For llama.cpp's converter: if the key is missing, it adds a space before every text.
        "add_prefix_space": vocabulary.has_prefix_space,
        # The spelling of a control symbol in a text is read as text, as in training.
        "split_special_tokens": True,
    }


def _splits(piece: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the pairs that merge to `piece`, longest left part first: a run of a character ends with the odd one."""
    for cut in range(len(piece) - 1, 0, -1):
        if piece[:cut] in ids and piece[cut:] in ids:
            yield piece[:cut], piece[cut:]


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()
