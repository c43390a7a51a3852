"""Decontamination: documents that share a run of words with an evaluation set are dropped.

datatrove's filter drops the documents. datatrove's own indexer reads evaluation sets through a framework that downloads
them, so this module builds the index from files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter
from datatrove.utils.hashing import create_hash_func
from datatrove.utils.text import ngrams, simplify_text

from genesis.base.errors import UserError
from genesis.chat.conversation import load_conversation
from genesis.data.clean.words import HASH, Words
from genesis.data.sources import SourceOptions, Span, check_sources, read_documents, refuse_sources

_INDEX_SUFFIX = ".index.hashes"
"""The suffix by which datatrove's filter finds index files."""


@dataclass(frozen=True)
class Decontamination:
    """Drops documents that share `n_grams` words in a row with a text of an evaluation set.

    Case, punctuation, accents and the values of numbers do not count. An evaluation text of fewer than `n_grams` words
    cannot be found; the report has the number of such texts.

    Args:
        evaluation: Named evaluation sets, each with paths, format and text_field as a source has them.
        n_grams: Words in a row.
        sources: Names of the sources whose documents are checked; other documents pass. All if not given.
        languages: Codes of the languages whose documents are checked; other documents pass. All if not given.
    """

    name: ClassVar[str] = "decontamination"
    evaluation: tuple[SourceOptions, ...] = ()
    n_grams: int = 12
    sources: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.evaluation:
            raise UserError("decontamination has no evaluation sets; list at least one under `evaluation`")
        if self.n_grams < 1:
            raise UserError(f"n_grams {self.n_grams} of decontamination must be at least 1")
        check_sources(self.evaluation)
        pairs = "which no evaluation set holds; name another form by `chat`"
        refuse_sources(self.evaluation, pairs=pairs, skipping="decontamination")

    def build_filter(self, index: Path) -> NGramsDecontFilter:
        """Returns the filter that reads the index in the directory `index`."""
        return NGramsDecontFilter(str(index), self.config, language=Words())

    @property
    def config(self) -> NGramsDecontConfig:
        """Returns datatrove's form of the options."""
        return NGramsDecontConfig(n_grams=self.n_grams, hash_config=HASH)


class EvaluationIndex(PipelineStep):  # type: ignore[misc]
    """Writes the hashes of all runs of words in evaluation sets; a task for each set."""

    name = "evaluation index"
    type = "decontamination"

    def __init__(self, options: Decontamination, spans: dict[str, tuple[Span, ...]], folder: Path) -> None:
        super().__init__()
        self._options = options
        self._spans = spans
        self._folder = folder

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes the index of the evaluation set number `rank`."""
        assert data is None
        source = self._options.evaluation[rank]
        config = self._options.config
        hash_of = create_hash_func(config.hash_config)
        words = Words()
        hashes: set[int] = set()
        for span in self._spans[source.name]:
            for document in read_documents(source, span):
                text = document.text if source.chat is None else load_conversation(document.text).plain_text()
                runs = list(ngrams(words.word_tokenize(simplify_text(text)), config.n_grams))
                self.stat_update("texts")
                if not runs:
                    self.stat_update("texts_too_short")
                hashes.update(hash_of(" ".join(run)) for run in runs)
        if not hashes:
            raise UserError(
                f"evaluation set {source.name} has no text of {config.n_grams} words; correct its paths, "
                "or lower n_grams"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        data_of_hashes = np.array(sorted(hashes), dtype=config.hash_config.np_descr)
        (self._folder / f"{source.name}{_INDEX_SUFFIX}").write_bytes(data_of_hashes.tobytes())
        yield from ()
