"""Blocks: the sequences that one lane makes of one source between two cursors.

S  tokens of one sequence     n  sequences of one block

A block is a pure function of its cursor (and of what holds for the whole run): documents are read from there on until
there are about `block_tokens`, tokenized and packed, and the sequences are shuffled with the cursor as seed. So the
state of a lane consists of a cursor and the number of sequences given out from its block; tokens, packing and random
numbers follow from it, and the job of a worker that dies is given to another one.

Under `chunk` a block is cut off at a multiple of S tokens; its next cursor points into the document where the next
sequence begins. Under the other packings a block holds whole documents, all but those much longer than itself.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from genesis.base.errors import UserError
from genesis.data.packing import Packing, fill_row, mark_piece_ends, pack_documents
from genesis.data.shards import little_endian, token_dtype
from genesis.data.sources import (
    DamagedFileError,
    InputFile,
    SourceOptions,
    Span,
    check_unchanged,
    is_cheap_to_reopen,
    read_entries,
)
from genesis.data.stream.lanes import shuffle
from genesis.tokenizer.tokenizer import Tokenizer, frame_document, padding_id

_BATCH_BYTES: Final = 1 << 18
"""Text that is tokenized in one call, at most; less for small blocks."""
_BATCH_BYTES_PER_TOKEN: Final = 4
_MAX_NOTES: Final = 2
"""Number of skipped documents whose position a reader reports; finding it takes a pass over the file."""


class Cursor(NamedTuple):
    """The start of a block.

    Args:
        epoch: Number of times that the lane's part of the source has been read.
        span: Number of the span in the epoch's order.
        offset: Start of the document in the span.
        used: Number of tokens of the document that are in earlier blocks.
    """

    epoch: int = 0
    span: int = 0
    offset: int = 0
    used: int = 0


@dataclass(frozen=True)
class BlockRecipe:
    """Settings that all blocks of a run share."""

    seed: int
    seq_len: int
    packing: Packing
    block_tokens: int
    on_bad_document: Literal["error", "skip"]


@dataclass(frozen=True)
class LanePart:
    """The part of a source that one lane reads."""

    source: SourceOptions
    lane: int
    spans: tuple[Span, ...]
    max_epochs: int | None


@dataclass(frozen=True)
class Block:
    """The sequences between two cursors, shuffled.

    Args:
        rows: Tokens of each sequence and the token after it, in their type on disk.
        ends: Whether each token of a row ends a document and has others after it in the row.
        lengths: Number of labels of each row.
        next: Start of the next block; None when the lane has read all of its part.
        num_documents: Number of documents that begin in the block.
        num_tokens: Number of tokens of documents, each counted in one block.
        num_bad_documents: Number of documents skipped because they could not be read.
        num_damaged_spans: Number of spans whose rest was skipped.
        num_blank_documents: Number of documents dropped because they are only white space.
        notes: Messages about the first skipped documents and spans.
    """

    rows: Integer[ndarray, "n S+1"]
    ends: Bool[ndarray, "n S"]
    lengths: Int64[ndarray, " n"]
    next: Cursor | None
    num_documents: int
    num_tokens: int
    num_bad_documents: int = 0
    num_damaged_spans: int = 0
    num_blank_documents: int = 0
    notes: tuple[str, ...] = ()


class _FatalError(UserError):
    """A file has changed or is missing. No policy skips it, because the stream could not be repeated."""


@dataclass
class _Item:
    """A document with all its tokens, or one without text, or the error of one that cannot be read."""

    place: Cursor
    end: Cursor
    file: InputFile
    text: str = ""
    num_bytes: int = 0
    is_blank: bool = False
    tokens: Integer[ndarray, " tokens"] = field(default_factory=lambda: np.empty(0, np.uint16))
    error: UserError | None = None
    note: str = ""

    @property
    def has_text(self) -> bool:
        return self.error is None and not self.is_blank


class BlockReader:
    """Reads the blocks of one lane and source. Not thread-safe.

    Between two blocks it keeps documents read ahead and an open file. They only save time if the second block begins
    where the first ended, and do not change the result.
    """

    def __init__(self, part: LanePart, recipe: BlockRecipe, tokenizer: Tokenizer) -> None:
        self._part = part
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._dtype = little_endian(token_dtype(tokenizer.vocab_size))
        self._padding_id = padding_id(tokenizer)
        self._keeps_open = not all(is_cheap_to_reopen(part.source, span) for span in part.spans)
        self._skips = "skip" in (recipe.on_bad_document, part.source.on_bad_row)
        self._num_located = 0
        self._at: Cursor | None = None
        self._ahead: deque[_Item] = deque()
        self._read_to = Cursor()
        self._stream: Iterator[list[_Item]] | None = None

    def read(self, cursor: Cursor) -> Block:
        """Returns the block that begins at `cursor`.

        Raises:
            UserError: A document is bad or a shard damaged and the recipe says `error`; a shard has changed.
        """
        if cursor != self._at:
            self._begin(cursor)
        self._at = None  # after an error, the documents read ahead are not valid any more
        items, num_tokens = self._take(cursor)
        if self._recipe.packing == "chunk":
            block, kept = self._chunk(cursor, items, num_tokens)
        else:
            block, kept = self._pack(cursor, items, num_tokens)
        self._ahead.extendleft(reversed(kept))
        self._at = block.next
        if not self._keeps_open:
            self._stream = None
        return block

    # ---- reading

    def _begin(self, cursor: Cursor) -> None:
        self._ahead.clear()
        self._read_to, self._stream = cursor._replace(used=0), None

    def _take(self, cursor: Cursor) -> tuple[list[_Item], int]:
        """Returns items with `block_tokens` tokens from `cursor` on, or all remaining items, and their tokens."""
        items: list[_Item] = []
        num_tokens = -cursor.used
        while num_tokens < self._recipe.block_tokens:
            if not self._ahead and not self._read_ahead():
                break
            item = self._ahead.popleft()
            if item.error is not None and not self._may_skip(item.error):
                check_unchanged(self._part.source, item.file)  # a changed file would be the cause
                raise item.error
            items.append(item)
            num_tokens += len(item.tokens)
        return items, num_tokens

    def _may_skip(self, error: UserError) -> bool:
        if isinstance(error, DamagedFileError):  # more than a row
            return self._recipe.on_bad_document == "skip"
        return self._skips and not isinstance(error, _FatalError)

    def _read_ahead(self) -> bool:
        if self._stream is None:
            self._stream = self._batches(self._read_to)
        batch = next(self._stream, None)
        if batch is None:
            return False
        self._ahead.extend(batch)
        self._read_to = batch[-1].end
        return True

    def _batches(self, start: Cursor) -> Iterator[list[_Item]]:
        batch: list[_Item] = []
        num_bytes, most_bytes = 0, min(_BATCH_BYTES, _BATCH_BYTES_PER_TOKEN * self._recipe.block_tokens)
        for item in self._items(start):
            batch.append(item)
            num_bytes += item.num_bytes
            if num_bytes >= most_bytes:
                yield self._tokenize(batch)
                batch, num_bytes = [], 0
        if batch:
            yield self._tokenize(batch)

    def _tokenize(self, batch: list[_Item]) -> list[_Item]:
        documents = [item for item in batch if item.has_text]
        for item, ids in zip(documents, self._tokenizer.encode_batch([item.text for item in documents]), strict=True):
            item.tokens = frame_document(self._tokenizer, ids).astype(self._dtype)
            item.text = ""
        return batch

    def _items(self, start: Cursor) -> Iterator[_Item]:
        """Yields the entries from `start` on, epoch after epoch, before tokenization."""
        spans = self._part.spans
        for epoch in count(start.epoch):
            if self._part.max_epochs is not None and epoch >= self._part.max_epochs:
                return
            order = shuffle(len(spans), self._recipe.seed, self._part.source.name, self._part.lane, epoch, "spans")
            is_whole, is_empty = start == Cursor(epoch), True
            for number in range(start.span, len(spans)):
                for item in self._span_items(start._replace(span=number), spans[order[number]]):
                    is_empty = is_empty and not item.has_text
                    yield item
                start = Cursor(epoch, number + 1)
            if is_whole and is_empty:
                return  # a whole epoch had no document, so that no later epoch will have one
            start = Cursor(epoch + 1)

    def _span_items(self, start: Cursor, span: Span) -> Iterator[_Item]:
        place = start
        try:
            for entry in read_entries(self._part.source, span, start.offset):
                place = Cursor(start.epoch, start.span, entry.start)
                end = Cursor(start.epoch, start.span, entry.end)
                is_located = not self._skips or self._num_located < _MAX_NOTES
                try:
                    document = entry.read(is_located)
                except UserError as error:
                    self._num_located += 1
                    yield _Item(place, end, span.file, error=error, note=str(error) if is_located else "")
                    continue
                if document.utf8 or document.is_blank:
                    yield _Item(place, end, span.file, document.text, len(document.utf8), document.is_blank)
                place = end
        except DamagedFileError as error:
            yield _Item(place, Cursor(start.epoch, start.span + 1), span.file, error=error, note=str(error))
        except UserError as error:
            yield _Item(place, place, span.file, error=_FatalError(str(error)))

    # ---- packing

    def _chunk(self, cursor: Cursor, items: list[_Item], num_tokens: int) -> tuple[Block, list[_Item]]:
        """Returns the block cut from the stream of the items, and the items with which the next block begins."""
        seq_len = self._recipe.seq_len
        is_last = num_tokens < self._recipe.block_tokens
        num_whole = max(0, min(num_tokens, self._recipe.block_tokens) - 1) // seq_len
        num_used = num_tokens if is_last else num_whole * seq_len
        tokens = self._join(items, cursor.used, num_used + (not is_last))
        rest = tokens[num_whole * seq_len :] if is_last else tokens[:0]
        rows = np.full((num_whole + (len(rest) > 1), seq_len + 1), self._padding_id, self._dtype)
        lengths = np.full(len(rows), seq_len, np.int64)
        document_ends = _document_ends(items, cursor.used)
        ends = np.zeros((len(rows), seq_len), np.bool_)
        ends.flat[document_ends[document_ends <= num_whole * seq_len] - 1] = True
        if num_whole:
            windows = np.lib.stride_tricks.sliding_window_view(tokens[: num_whole * seq_len + 1], seq_len + 1)
            rows[:num_whole] = windows[::seq_len]
        if len(rest) > 1:
            rows[-1, : len(rest)], lengths[-1] = rest, len(rest) - 1
            in_rest = document_ends[document_ends > num_whole * seq_len] - num_whole * seq_len
            ends[-1, in_rest[in_rest < len(rest)] - 1] = True
        if is_last:
            return self._finish(cursor, items, rows, ends, lengths, None, num_used), []
        # The next sequence begins in the document `at`, after `used` of its tokens.
        item_ends = np.cumsum([len(item.tokens) for item in items])
        at = int(np.searchsorted(item_ends, cursor.used + num_used, side="right"))
        used = cursor.used + num_used - int(item_ends[at]) + len(items[at].tokens)
        next_cursor = items[at].place._replace(used=used)
        return self._finish(cursor, items[: at + (used > 0)], rows, ends, lengths, next_cursor, num_used), items[at:]

    def _join(self, items: list[_Item], start: int, count: int) -> Integer[ndarray, " count"]:
        """Returns `count` tokens of the joined items from `start` on, without copying other tokens."""
        tokens = np.empty(count, self._dtype)
        filled = 0
        for item in items:
            part = item.tokens[start : start + count - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            start = 0
        assert filled == count
        return tokens

    def _pack(self, cursor: Cursor, items: list[_Item], num_tokens: int) -> tuple[Block, list[_Item]]:
        """Returns the block of the items' documents; a last document that is too long continues in the next block."""
        seq_len, block_tokens = self._recipe.seq_len, self._recipe.block_tokens
        ends = _document_ends(items, cursor.used)
        if num_tokens < block_tokens:
            tokens = self._join(items, cursor.used, max(num_tokens, 0))
            return self._finish(cursor, items, *self._fill_rows(tokens, ends), None, len(tokens)), []
        last = items[-1]  # the loop that took the items ended with a document
        last_begin = num_tokens - len(last.tokens) + (cursor.used if len(items) == 1 else 0)
        num_cut = -(-(block_tokens - last_begin) // seq_len) * seq_len
        if last_begin + num_cut >= num_tokens - 1:
            tokens = self._join(items, cursor.used, num_tokens)
            return self._finish(cursor, items, *self._fill_rows(tokens, ends), last.end, num_tokens), []
        num_used = last_begin + num_cut
        ends[-1] = num_used + 1  # with the label of the last token; the next block begins with it
        filled = self._fill_rows(self._join(items, cursor.used, num_used + 1), ends)
        used = num_cut + (cursor.used if len(items) == 1 else 0)
        return self._finish(cursor, items, *filled, last.place._replace(used=used), num_used), [last]

    def _fill_rows(
        self, tokens: Integer[ndarray, " tokens"], document_ends: Int64[ndarray, " documents"]
    ) -> tuple[Integer[ndarray, "n S+1"], Bool[ndarray, "n S"], Int64[ndarray, " n"]]:
        assert self._recipe.packing != "chunk"
        seq_len = self._recipe.seq_len
        packed = pack_documents(document_ends, seq_len, self._recipe.packing)

        def read(start: int, out: Integer[ndarray, " count"]) -> None:
            out[:] = tokens[start : start + len(out)]

        rows = np.empty((len(packed), seq_len + 1), self._dtype)
        ends = np.zeros((len(packed), seq_len), np.bool_)
        lengths = np.empty(len(packed), np.int64)
        is_end = np.zeros(len(tokens) + 1, np.bool_)
        is_end[document_ends] = True
        first = 0
        for number, last in enumerate(packed.sequence_ends.tolist()):
            starts, sizes = packed.starts[first:last], packed.lengths[first:last]
            is_continued = bool(sizes[-1] == seq_len and not is_end[starts[-1] + seq_len])
            lengths[number] = fill_row(rows[number], starts, sizes, read, self._padding_id, is_continued=is_continued)
            mark_piece_ends(ends[number], sizes)
            first = last
        return rows, ends, lengths

    def _finish(
        self,
        cursor: Cursor,
        items: list[_Item],
        rows: Integer[ndarray, "n S+1"],
        ends: Bool[ndarray, "n S"],
        lengths: Int64[ndarray, " n"],
        next_cursor: Cursor | None,
        num_tokens: int,
    ) -> Block:
        """Returns the shuffled block of `items`, after checking again that their files have not changed."""
        for file in {item.file for item in items}:
            check_unchanged(self._part.source, file)
        order = shuffle(len(rows), self._recipe.seed, self._part.source.name, self._part.lane, *cursor, "rows")
        errors = [item for item in items if item.error is not None]
        num_damaged = sum(isinstance(item.error, DamagedFileError) for item in errors)
        num_blank = sum(item.is_blank for item in items)
        return Block(
            rows=rows[order],
            ends=ends[order],
            lengths=lengths[order],
            next=next_cursor,
            num_documents=len(items) - len(errors) - num_blank - (cursor.used > 0),
            num_tokens=num_tokens,
            num_bad_documents=len(errors) - num_damaged,
            num_damaged_spans=num_damaged,
            num_blank_documents=num_blank,
            notes=tuple(item.note for item in errors if item.note),
        )


def _document_ends(items: list[_Item], used: int) -> Int64[ndarray, " documents"]:
    """Returns the ends of the items' documents, counted after the first `used` tokens of the first document."""
    return np.cumsum([len(item.tokens) for item in items if item.has_text], dtype=np.int64) - used
