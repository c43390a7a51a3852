"""Tokenizers of SentencePiece.

Three things are added to what the library does:

- U+2581, which SentencePiece treats as a space, is encoded as its three bytes, so that every text round-trips.
- A long text is encoded in chunks cut where no piece can reach across. The ids are the same, the speed does not fall
  with the length of the document, and memory stays small.
- Decoding joins the bytes of the ids, so that half a character is never lost or printed broken.

If a model adds a space before each text, as those of Llama 2 and Mistral do, this module adds the space itself, so that
a text in chunks gets only one. `decode` removes the space, and the first id of a text counts its byte.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Final

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.tokenizer.fast_form import Vocabulary, describe_fast_tokenizer
from genesis.tokenizer.files import TRAIN_REMEDY, hash_files
from genesis.tokenizer.limits import check_charsmap
from genesis.tokenizer.literal import LiteralControls, may_have_hidden
from genesis.tokenizer.tokenizer import find_offsets, is_utf8
from genesis.tokenizer.train import MODEL_NAME, read_model

_SPACE_MARK: Final = "\u2581"
"""SentencePiece's stand-in for a space inside pieces."""
_CHUNK_CHARS: Final = 2048
_PROBE: Final = "  two spaces\t\r\n\0 \u2581\ufb01 \u0958e\u0301 <s> <|user|> \U0001f469\u200d\U0001f467 \U0010ffff "
"""A text that does not round-trip if a tokenizer normalises, trims, or has no fallback to bytes."""


