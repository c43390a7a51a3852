"""Computes bits per byte on held-out text, by source.

Documents become sequences as in validation: each source is one stream of `bos + text + eos`, cut every `seq_len`
tokens; every token but the first of a document is counted once, and attention never crosses a document.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from blake3 import blake3
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from genesis.base.errors import UserError
from genesis.data.corpus import open_corpus
from genesis.data.loader import Ranks, SequenceFormat, TokenStream
from genesis.data.shards import little_endian, token_dtype
from genesis.data.sources import SourceOptions, find_files, plan_spans, read_documents
from genesis.data.validation_windows import ValidationWindows
from genesis.evaluate.results import Measure
from genesis.model.language_model import LanguageModel
from genesis.model.loss import sum_cross_entropy
from genesis.tokenizer.tokenizer import Tokenizer, frame_document

ALL: Final = "all"
"""The subject of sums over all sources."""
_SPAN_BYTES: Final = 64 << 20


class NamedStream(TokenStream, Protocol):
    """A source of held-out text: a stream of tokens with a name."""

    name: str


class TextSource:
    """The tokens of some documents as one stream in memory, like `TokenSource` for a corpus."""

    end_id: Final = None
    has_label_column: Final = False
    has_conversations: Final = False

    def __init__(self, name: str, documents: Sequence[str], tokenizer: Tokenizer) -> None:
        self.name = name
        ids = tokenizer.encode_batch(documents, num_threads=torch.get_num_threads())
        framed = [frame_document(tokenizer, document) for document in ids]
        self._tokens = np.concatenate(framed).astype(little_endian(token_dtype(tokenizer.vocab_size)))
        self._ends = np.cumsum([len(document) for document in framed])
        self.num_tokens = len(self._tokens)

    def read(self, start: int, out: Integer[ndarray, " count"]) -> None:
        """Fills `out` with the tokens from `start` on; the stream must have that many."""
        out[:] = self._tokens[start : start + len(out)]

    def read_labels(self, start: int, out: Bool[ndarray, " count"]) -> None:
        """Fills `out` with True: every token that follows another one has a label."""
        out[:] = True

    def ends_between(self, start: int, stop: int) -> Int64[ndarray, " ends"]:
        """Returns the document ends in the stream that are greater than `start` and at most `stop`."""
        first, last = np.searchsorted(self._ends, (start, stop), side="right").tolist()
        return self._ends[first:last]

    def document_ends(self) -> Sequence[Int64[ndarray, " documents"]]:
        """Returns the ends of all documents in the stream, in order."""
        return (self._ends,)


@dataclass(frozen=True)
class HeldOut:
    """Held-out text, by source.

    Args:
        sources: The streams of tokens.
        sequence_format: How tokens become sequences.
        data_hash: A hash of all data.
    """

    sources: tuple[NamedStream, ...]
    sequence_format: SequenceFormat
    data_hash: str


def open_validation_set(corpus: Path, seq_len: int, tokenizer: Tokenizer) -> HeldOut:
    """Returns the validation set of a corpus.

    Raises:
        UserError: The corpus does not exist, has no validation set, or was made with another tokenizer.
    """
    opened = open_corpus(corpus, tokenizer_hash=tokenizer.hash)
    if not opened.validation:
        raise UserError(f"{corpus} has no validation set; give text by --heldout PATH, or prepare the corpus with one")
    manifest = opened.manifest
    if manifest.is_paired:
        raise UserError(
            f"{corpus} has pairs of answers, half of which nobody prefers; measure them by `genesis validate`, or give "
            "text by --heldout PATH"
        )
    dtype = little_endian(manifest.token_dtype)
    sequence_format = SequenceFormat(seq_len, manifest.padding_id, opened.token_num_bytes(), dtype)
    digest = blake3()
    for source in opened.validation:
        shards = [source.shard(number) for number in range(source.num_shards)]
        digest.update(repr([source.name, *((shard.num_tokens, shard.hash) for shard in shards)]).encode())
        if source.has_conversations:
            digest.update(b"kept whole")  # earlier results are of conversations that were cut
    return HeldOut(opened.validation, sequence_format, digest.hexdigest())


def read_texts(path: Path, seq_len: int, tokenizer: Tokenizer) -> HeldOut:
    """Returns the text in a file, or in a folder in which each file and each subfolder is a source.

    Raises:
        UserError: There is no text, or two sources have the same name.
    """
    check_is_there(path)
    places = [path] if path.is_file() else sorted(place for place in path.iterdir() if not place.name.startswith("."))
    sources: list[TextSource] = []
    digest = blake3()
    for place in places:
        name = place.name if place.is_dir() else place.name.split(".")[0]
        if name == ALL or name in (source.name for source in sources):
            raise UserError(f"{place} is a second source with the name {name!r}: rename it")
        documents = _read_documents(SourceOptions(name, (str(place),)))
        if not documents:
            raise UserError(f"{place} contains no text; remove it or add text")
        digest.update(repr([name, *documents]).encode())
        sources.append(TextSource(name, documents, tokenizer))
    if not sources:
        raise UserError(f"{path} contains no text; give a file or folder with text")
    sequence_format = SequenceFormat.of(tokenizer, seq_len)
    return HeldOut(tuple(sources), sequence_format, digest.hexdigest())


def check_is_there(path: Path) -> None:
    """Checks that a path of held-out text exists.

    Raises:
        UserError: The path does not exist or has no text.
    """
    if not path.exists():
        raise UserError(f"no such file or folder of held-out text: {path}; give an existing one")
    if path.is_dir() and not any(not place.name.startswith(".") for place in path.iterdir()):
        raise UserError(f"{path} contains no text; give a file or folder with text")


def _read_documents(options: SourceOptions) -> list[str]:
    spans = plan_spans(options, find_files(options), _SPAN_BYTES)
    return [document.text for span in spans for document in read_documents(options, span) if document.text]


@torch.no_grad()
def measure_held_out(
    decoder: LanguageModel, held_out: HeldOut, batch_tokens: int, on_progress: Callable[[int], None] = lambda _: None
) -> list[Measure]:
    """Returns bits per byte and loss of each source, and over all sources.

    Args:
        decoder: The model, in evaluation mode.
        held_out: The text.
        batch_tokens: Number of tokens per forward.
        on_progress: Called with the number of tokens scored since the last call.
    """
    counts, device = {}, decoder.output_weight.device
    for source in held_out.sources:
        loss_sum, num_tokens, num_bytes = 0.0, 0, 0
        windows = ValidationWindows(
            [source], held_out.sequence_format, max(1, batch_tokens // held_out.sequence_format.seq_len), Ranks()
        )
        for index in range(len(windows)):
            window = windows.window(index).to(device, non_blocking=device.type == "cuda")  # the same copy as in `send`
            for micro_batch in window.micro_batches:
                loss_sum += float(
                    decoder(
                        micro_batch.input_ids,
                        document_ids=micro_batch.document_ids,
                        document_offsets=micro_batch.document_offsets,
                        head=partial(sum_cross_entropy, labels=micro_batch.labels, softcap=decoder.softcap),
                    )
                )
            num_tokens, num_bytes = num_tokens + window.num_valid_tokens, num_bytes + window.num_bytes
            on_progress(window.num_valid_tokens)
        counts[source.name] = (loss_sum, num_tokens, num_bytes)
    if len(counts) > 1:
        sums = [sum(column) for column in zip(*counts.values(), strict=True)]
        counts[ALL] = (sums[0], int(sums[1]), int(sums[2]))
    return [measure for name, count in counts.items() for measure in _describe(name, *count)]


def _describe(name: str, loss_sum: float, num_tokens: int, num_bytes: int) -> list[Measure]:
    bits = loss_sum / num_bytes / math.log(2) if num_bytes else None  # bytes are unknown without a tokenizer
    loss = loss_sum / num_tokens if num_tokens else None
    return [
        Measure(name, "bits_per_byte", bits, None, is_higher_better=False, num_items=num_bytes),
        Measure(name, "loss", loss, None, is_higher_better=False, num_items=num_tokens),
    ]
