"""Samples documents of sources, to train or measure a tokenizer."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from genesis.base.errors import UserError
from genesis.data.row_notes import RowNotes, SkippedCounter, strip_place
from genesis.data.sources.entry import Document
from genesis.data.sources.files import Listing, Span, list_source
from genesis.data.sources.options import SourceOptions, check_sources, refuse_sources
from genesis.data.sources.read import describe_left_out, plan_spans, read_rows

_SPAN_BYTES: Final = 4 << 20


def sample_texts(
    sources: Sequence[SourceOptions],
    budget_bytes: int,
    seed: int = 0,
    warn: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Yields documents of all sources, by weight, up to about `budget_bytes` of text; deterministic for the same files.

    The sample of a source is spread over all its files. A source that is smaller than its share is used whole. `warn`
    is called with lines about files that a source does not read, and about rows and documents that it skips.
    """
    check_sources(sources)
    refuse_sources(sources, conversations="and a tokenizer learns from plain text; leave the source out")
    total_weight = sum(source.weight for source in sources)
    for source in sources:
        listing = list_source(source)
        for line in describe_left_out(listing):
            warn(line)
        sample = _Sample(listing)
        yield from sample.draw(budget_bytes * source.weight // total_weight, seed)
        for line in RowNotes(sample.skipped.rows, num_blank=sample.num_blank).describe(source.name):
            warn(line)


class _Sample:
    """A sample of one source, and what it skipped."""

    def __init__(self, listing: Listing) -> None:
        self._source, self._files = listing.source, listing.files
        self.skipped = SkippedCounter()
        self.num_blank = 0

    def draw(self, budget_bytes: int, seed: int) -> Iterator[str]:
        spans = list(plan_spans(self._source, self._files, _SPAN_BYTES))
        random.Random(seed).shuffle(spans)
        for index, span in enumerate(spans):
            quota = budget_bytes // (len(spans) - index)
            for document in self._read(span):
                if quota <= 0:
                    break
                quota -= len(document.utf8)
                budget_bytes -= len(document.utf8)
                yield document.text

    def _read(self, span: Span) -> Iterator[Document]:
        for document in read_rows(self._source, span):
            if isinstance(document, Document):
                self.num_blank += document.is_blank
                if document.utf8:
                    yield document
            elif self._source.on_bad_row == "skip":
                self.skipped.add(strip_place(document.explain(), document.place()), document.place)
            else:
                raise UserError(document.explain())
