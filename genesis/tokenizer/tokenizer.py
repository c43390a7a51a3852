"""The tokenizer: text to ids and back, byte for byte.

SentencePiece does the work, with three things added:

- U+2581, which it takes for a space, is spelled in its three bytes; so every text comes back as it was.
- A long text is encoded in chunks cut where no piece can reach across. The ids are the same, the speed does not fall
  with the length of the document, and memory stays small.
- Decoding joins the bytes that the ids stand for, so that half a character is never lost or printed broken.
"""

import codecs
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import numpy as np
import sentencepiece
from blake3 import blake3
from numpy.typing import NDArray

from genesis.errors import UserError
from genesis.tokenizer.train import MODEL_NAME

_SPACE_MARK: Final = "\u2581"
"""SentencePiece's stand-in for a space inside pieces."""
_CHUNK_CHARS: Final = 2048
_MAX_MODEL_BYTES: Final = 256 << 20
_PROBE: Final = "  two spaces\t\r\n\0 \u2581\ufb01 \u0958e\u0301 <s> <|user|> \U0001f469\u200d\U0001f467 \U0010ffff "
"""Text that a tokenizer which normalises, trims or knows no bytes does not give back."""


class Tokenizer:
    """A trained SentencePiece model.

    Deterministic; encoding and decoding may be called from several threads at once. `load` makes one from a file.
    `model` is the file's content, `hash` the BLAKE3 hex digest of it; `piece_num_bytes[id]` counts the UTF-8 bytes that
    an id stands for, 0 for control symbols.

    Raises:
        UserError: The bytes are not a SentencePiece model, or one that does not give text back as it was.
    """

    def __init__(self, model: bytes) -> None:
        if not model:
            raise UserError("it is empty; make a tokenizer with `genesis tokenizer train`")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError):
            raise UserError("not a SentencePiece model; make one with `genesis tokenizer train`") from None
        self.model: bytes = model
        self.hash: str = blake3(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.pad_id: int = self._processor.pad_id()
        if min(self.bos_id, self.eos_id, self.pad_id) < 0:
            raise UserError("this tokenizer lacks a pad, bos or eos id; make one with `genesis tokenizer train`")
        self.pieces: tuple[str, ...] = tuple(self._processor.id_to_piece(list(range(self.vocab_size))))
        self._bytes = [self._bytes_of(token) for token in range(self.vocab_size)]
        self.piece_num_bytes: NDArray[np.int32] = np.array([len(piece) for piece in self._bytes], dtype=np.int32)
        self._space_mark_ids = np.array([self._byte_id(byte) for byte in _SPACE_MARK.encode()], dtype=np.int32)
        self._can_cut = not any(_SPACE_MARK in piece.lstrip(_SPACE_MARK) for piece in self._text_pieces())
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise UserError(
                "this tokenizer does not give text back as it was (it normalises, trims or lacks byte fallback); "
                "make one with `genesis tokenizer train`"
            )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Returns the tokenizer in the model file `path`, or in the directory `path` that holds one."""
        path = Path(path)
        file = path / MODEL_NAME if path.is_dir() else path
        try:
            found = file.stat()
            # The path may be one that a stranger's checkpoint names, and a device has no end.
            is_file = stat.S_ISREG(found.st_mode) and found.st_size <= _MAX_MODEL_BYTES
            model = file.read_bytes() if is_file and found.st_size else b""
        except OSError as error:
            raise UserError(
                f"cannot read the tokenizer {file} ({error.strerror}); make one with `genesis tokenizer train`"
            ) from None
        try:
            return cls(model)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without bos and eos."""
        ids: list[int] = self.encode_batch([text], num_threads=1)[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, without bos and eos; the number of threads does not change them."""
        chunks: list[str] = []
        bounds = [0]
        for text in texts:
            chunks.extend(self._cut(text))
            bounds.append(len(chunks))
        encoded = self._processor.encode(chunks, return_type="numpy", num_threads=num_threads)
        for index, chunk in enumerate(chunks):
            if chunk == _SPACE_MARK:
                encoded[index] = self._space_mark_ids
        return [
            encoded[start] if end - start == 1 else np.concatenate(encoded[start:end])
            for start, end in pairwise(bounds)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; control symbols give nothing, bytes that are no UTF-8 give U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the UTF-8 bytes of `ids`, which may begin or end within a character."""
        return b"".join([self._bytes[token] for token in ids])

    def is_control(self, token: int) -> bool:
        """Whether the id stands for no text (bos, eos, pad, unknown, chat and reserved tokens)."""
        return bool(self._processor.is_control(token) or self._processor.is_unknown(token))

    def is_byte(self, token: int) -> bool:
        """Whether the id spells one byte of a character that has no piece."""
        return bool(self._processor.is_byte(token))

    def token_id(self, piece: str) -> int:
        """Returns the id of a piece by its name, as `<|user|>`.

        Raises:
            UserError: The tokenizer has no such piece.
        """
        token: int = self._processor.piece_to_id(piece)
        if token == self._processor.unk_id():
            raise UserError(f"the tokenizer has no token {piece!r}")
        return token

    def _bytes_of(self, token: int) -> bytes:
        if self.is_control(token):
            return b""
        if self.is_byte(token):
            return bytes([int(self.pieces[token][3:-1], 16)])  # <0x41>
        return self.pieces[token].replace(_SPACE_MARK, " ").encode()

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
        # A piece holds spaces only at its beginning, so none lies across the place between a character and a space.
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


class StreamingDecoder:
    """Turns ids that come one at a time into text, holding back half a character until its other half comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Returns the text that `token` completes, perhaps none."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        """Returns what is left, U+FFFD for a character that never came whole, and begins anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
