"""Samples documents of sources, to train or measure a tokenizer."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from genesis.base.errors import UserError
from genesis.data.row_notes import RowNotes, SkippedCounter, strip_place
from genesis.data.sources.entry import BadRow
from genesis.data.sources.files import list_source
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
        skipped = SkippedCounter()
        spans = list(plan_spans(source, listing.files, _SPAN_BYTES))
        random.Random(seed).shuffle(spans)
        left_bytes, num_blank = budget_bytes * source.weight // total_weight, 0
        for index, span in enumerate(spans):
            quota = left_bytes // (len(spans) - index)
            for row in read_rows(source, span):
                if isinstance(row, BadRow):
                    _skip(source, row, skipped)
                elif row.is_blank:
                    num_blank += 1
                elif quota <= 0:
                    break
                else:
                    quota -= len(row.utf8)
                    left_bytes -= len(row.utf8)
                    yield row.text
        for line in RowNotes(skipped.rows, num_blank=num_blank).describe(source.name):
            warn(line)


def _skip(source: SourceOptions, row: BadRow, skipped: SkippedCounter) -> None:
    if source.on_bad_row != "skip":
        raise UserError(row.explain())
    skipped.add(strip_place(row.explain(), row.place()), row.place)
