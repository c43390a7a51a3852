"""A stage of the pipeline: one of datatrove's filters or removals, with counts and examples of dropped documents.

Each stage counts the documents that enter and the documents that it keeps in datatrove's statistics of its task. The
stage also stores a few of the documents that it dropped, with the reason.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import get_filter_result

from genesis.data.clean.documents import CONVERSATION, NUM_TOKENS, SOURCE, count_tokens, write_durably
from genesis.data.clean.filters import LANGUAGE, Filter

EXAMPLE_CHARACTERS = 600


@dataclass(frozen=True)
class Account:
    """The directory of a stage's examples, their number for each reason, and the path of the tokenizer, if any."""

    folder: Path
    num_examples: int
    tokenizer: Path | None


class Stage(PipelineStep):  # type: ignore[misc]
    """The base class of all stages: `label` names the stage in reports and paths."""

    type = "stage"

    def __init__(self, label: str, account: Account) -> None:
        self.name = label
        super().__init__()
        self.account = account
        self._examples: list[dict[str, Any]] = []
        self._num_by_reason: Counter[str] = Counter()

    def enter(self, document: Document) -> None:
        """Counts a document before the stage."""
        self._count("in", document)

    def keep(self, document: Document) -> None:
        """Counts a document after the stage."""
        self._count("kept", document)

    def drop(self, document: Document, reason: str, known: Collection[str] = ()) -> None:
        """Counts a dropped document; keeps the first of each reason as examples, without the metadata keys `known`."""
        self.stat_update(f"dropped.{reason}")
        self._num_by_reason[reason] += 1
        if self._num_by_reason[reason] <= self.account.num_examples:
            notes = {key: value for key, value in document.metadata.items() if key not in (*known, CONVERSATION)}
            example = {"reason": reason, "notes": notes, "id": document.id, "source": document.metadata[SOURCE]}
            self._examples.append({**example, "text": document.text[:EXAMPLE_CHARACTERS]})

    def write_examples(self, rank: int) -> None:
        """Writes the examples of the task `rank`."""
        data = json.dumps(self._examples, ensure_ascii=False).encode()
        write_durably(self.account.folder / self.name / f"{rank:05d}.json", data)

    def _count(self, moment: str, document: Document) -> None:
        self.stat_update(f"documents_{moment}")
        self.stat_update(f"characters_{moment}", value=len(document.text))
        self.stat_update(f"tokens_{moment}", value=document.metadata.get(NUM_TOKENS, 0))


class FilterStage(Stage):
    """Applies a filter to documents of some sources and languages; other documents pass."""

    def __init__(
        self, label: str, account: Account, inner: Filter, sources: Sequence[str], languages: Sequence[str]
    ) -> None:
        super().__init__(label, account)
        self._inner = inner
        self._sources = frozenset(sources)
        self._languages = frozenset(languages)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields the documents that pass."""
        for document in data:
            self.enter(document)
            known = set(document.metadata)
            is_kept, reason = self._judge(document) if self._concerns(document) else (True, "")
            if is_kept:
                self.keep(document)
                yield document
            else:
                self.drop(document, reason, known)
        self.write_examples(rank)

    def _concerns(self, document: Document) -> bool:
        metadata = document.metadata
        return (not self._sources or metadata[SOURCE] in self._sources) and (
            not self._languages or metadata.get(LANGUAGE) in self._languages
        )

    def _judge(self, document: Document) -> tuple[bool, str]:
        if not document.text.strip():
            return False, "blank"  # datatrove's filters divide by the number of words
        before = document.text
        with self.track_time():
            is_kept, reason = get_filter_result(self._inner.filter(document))
        if is_kept and document.text != before:
            assert CONVERSATION not in document.metadata, "the options refuse filters that change conversations"
            return self._take_new_text(document)
        return bool(is_kept), reason or "dropped"

    def _take_new_text(self, document: Document) -> tuple[bool, str]:
        if not document.text:
            return False, "nothing_left"
        num_tokens = count_tokens(self.account.tokenizer, document.text)
        if num_tokens is not None:
            document.metadata[NUM_TOKENS] = num_tokens
        return True, ""


class RemovalStage(Stage):
    """Applies the removal of a deduplication to documents."""

    def __init__(self, label: str, account: Account, inner: PipelineStep) -> None:
        super().__init__(label, account)
        self._inner = inner
        self._known: Collection[str] = ()

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields the documents that are not removed."""
        self._inner.exclusion_writer = nullcontext(self)  # in the place of datatrove's writer
        for document in self._inner.run(self._entering(data), rank, world_size):
            self.keep(document)
            yield document
        self.write_examples(rank)

    def _entering(self, data: DocumentsPipeline) -> Iterator[Document]:
        for document in data:
            self.enter(document)
            self._known = set(document.metadata)
            yield document

    def write(self, document: Document, rank: int = 0, **_: Any) -> None:
        """Counts the document that entered last as removed, where datatrove would write it to a file."""
        self.drop(document, "duplicate", self._known)
