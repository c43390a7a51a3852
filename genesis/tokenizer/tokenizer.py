"""What a tokenizer is: text to ids and back, byte for byte, whatever library computes it.

`genesis.tokenizer.open` opens one; `genesis.tokenizer.sentencepiece` is the first implementation. What follows from the
protocol alone, for every implementation, is here: how a text and a document begin and end, and decoding as ids come.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    """Text to ids and back.

    Deterministic; encoding and decoding may be called from several threads at once. Decoding the ids of a text gives
    that text back, byte for byte, if it `is_lossless`. A text that spells a control symbol is text: `encode` never
    gives a control's id.
    """

    @property
    def kind(self) -> str:
        """Returns what people call this kind of tokenizer, as "SentencePiece"."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Returns the distributions that compute it, whose versions a record names."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Returns the files that it was opened from, by name: what a corpus, a run and an export keep of it."""

    @property
    def hash(self) -> str:
        """Returns its identity: `genesis.tokenizer.files.hash_files` of `files`."""

    @property
    def vocab_size(self) -> int:
        """Returns how many ids there are."""

    @property
    def bos_id(self) -> int | None:
        """Returns the id that begins a document; None where documents begin with their text."""

    @property
    def eos_id(self) -> int | None:
        """Returns the id that `genesis data prepare` ends a document with; None where documents end with their text.

        It may stand within documents, too: a document ends where the corpus's index says.
        """

    @property
    def pad_id(self) -> int | None:
        """Returns the id that fills places without a token; None where there is no such id."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Returns the ids at which generated text ends."""

    @property
    def pieces(self) -> Sequence[str]:
        """Returns how each id is spelled in the tokenizer's own vocabulary."""

    @property
    def token_num_bytes(self) -> NDArray[np.int32]:
        """Returns the UTF-8 bytes of text that each id stands for, 0 for control symbols; bits per byte need it."""

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Returns the spelling of bos, eos and other tokens by the names that chat templates have for them."""

    @property
    def altered_characters(self) -> str:
        """Returns characters that other tokenizers of this kind change, and that the proof of an import leaves out."""

    @property
    def is_lossless(self) -> bool:
        """Whether decoding gives every text back, but for `altered_characters`; others normalise some texts first."""

    @property
    def chat_template(self) -> str | None:
        """Returns the Jinja template that writes a conversation as text; None where there is none."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without bos and eos."""

    def encode_with_controls(self, text: str) -> list[int]:
        """Returns the ids of a text in which the spelling of a control symbol stands for that symbol."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of `encode_with_controls`, and the first character of each and the one after its last."""

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, without bos and eos; the number of threads does not change them."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; control symbols give nothing, bytes that are no UTF-8 give U+FFFD."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the UTF-8 bytes of `ids`, which may begin or end within a character."""

    def spell(self, ids: Iterable[int], *, has_controls: bool) -> str:
        """Returns the text of `ids` as `huggingface_files` decode it, where bytes that are no UTF-8 may differ.

        Args:
            ids: Any ids of the vocabulary.
            has_controls: Whether control symbols are spelled or left out.
        """

    def is_control(self, token: int) -> bool:
        """Whether the id stands for no text (bos, eos, pad, unknown, chat and reserved tokens)."""

    def is_byte(self, token: int) -> bool:
        """Whether the id spells one byte of a character that has no piece."""

    def huggingface_files(self, max_seq_len: int) -> Mapping[str, bytes] | None:
        """Returns the files that transformers opens it from, by name; None where transformers has no form of it.

        An export compares ids and texts of the `tokenizer.json` among them with this tokenizer's.

        Args:
            max_seq_len: The model's context.

        Raises:
            UserError: Its kind has such a form, but this tokenizer has none that is exact.
        """


class StreamingDecoder:
    """Turns ids that come one at a time into text, holding back half a character until its other half comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Returns the text that `token` completes, perhaps none."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        """Returns what is left, U+FFFD for a character that never came whole, and starts again with the next id."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Returns the ids of a text to continue: bos before it, where there is bos.

    An empty text without bos begins as a new document does after another one: with eos.
    """
    ids = tokenizer.encode(text)
    if tokenizer.bos_id is not None:
        return (tokenizer.bos_id, *ids)
    return tuple(ids) if ids or tokenizer.eos_id is None else (tokenizer.eos_id,)


def find_offsets(text: str, spellings: Sequence[bytes]) -> list[tuple[int, int]]:
    """Returns the first character of each token in a text that they spell together, and the one after its last.

    Example:
        >>> find_offsets("\u00e9a", [b"\xc3", b"\xa9", b"a"])
        [(0, 1), (0, 1), (1, 2)]
    """
    characters = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text]).tolist()
    is_spelled = b"".join(spellings) == text.encode()
    assert is_spelled, "the tokens do not spell the text"
    offsets, start = [], 0
    for spelling in spellings:
        end = start + len(spelling)
        first = characters[start] if start < len(characters) else len(text)
        offsets.append((first, characters[end - 1] + 1 if end > start else first))
        start = end
    return offsets


def padding_id(tokenizer: Tokenizer) -> int:
    """Returns the id that fills the places of a sequence without a token: eos, as ever, or any other."""
    return 0 if tokenizer.eos_id is None else tokenizer.eos_id


def frame_document(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns a document's tokens: its text's ids between bos and eos, where the tokenizer has them."""
    return np.concatenate((_as_array(tokenizer.bos_id), ids, _as_array(tokenizer.eos_id)))


def _as_array(token: int | None) -> NDArray[np.int32]:
    return np.array([] if token is None else [token], np.int32)
