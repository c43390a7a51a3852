"""The form that transformers opens: a fast tokenizer by merges, in the order of SentencePiece's scores.

A space is spelled as itself in its pieces, not as SentencePiece's U+2581; so no normalizer is needed, and a U+2581 of
the text falls back to its three bytes, as ours has it. The files are JSON and follow from the vocabulary alone, so that
the library `tokenizers` is not needed to write them. Whether the form is exact is compared by the export.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from genesis.errors import UserError

FAST_NAME: Final = "tokenizer.json"
CONFIG_NAME: Final = "tokenizer_config.json"
SPECIAL_NAME: Final = "special_tokens_map.json"


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary of byte-pair encoding with byte fallback.

    Args:
        pieces: Of each id, text spelled as itself.
        text_ids: Ids that stand for their piece as text, in the order in which pairs are merged to them.
        control_ids: Ids that stand for no text, rising.
        bos_id: Put before a text where special tokens are asked for.
        eos_id: Ends a document.
        pad_id: Fills places without a token; None where there is none.
        unk_id: Of a character without bytes, which there is none of.
        has_prefix_space: Whether a space is put before a text.
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
    """Returns the files of the fast tokenizer by name; bos is put before a text where special tokens are asked for.

    Raises:
        UserError: There is no exact one: two pieces are spelled alike.
    """
    config = _describe_config(vocabulary, max_seq_len)
    names: dict[str, Any] = {
        key: config[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if key in config
    }
    # The library writes no newline at the end of its file, and people's editors find one in the others.
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
        # For llama.cpp's converter, which takes a missing key for true and puts a space before every text.
        "add_prefix_space": vocabulary.has_prefix_space,
        # A text that spells a control symbol is text, as it was in training.
        "split_special_tokens": True,
    }


def _splits(piece: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the ways to merge `piece`, the longest left part first: in a run of one character the odd one is last."""
    for cut in range(len(piece) - 1, 0, -1):
        if piece[:cut] in ids and piece[cut:] in ids:
            yield piece[:cut], piece[cut:]


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()
