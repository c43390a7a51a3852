"""Measures how well a tokenizer fits text: bytes per token, exact round trips, unused pieces."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genesis.tokenizer.tokenizer import Tokenizer

_BATCH_CHARS = 1 << 20


@dataclass(frozen=True)
class TextReport:
    """Measurements of a tokenizer on some texts.

    Args:
        num_documents: Number of texts.
        num_bytes: Number of UTF-8 bytes of the texts.
        num_tokens: Number of ids, without bos and eos.
        num_byte_tokens: Number of ids that are a single byte of a character without a piece.
        num_changed: Number of texts that decode to a different text; a value above 0 is a bug.
        id_counts: Number of uses of each id.
    """

    num_documents: int
    num_bytes: int
    num_tokens: int
    num_byte_tokens: int
    num_changed: int
    id_counts: NDArray[np.int64]

    @property
    def bytes_per_token(self) -> float:
        """Returns the mean number of bytes per token."""
        return self.num_bytes / max(1, self.num_tokens)


def measure_texts(tokenizer: Tokenizer, texts: Iterable[str], num_threads: int = 1) -> TextReport:
    """Returns the measurements of `tokenizer` on `texts`."""
    num_documents = num_bytes = num_changed = 0
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for batch in _batches(texts):
        for text, ids in zip(batch, tokenizer.encode_batch(batch, num_threads), strict=True):
            num_documents += 1
            num_bytes += len(text.encode())
            num_changed += tokenizer.decode(ids.tolist()) != text
            counts += np.bincount(ids, minlength=tokenizer.vocab_size)
    is_byte = np.array([tokenizer.is_byte(token) for token in range(tokenizer.vocab_size)])
    return TextReport(num_documents, num_bytes, int(counts.sum()), int(counts[is_byte].sum()), num_changed, counts)


def find_unused(tokenizer: Tokenizer, id_counts: NDArray[np.int64]) -> list[int]:
    """Returns the ids of learned pieces (neither control symbols nor bytes) that were not used."""
    return [
        token
        for token in np.flatnonzero(id_counts == 0).tolist()
        if not tokenizer.is_control(token) and not tokenizer.is_byte(token)
    ]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
