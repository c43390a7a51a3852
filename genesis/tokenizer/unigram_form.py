"""Converts a SentencePiece model of the type unigram to the files of a fast tokenizer, by which its ids are computed.

SentencePiece normalises a text by its table, joins and trims spaces, and finds the most likely pieces. The library
`tokenizers` has each of these steps. Both give the same ids, except where a character that the table changes stands
beside one that belongs to it, such as an accent; there the fast form counts, as in transformers.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.tokenizer.fast_form import CONFIG_NAME, FAST_NAME
from genesis.tokenizer.limits import check_charsmap
from genesis.tokenizer.train import read_model

_UNIGRAM: Final = 1
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE_MARK: Final = "\u2581"
_RUNS: Final = " {2,}"
_ENDS: Final = r"\A | \z"


def is_unigram(model: bytes) -> bool:
    """Whether the content of a SentencePiece model's file is of the type unigram."""
    try:
        content = read_model(model)
    except ValueError:
        return False
    kind: int = content.trainer_spec.model_type
    return bool(content.pieces) and kind == _UNIGRAM


def convert_unigram(model: bytes) -> dict[str, bytes]:
    """Returns `tokenizer.json` and `tokenizer_config.json` of a SentencePiece model of the type unigram.

    Raises:
        UserError: The model has an option that the fast form lacks, or its table makes long texts of a character.
    """
    content = read_model(model)
    trainer, normalizer = content.trainer_spec, content.normalizer_spec
    if trainer.treat_whitespace_as_suffix:
        raise UserError("it puts spaces behind words (treat_whitespace_as_suffix): no fast form has this")
    charsmap = normalizer.precompiled_charsmap
    check_charsmap(charsmap)
    steps: list[dict[str, Any]] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if normalizer.remove_extra_whitespaces:
        steps += [
            {"type": "Replace", "pattern": {"Regex": pattern}, "content": written}
            for pattern, written in ((_RUNS, " "), (_ENDS, ""))
        ]
    space = {
        "type": "Metaspace",
        "replacement": _SPACE_MARK,
        "prepend_scheme": "always" if normalizer.add_dummy_prefix else "never",
        "split": trainer.split_by_whitespace,
    }
    decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    kinds = [piece.type for piece in content.pieces]
    if _UNKNOWN not in kinds:
        raise UserError("it has no piece for unknown characters, so that it cannot encode every text")
    named = {"bos": trainer.bos_id, "eos": trainer.eos_id, "pad": trainer.pad_id, "unk": kinds.index(_UNKNOWN)}
    pieces = [piece.piece for piece in content.pieces]
    tokens = {name: pieces[token] for name, token in named.items() if 0 <= token < len(pieces)}
    fast = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _describe_added(token, pieces[token], is_special=kind != _USER_DEFINED)
            for token, kind in enumerate(kinds)
            if kind not in (_NORMAL, _BYTE)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": space,
        "post_processor": None if "bos" not in tokens else _put_before_text(tokens["bos"], named["bos"]),
        "decoder": {"type": "Sequence", "decoders": [*decoders, space]} if trainer.byte_fallback else space,
        "model": {
            "type": "Unigram",
            "unk_id": named["unk"],
            "vocab": [[piece.piece, piece.score] for piece in content.pieces],
            "byte_fallback": trainer.byte_fallback,
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": piece for name, piece in tokens.items()},
        "clean_up_tokenization_spaces": False,
    }
    return {FAST_NAME: _to_json(fast), CONFIG_NAME: _to_json(config)}


def _describe_added(token: int, piece: str, *, is_special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": piece, **flags, "special": is_special}


def _put_before_text(bos: str, token: int) -> dict[str, Any]:
    symbol = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [symbol, first],
        "pair": [symbol, first, symbol, second],
        "special_tokens": {bos: {"id": bos, "ids": [token], "tokens": [bos]}},
    }


def _to_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
