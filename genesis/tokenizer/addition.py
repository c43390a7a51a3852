"""Adds special tokens to the files of a tokenizer; new ids follow the old ones, and no other id changes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import tokenizers

from genesis.base.errors import UserError, numbered
from genesis.tokenizer.fast_form import CONFIG_NAME, FAST_NAME, SPECIAL_NAME
from genesis.tokenizer.huggingface import (
    GENERATION_NAME,
    TEMPLATE_NAME,
    open_library,
    read_json,
)
from genesis.tokenizer.train import MODEL_NAME, read_model

_MAX_CHARS: Final = 200


@dataclass(frozen=True, kw_only=True)
class TokenAddition:
    """What is added to a tokenizer.

    Args:
        tokens: The spellings of the new special tokens, in the order of their ids.
        eos: The spelling of the token, new or not, that ends documents and generated text from now on; None for no
            change.
        chat_template: The Jinja template that writes conversations from now on; None for no change.

    Raises:
        UserError: Nothing is added or changed, or a spelling cannot be a special token.
    """

    tokens: tuple[str, ...]
    eos: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not self.tokens and self.eos is None and self.chat_template is None:
            raise UserError(
                "no token to add: give spellings such as '<|tool|>', or --eos or --chat_template for a model that has "
                "its tokens"
            )
        for token in self.tokens:
            if not token or token != token.strip():
                raise UserError(
                    f"the token {token!r} is empty or has spaces at its ends: give a spelling like '<|tool|>'"
                )
            if len(token) > _MAX_CHARS:
                raise UserError(
                    f"the token {token[:20]!r}... has {numbered(len(token), 'characters')}: give at most {_MAX_CHARS}"
                )
            if any("\ud800" <= character <= "\udfff" for character in token):
                raise UserError(f"the token {token!r} is not valid Unicode: give a spelling like '<|tool|>'")
            if self.tokens.count(token) > 1:
                raise UserError(f"the token {token!r} is given twice")


def extend_huggingface(files: Mapping[str, bytes], addition: TokenAddition) -> dict[str, bytes]:
    """Returns the files of a `tokenizer.json` with more special tokens.

    Raises:
        UserError: A token exists, or the token that is to be eos does not.
    """
    # Tokens that only tokenizer_config.json adds have the next ids, so they join tokenizer.json before the new ones.
    built = open_library(files)
    _check_new(addition.tokens, built.get_vocab(with_added_tokens=True))
    built.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in addition.tokens])
    changed = {**files, FAST_NAME: built.to_str(pretty=True).encode()}
    if addition.eos is not None:
        eos_id = built.token_to_id(addition.eos)
        if eos_id is None:
            raise UserError(f"eos is {addition.eos!r}, which is no token of the tokenizer: add it, or name another one")
        for name in {CONFIG_NAME, *(files.keys() & {SPECIAL_NAME})}:
            changed[name] = _to_json({**read_json(files, name), "eos_token": addition.eos})
        if GENERATION_NAME in files:
            changed[GENERATION_NAME] = _add_stop_id(read_json(files, GENERATION_NAME), eos_id)
    if addition.chat_template is not None:
        config = read_json(changed, CONFIG_NAME)
        config.pop("chat_template", None)  # the file is the only place of the template
        changed |= {CONFIG_NAME: _to_json(config), TEMPLATE_NAME: addition.chat_template.encode()}
    return changed


def extend_sentencepiece(files: Mapping[str, bytes], addition: TokenAddition) -> dict[str, bytes]:
    """Returns a SentencePiece model with more control symbols.

    Raises:
        UserError: A token exists, or something is added that the file cannot hold.
    """
    if addition.eos is not None or addition.chat_template is not None:
        raise UserError(
            "a SentencePiece tokenizer keeps its eos and holds no chat template: leave out --eos and --chat_template, "
            "and give the template to the commands that render conversations"
        )
    content = read_model(files[MODEL_NAME])
    _check_new(addition.tokens, {one.piece: token for token, one in enumerate(content.pieces)})
    for token in addition.tokens:
        content.pieces.add(piece=token, score=0.0, type=content.SentencePiece.CONTROL)
    content.trainer_spec.vocab_size = len(content.pieces)
    return {MODEL_NAME: content.SerializeToString()}


def _check_new(tokens: tuple[str, ...], vocabulary: Mapping[str, int]) -> None:
    for token in tokens:
        if token in vocabulary:
            raise UserError(
                f"the tokenizer has the token {token!r} already, with the id {vocabulary[token]}: leave it out"
            )


def _add_stop_id(content: dict[str, Any], eos_id: int) -> bytes:
    """Returns `generation_config.json` with one more id that ends text."""
    held = content.get("eos_token_id")
    others = held if isinstance(held, list) else [] if held is None else [held]
    return _to_json({**content, "eos_token_id": [eos_id, *(token for token in others if token != eos_id)]})


def _to_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
