"""Samples documents of sources, to train or measure a tokenizer."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from genesis.data.row_notes import RowNotes, SkippedCounter, strip_place
from genesis.data.sources.entry import BadRow
from genesis.data.sources.files import find_files
from genesis.data.sources.options import SourceOptions, check_sources, refuse_conversations
from genesis.data.sources.read import plan_spans, read_documents, read_rows

_SPAN_BYTES: Final = 4 << 20


def sample_texts(
    sources: Sequence[SourceOptions],
    budget_bytes: int,
    seed: int = 0,
    warn: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Yields documents of all sources, by weight, up to about `budget_bytes` of text; deterministic for the same files.

    The sample of a source is spread over all its files. A source that is smaller than its share is used whole. `warn`
    is called with lines about the rows that a source skips.
    """
    check_sources(sources)
    refuse_conversations(sources, "and a tokenizer learns from plain text; leave the source out")
    total_weight = sum(source.weight for source in sources)
    for source in sources:
        skipped = SkippedCounter()
        yield from _sample_source(source, budget_bytes * source.weight // total_weight, seed, skipped)
        for line in RowNotes(skipped.rows).describe(source.name):
            warn(line)


def _sample_source(source: SourceOptions, budget_bytes: int, seed: int, skipped: SkippedCounter) -> Iterator[str]:
    spans = list(plan_spans(source, find_files(source), _SPAN_BYTES))
    random.Random(seed).shuffle(spans)
    for index, span in enumerate(spans):
        quota = budget_bytes // (len(spans) - index)
        for document in read_rows(source, span) if source.on_bad_row == "skip" else read_documents(source, span):
            if quota <= 0:
                break
            if isinstance(document, BadRow):
                skipped.add(strip_place(document.explain(), document.place()), document.place)
                continue
            quota -= len(document.utf8)
            budget_bytes -= len(document.utf8)
            yield document.text
