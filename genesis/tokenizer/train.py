"""Trains the tokenizer: SentencePiece byte-pair encoding under which every text round-trips byte for byte.

The ids of a trained tokenizer begin the same way at any vocabulary size:

    0  <pad>         4  <|system|>       8..15   <|reserved_0|> .. <|reserved_7|>
    1  <unk>         5  <|user|>        16..271  the bytes 0x00 .. 0xFF
    2  <s>   bos     6  <|assistant|>   272..    pieces learned from the text, then single characters
    3  </s>  eos     7  <|end|>

Ids below 16 are control symbols: no text is encoded to them, not even the text `<|user|>`.
"""

import importlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from genesis.base.errors import UserError
from genesis_callbacks.base.files import replace_file

MODEL_NAME = "tokenizer.model"
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
RESERVED_TOKENS = tuple(f"<|reserved_{index}|>" for index in range(8))
CONTROL_SYMBOLS = CHAT_TOKENS + RESERVED_TOKENS

_CHUNK_CHARS = 4096
_NUM_THREADS = 16
"""A value that SentencePiece writes into the model: a constant, so that every machine writes the same file."""
_UNTRAINABLE = re.compile("[\0\u2581\u2585]+")
"""SentencePiece drops every line with one of these: its end-of-string, its space and its unknown character."""


@dataclass(frozen=True)
class TokenizerOptions:
    """Options of the training of a tokenizer.

    Args:
        vocab_size: Total number of ids: the control symbols, the 256 bytes and the learned pieces.
        character_coverage: Share of the text's characters with a piece of their own; the others are encoded as bytes.
    """

    vocab_size: int = 49_152
    character_coverage: float = 0.9995

    def __post_init__(self) -> None:
        smallest = EOS_ID + 1 + len(CONTROL_SYMBOLS) + 256
        if self.vocab_size <= smallest:
            raise UserError(
                f"vocab_size {self.vocab_size} is too small: bytes and control symbols need {smallest}; raise it"
            )
        if not 0.98 <= self.character_coverage <= 1.0:
            raise UserError(f"character_coverage {self.character_coverage} is not between 0.98 and 1")


def train_tokenizer(texts: Iterable[str], options: TokenizerOptions, out: Path) -> Path:
    """Trains on `texts`, writes the model into the directory `out` and returns its path.

    The same texts and options give the same file. Training holds all of `texts` in memory: give it a sample
    (`genesis.data.sources.sample_texts`) of a large corpus.

    Raises:
        UserError: There is no text, or the vocabulary is too large or too small for it; the message names the bound. Or
            `texts` raises it.
    """
    model = io.BytesIO()
    faults: list[UserError] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_iterate_chunks(_watch(texts, faults)),
            model_writer=model,
            model_type="bpe",
            vocab_size=options.vocab_size,
            character_coverage=options.character_coverage,
            num_threads=_NUM_THREADS,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_piece="<pad>",
            control_symbols=list(CONTROL_SYMBOLS),
            max_sentence_length=4 * _CHUNK_CHARS,
            minloglevel=3,
        )
    except RuntimeError as error:
        if faults:
            raise faults[0] from None
        raise _explain(str(error), options) from None
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / MODEL_NAME, model.getvalue())
    return out / MODEL_NAME


def _watch(texts: Iterable[str], faults: list[UserError]) -> Iterator[str]:
    """Yields the texts, and keeps an error, of which SentencePiece raises no more than the text."""
    try:
        yield from texts
    except UserError as error:
        faults.append(error)
        raise


def _iterate_chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for part in _UNTRAINABLE.split(text):
            for start in range(0, len(part), _CHUNK_CHARS):
                yield part[start : start + _CHUNK_CHARS]


def _explain(message: str, options: TokenizerOptions) -> Exception:
    if largest := re.search(r"Vocabulary size too high.*<= (\d+)", message):
        return UserError(
            f"vocab_size {options.vocab_size} is too large for this text: choose {largest[1]} or less or give more text"
        )
    if sizes := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(
            f"vocab_size {options.vocab_size} is too small for this text's characters: choose more than {sizes[1]}, "
            f"or lower character_coverage ({options.character_coverage})"
        )
    if "sentences_.empty()" in message:
        return UserError("the sources have no text to train a tokenizer on; give other paths")
    return RuntimeError(message)


def read_model(model: bytes) -> Any:
    """Returns the content of a SentencePiece model's file as a message, whose fields can be changed.

    protobuf, which takes long to import, is imported here: other kinds of tokenizers do not need it.

    Raises:
        ValueError: The file is no such model.
    """
    content = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    try:
        content.ParseFromString(model)
    except importlib.import_module("google.protobuf.message").DecodeError as error:
        raise ValueError(str(error)) from None
    return content