class SentencePieceTokenizer:
    """A trained SentencePiece model: a `genesis.tokenizer.tokenizer.Tokenizer`.

    Args:
        model: The content of the model's file.

    Raises:
        UserError: The bytes are not a SentencePiece model, or the model does not round-trip text.
    """

    chat_template: Final = None
    is_lossless: Final = True
    kind: Final = "SentencePiece"
    packages: Final = ("sentencepiece",)
    altered_characters: Final = _SPACE_MARK
    has_unknown_expressions: Final = False

    def __init__(self, model: bytes) -> None:
        if not model:
            raise UserError(f"the file is empty; {TRAIN_REMEDY.replace('create one', 'create a tokenizer')}")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError):
            raise UserError(f"not a SentencePiece model; {TRAIN_REMEDY}") from None
        check_charsmap(read_model(model).normalizer_spec.precompiled_charsmap)
        self._prefix = " " if _has_dummy_prefix(self._processor) else ""
        if self._prefix:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=_drop_dummy_prefix(model))
        self.files: Mapping[str, bytes] = {MODEL_NAME: model}
        self.hash: str = hash_files(self.files)
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        pad_id: int = self._processor.pad_id()
        self.pad_id: int | None = None if pad_id < 0 else pad_id
        if min(self.bos_id, self.eos_id) < 0:
            raise UserError(f"this tokenizer lacks a bos or eos id; {TRAIN_REMEDY}")
        self.stop_ids: frozenset[int] = frozenset([self.eos_id])
        self.pieces: tuple[str, ...] = tuple(self._processor.id_to_piece(list(range(self.vocab_size))))
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        self.named_tokens: Mapping[str, str] = {
            name: self.pieces[token] for name, token in named.items() if token is not None
        }
        self._bytes = [self._bytes_of(token) for token in range(self.vocab_size)]
        self.token_num_bytes: NDArray[np.int32] = np.array([len(piece) for piece in self._bytes], dtype=np.int32)
        spelled = (len(piece.encode()) for piece in self.pieces)
        self._longest = max(*spelled, int(self.token_num_bytes.max()), 1)
        self._space_mark_ids = np.array([self._byte_id(byte) for byte in _SPACE_MARK.encode()], dtype=np.int32)
        self._can_cut = not any(_SPACE_MARK in piece.lstrip(_SPACE_MARK) for piece in self._text_pieces())
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise UserError(
                "decoding does not return the encoded text (the tokenizer normalises, trims or lacks byte fallback); "
                f"{TRAIN_REMEDY}"
            )

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without bos and eos."""
        ids: list[int] = self.encode_batch([text], num_threads=1)[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, without bos and eos; the number of threads does not change them."""
        chunks: list[str] = []
        bounds = [0]
        for text in texts:
            chunks.extend(self._cut(self._prefix + text if text else text))
            bounds.append(len(chunks))
        encoded = self._processor.encode(chunks, return_type="numpy", num_threads=num_threads)
        for index, chunk in enumerate(chunks):
            if chunk == _SPACE_MARK:
                encoded[index] = self._space_mark_ids
        return [
            encoded[start] if end - start == 1 else np.concatenate(encoded[start:end])
            for start, end in pairwise(bounds)
        ]

    def min_num_tokens(self, text: str) -> int:
        """Returns a number of ids that the text cannot go below: as if it had only the longest token."""
        return -(-len(text.encode()) // self._longest)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without control symbols and with U+FFFD for bytes that are not valid UTF-8."""
        return self.decode_bytes(ids).removeprefix(self._prefix.encode()).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the UTF-8 bytes of `ids`, which may begin or end within a character."""
        return b"".join([self._bytes[token] for token in ids])

    def spell(self, ids: Iterable[int], *, has_controls: bool) -> str:
        """Returns the text of ids as the fast tokenizer decodes it.

        The text differs from that of `decode` where bytes are not valid UTF-8: in a run of byte tokens that is not
        valid as a whole, each byte becomes U+FFFD.
        """
        parts = []
        shown = (token for token in ids if has_controls or not self.is_control(token))
        for is_byte, run in groupby(shown, self.is_byte):
            tokens = list(run)
            if is_byte:
                data = self.decode_bytes(tokens)
                parts.append(data.decode() if is_utf8(data) else "\ufffd" * len(data))
            else:
                parts += [self.pieces[token] if self.is_control(token) else self.decode([token]) for token in tokens]
        return "".join(parts).removeprefix(self._prefix)

    def encode_with_controls(self, text: str) -> list[int]:
        """Returns the ids of a text in which the spelling of a control symbol stands for that symbol."""
        ids: list[int] = self.encode_with_offsets(text)[0].tolist()
        return ids

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids of `encode_with_controls`, and in rows each one's start and end (exclusive) in characters."""
        parts = self._controls.split(text)
        ids = [np.empty(0, np.int32)]
        spellings: list[bytes] = []
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(np.array([self.token_id(part)], np.int32))
                spellings.append(part.encode())
            elif part:
                parts[index] = self.literal.reveal(part) if may_have_hidden(part) else part
                ids += self.encode_batch([parts[index]])
                spelled = [self._bytes[token] for token in ids[-1].tolist()]
                spelled[0] = spelled[0].removeprefix(self._prefix.encode())
                spellings += spelled
        return np.concatenate(ids), find_offsets("".join(parts), spellings)

    @cached_property
    def literal(self) -> LiteralControls:
        """Returns what hides spellings of control symbols."""
        return LiteralControls(self._spell_controls())

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        longest_first = sorted(self._spell_controls(), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _spell_controls(self) -> list[str]:
        return [self.pieces[token] for token in range(self.vocab_size) if self.is_control(token)]

    def is_control(self, token: int) -> bool:
        """Whether the id stands for no text (bos, eos, pad, unknown, chat and reserved tokens)."""
        return bool(self._processor.is_control(token) or self._processor.is_unknown(token))

    def is_byte(self, token: int) -> bool:
        """Whether the id spells one byte of a character that has no piece."""
        return bool(self._processor.is_byte(token))

    def huggingface_files(self, max_seq_len: int) -> Mapping[str, bytes]:
        """Returns the files of the fast tokenizer, and its configuration."""
        text_ids = [token for token in range(self.vocab_size) if self._is_text(token)]
        pieces = list(self.pieces)
        for token in text_ids:
            pieces[token] = pieces[token].replace(_SPACE_MARK, " ")
        vocabulary = Vocabulary(
            pieces=pieces,
            text_ids=sorted(text_ids, key=lambda token: (-self._processor.get_score(token), token)),
            control_ids=[token for token in range(self.vocab_size) if self.is_control(token)],
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            unk_id=self._processor.unk_id(),
            has_prefix_space=bool(self._prefix),
        )
        return describe_fast_tokenizer(vocabulary, max_seq_len)

    def token_id(self, piece: str) -> int:
        """Returns the id of a piece by its name, such as `<|user|>`.

        Raises:
            UserError: The tokenizer has no such piece.
        """
        token: int = self._processor.piece_to_id(piece)
        if self.pieces[token] != piece:  # an unknown piece has the id of the unknown symbol, which has a name, too
            raise UserError(f"the tokenizer has no token {piece!r}")
        return token

    def _bytes_of(self, token: int) -> bytes:
        if self.is_control(token):
            return b""
        if self.is_byte(token):
            return bytes([int(self.pieces[token][3:-1], 16)])  # <0x41>
        return self.pieces[token].replace(_SPACE_MARK, " ").encode()

    def _is_text(self, token: int) -> bool:
        return not (self.is_control(token) or self.is_byte(token) or self._processor.is_unused(token))

    def _byte_id(self, byte: int) -> int:
        token: int = self._processor.piece_to_id(f"<0x{byte:02X}>")
        return token

    def _text_pieces(self) -> Iterator[str]:
        for token, piece in enumerate(self.pieces):
            if not self.is_control(token) and not self.is_byte(token):
                yield piece

    def _cut(self, text: str) -> list[str]:
        """Returns chunks whose ids, joined, are those of the text."""
        if _SPACE_MARK not in text:
            return self._cut_at_spaces(text)
        chunks: list[str] = []
        first, *rest = text.split(_SPACE_MARK)
        chunks.extend(self._cut_at_spaces(first))
        for part in rest:
            chunks.append(_SPACE_MARK)
            chunks.extend(self._cut_at_spaces(part))
        return chunks

    def _cut_at_spaces(self, text: str) -> list[str]:
        # A piece contains spaces only at its beginning, so no piece crosses from a character to a following space.
        if not self._can_cut:
            return [text]
        chunks = []
        start = 0
        while len(text) - start > _CHUNK_CHARS:
            cut = text.find(" ", start + _CHUNK_CHARS)
            while cut > 0 and text[cut - 1] == " ":
                cut = text.find(" ", cut + 1)
            if cut < 0:
                break
            chunks.append(text[start:cut])
            start = cut
        chunks.append(text[start:])
        return chunks


def puts_space_before_text(model: bytes) -> bool:
    """Whether a model's file belongs to a tokenizer that adds a space before each text."""
    try:
        return _has_dummy_prefix(sentencepiece.SentencePieceProcessor(model_proto=model))
    except (RuntimeError, ValueError):
        return False


def _has_dummy_prefix(processor: sentencepiece.SentencePieceProcessor) -> bool:
    return bool(processor.normalize("a").startswith(_SPACE_MARK))


def _drop_dummy_prefix(model: bytes) -> bytes:
    content = read_model(model)
    content.normalizer_spec.add_dummy_prefix = False
    return bytes(content.SerializeToString())
