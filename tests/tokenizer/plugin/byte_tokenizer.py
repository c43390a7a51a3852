"""A tokenizer of bytes, as an installed distribution would bring it along: two files, and eos within documents.

Each line of a text ends with eos, which stands for the newline; so eos closes every line, as it closes every turn of a
chat, and a document ends where the corpus's index says. Its ids: the 256 bytes, then

    256  bos      257  pad      258  eos, the end of a line      259  the end of a turn, which generation stops at, too
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.tokenizer.files import hash_files
from genesis.tokenizer.literal import LiteralControls
from genesis.tokenizer.open import TokenizerFormat
from genesis.tokenizer.tokenizer import find_offsets

ALPHABET_NAME, SYMBOLS_NAME = "alphabet.txt", "symbols.json"
BOS, PAD, EOS, END_OF_TURN = range(256, 260)
NEWLINE = ord("\n")


class ByteTokenizer:
    """A `genesis.tokenizer.tokenizer.Tokenizer`; by its symbols it may lack bos or eos."""

    kind = "bytes"
    packages = ("numpy",)
    altered_characters = ""
    has_unknown_expressions = False
    is_lossless = True
    chat_template = None
    named_tokens: Mapping[str, str] = {}
    vocab_size = 260
    pad_id = PAD
    literal = LiteralControls(["<bos>", "<pad>", "<eos>", "<end>"])

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if files[ALPHABET_NAME] != b"bytes\n":
            raise UserError("not an alphabet of bytes")
        symbols = json.loads(files[SYMBOLS_NAME])
        self.files = files
        self.hash = hash_files(files)
        self.bos_id = BOS if symbols["has_bos"] else None
        self.eos_id = EOS if symbols["has_eos"] else None
        self.stop_ids = frozenset([END_OF_TURN, *([EOS] if symbols["has_eos"] else [])])
        self.pieces = (*(f"<{byte}>" for byte in range(256)), "<bos>", "<pad>", "<eos>", "<end>")
        self._bytes = [*(bytes([byte]) for byte in range(256)), b"", b"", b"\n", b""]
        self.token_num_bytes = np.array([len(content) for content in self._bytes], np.int32)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_with_controls(self, text: str) -> list[int]:
        parts = re.split("(<bos>|<pad>|<eos>|<end>)", text)
        ids = [
            [self.pieces.index(part)] if index % 2 else self.encode(self.literal.reveal(part))
            for index, part in enumerate(parts)
        ]
        return [token for part in ids for token in part]

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        ids = self.encode_with_controls(text)
        return np.array(ids, np.int32), find_offsets(
            self.literal.reveal(text),
            [self.pieces[token].encode() if self.is_control(token) else self._bytes[token] for token in ids],
        )

    def min_num_tokens(self, text):
        return 0

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[NDArray[np.int32]]:
        encoded = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        if self.eos_id is None:
            return encoded
        return [np.where(ids == NEWLINE, EOS, ids).astype(np.int32) for ids in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join([self._bytes[token] for token in ids])

    def spell(self, ids: Iterable[int], *, has_controls: bool) -> str:
        shown = [self.pieces[token].encode() if self.is_control(token) else self._bytes[token] for token in ids]
        return (b"".join(shown) if has_controls else self.decode_bytes(ids)).decode("utf-8", errors="replace")

    def is_control(self, token: int) -> bool:
        return token >= BOS and token != EOS

    def is_byte(self, token: int) -> bool:
        return 128 <= token < 256

    def huggingface_files(self, max_seq_len: int) -> None:
        """Transformers has no such tokenizer."""


FORMAT = TokenizerFormat("bytes", (ALPHABET_NAME, SYMBOLS_NAME), ByteTokenizer)
