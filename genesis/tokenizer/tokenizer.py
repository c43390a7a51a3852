"""The protocol of tokenizers: text to ids and back, byte for byte, with any library.

`genesis.tokenizer.open` opens a tokenizer; `genesis.tokenizer.sentencepiece` is the first implementation. This module
also has the functions that need only the protocol: the first and last ids of a document, and streaming decoding.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from genesis.tokenizer.literal import LiteralControls


class Tokenizer(Protocol):
    """Text to ids and back.

    Deterministic; encoding and decoding may be called from several threads at once. Decoding the ids of a text gives
    that text back, byte for byte, if it `is_lossless`. A text that spells a control symbol is text: `encode` never
    gives a control's id.
    """

    @property
    def kind(self) -> str:
        """Returns the common name of this kind of tokenizer, such as "SentencePiece"."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Returns the distributions that compute the ids; records list their versions."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Returns the files of the tokenizer by name; a corpus, a run and an export contain copies of them."""

    @property
    def hash(self) -> str:
        """Returns the identity of the tokenizer, as its `TokenizerFormat.identify` gives it."""

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids."""

    @property
    def bos_id(self) -> int | None:
        """Returns the id that begins a document; None if documents begin with their text."""

    @property
    def eos_id(self) -> int | None:
        """Returns the id that `genesis data prepare` adds after a document; None if documents end with their text.

        The id may also occur within documents: the corpus's index defines where a document ends.
        """

    @property
    def pad_id(self) -> int | None:
        """Returns the id that fills positions without a token; None if there is no such id."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Returns the ids at which generated text ends."""

    @property
    def pieces(self) -> Sequence[str]:
        """Returns the spelling of each id in the tokenizer's own vocabulary."""

    @property
    def token_num_bytes(self) -> NDArray[np.int32]:
        """Returns the number of UTF-8 bytes that each id stands for, 0 for control symbols; used for bits per byte."""

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Returns the spelling of bos, eos and other tokens by their names in chat templates."""

    @property
    def altered_characters(self) -> str:
        """Returns characters that the tokenizer itself changes; the proof of an import skips them."""

    @property
    def has_unknown_expressions(self) -> bool:
        """Whether its files have regular expressions that may search a text for minutes, as far as is known."""

    @property
    def is_lossless(self) -> bool:
        """Whether every text without `altered_characters` round-trips; other tokenizers normalise some texts first."""

    @property
    def chat_template(self) -> str | None:
        """Returns the Jinja template that writes a conversation as text; None if the tokenizer has none."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without bos and eos."""

    @property
    def literal(self) -> LiteralControls:
        """Returns what hides spellings of control symbols, so that the two methods below take them for text."""

    def encode_with_controls(self, text: str) -> list[int]:
        """Returns the ids of a text in which the spelling of a control symbol stands for that symbol."""

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids of `encode_with_controls`, and in rows each one's start and end (exclusive) in characters."""

    def min_num_tokens(self, text: str) -> int:
        """Returns a number of ids that `encode_with_controls` cannot go below, without encoding; 0 if none is known."""

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, without bos and eos; the number of threads does not change them."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without control symbols and with U+FFFD for bytes that are not valid UTF-8."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the UTF-8 bytes of `ids`, which may begin or end within a character."""

    def spell(self, ids: Iterable[int], *, has_controls: bool) -> str:
        """Returns the text of `ids` as transformers decodes it; it may differ where bytes are not valid UTF-8.

        Args:
            ids: Any ids of the vocabulary.
            has_controls: Whether the text contains the spelling of control symbols.
        """

    def is_control(self, token: int) -> bool:
        """Whether the id stands for no text (bos, eos, pad, unknown, chat and reserved tokens)."""

    def is_byte(self, token: int) -> bool:
        """Whether the id spells one byte of a character that has no piece."""

    def huggingface_files(self, max_seq_len: int) -> Mapping[str, bytes] | None:
        """Returns the tokenizer's files for transformers by name; None if transformers cannot represent this kind.

        An export compares ids and texts of the `tokenizer.json` among them with this tokenizer's.

        Args:
            max_seq_len: The model's context.

        Raises:
            UserError: Transformers has this kind of tokenizer, but cannot represent this one exactly.
        """


class StreamingDecoder:
    """Decodes ids one at a time, and delays an incomplete character until its other bytes come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Returns the text that `token` completes, which may be empty."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        """Returns the remaining text, with U+FFFD for an incomplete character, and resets the decoder."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Returns the ids of a text to continue, with bos first if the tokenizer has bos.

    An empty text without bos begins as a new document does after another one: with eos.
    """
    ids = tokenizer.encode(text)
    if tokenizer.bos_id is not None:
        return (tokenizer.bos_id, *ids)
    return tuple(ids) if ids or tokenizer.eos_id is None else (tokenizer.eos_id,)


def find_control(tokenizer: Tokenizer, text: str) -> tuple[str, int] | None:
    """Returns the first control symbol that a text spells, with the text before it; None if it spells none."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    places = zip(ids.tolist(), offsets[:, 0].tolist(), strict=True)
    return next(((text[:start], token) for token, start in places if tokenizer.is_control(token)), None)


def find_offsets(text: str, spellings: Sequence[bytes]) -> NDArray[np.int32]:
    """Returns the start and end (exclusive) of each token, in characters of the text that they spell together.

    Example:
        >>> find_offsets("\u00e9a", ["\u00e9".encode()[:1], "\u00e9".encode()[1:], b"a"]).tolist()
        [[0, 1], [0, 1], [1, 2]]
    """
    utf8 = text.encode()
    is_spelled = b"".join(spellings) == utf8
    assert is_spelled, "the tokens do not spell the text"
    # The character of each byte, and of the end: a byte 10xxxxxx continues one.
    is_first = (np.frombuffer(utf8, np.uint8) & 0xC0) != 0x80
    characters = np.empty(len(utf8) + 1, np.int32)
    np.cumsum(is_first, out=characters[:-1])
    characters[:-1] -= 1
    characters[-1] = len(text)
    lengths = np.fromiter(map(len, spellings), np.int64, len(spellings))
    ends = lengths.cumsum()
    firsts = characters[ends - lengths]
    lasts = np.where(lengths > 0, characters[ends - 1] + 1, firsts)
    return np.stack([firsts, lasts], axis=1).astype(np.int32)


def is_utf8(data: bytes) -> bool:
    """Returns whether bytes are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def padding_id(tokenizer: Tokenizer) -> int:
    """Returns the id that fills positions without a token: eos, or 0 if the tokenizer has no eos."""
    return 0 if tokenizer.eos_id is None else tokenizer.eos_id


def frame_document(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns a document's tokens: the ids of its text, between bos and eos if the tokenizer has these."""
    return np.concatenate((_as_array(tokenizer.bos_id), ids, _as_array(tokenizer.eos_id)))


def _as_array(token: int | None) -> NDArray[np.int32]:
    return np.array([] if token is None else [token], np.int32)
