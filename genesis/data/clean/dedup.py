"""Exact and near-duplicate removal: options, and datatrove's blocks for them in the order in which they run.

Each is three acts over all documents: signatures, a search among them, and the removal of all but one of each group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import ExactDedupFilter, ExactDedupSignature, ExactFindDedups
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)

from genesis.data.clean.documents import SOURCE
from genesis.data.clean.words import HASH, Words
from genesis.errors import UserError

_MAX_PRIORITY = 65_535
"""The highest that datatrove takes."""


@dataclass(frozen=True)
class Search:
    """A part of a deduplication between signatures and removal: a pipeline and the number of its tasks."""

    name: str
    pipeline: tuple[PipelineStep, ...]
    num_tasks: int


@dataclass(frozen=True)
class ExactDuplicates:
    """Keeps one of the documents with the very same text: one of the source that is listed first."""

    name: ClassVar[str] = "exact_duplicates"

    def build_signature(self, work: Path, sources: Sequence[str]) -> PipelineStep:
        """Returns the step that notes a signature of each document."""
        return ExactDedupSignature(str(work / "signatures"), _exact_config(sources))

    def build_searches(self, work: Path) -> list[Search]:
        """Returns what finds the duplicates."""
        finder = ExactFindDedups(str(work / "signatures"), str(work / "duplicates"), _exact_config(()))
        return [Search("find", (finder,), 1)]

    def build_removal(self, work: Path) -> PipelineStep:
        """Returns the step that removes them."""
        return ExactDedupFilter(str(work / "duplicates"), _exact_config(()))


@dataclass(frozen=True)
class NearDuplicates:
    """Keeps one document of each group of near-duplicates (MinHash with locality-sensitive hashing).

    Two documents whose runs of `n_grams` words have the Jaccard similarity s are found with the probability
    1 - (1 - s^hashes_per_bucket)^num_buckets; documents of fewer words are left alone.

    References:
        Broder, On the resemblance and containment of documents (1997).
    """

    name: ClassVar[str] = "near_duplicates"
    n_grams: int = 5
    num_buckets: int = 14
    hashes_per_bucket: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("n_grams", "num_buckets", "hashes_per_bucket"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} of near_duplicates must be at least 1")

    @property
    def config(self) -> MinhashConfig:
        """Returns datatrove's form of the options."""
        return MinhashConfig(self.n_grams, self.num_buckets, self.hashes_per_bucket, self.seed, hash_config=HASH)

    def build_signature(self, work: Path, sources: Sequence[str]) -> PipelineStep:
        """Returns the step that notes a signature of each document."""
        return MinhashDedupSignature(str(work / "signatures"), self.config, language=Words())

    def build_searches(self, work: Path) -> list[Search]:
        """Returns what finds the duplicates."""
        buckets = MinhashDedupBuckets(str(work / "signatures"), str(work / "pairs"), config=self.config)
        cluster = MinhashDedupCluster(str(work / "pairs"), str(work / "duplicates"), self.config)
        return [Search("buckets", (buckets,), self.num_buckets), Search("cluster", (cluster,), 1)]

    def build_removal(self, work: Path) -> PipelineStep:
        """Returns the step that removes them."""
        return MinhashDedupFilter(str(work / "duplicates"))


@dataclass(frozen=True)
class _Priority:
    """Higher for a document of a source that is listed earlier."""

    sources: tuple[str, ...]

    def __call__(self, document: Document) -> int:
        return max(1, _MAX_PRIORITY - self.sources.index(document.metadata[SOURCE]))


def _text(document: Document) -> str:
    return str(document.text)


def _exact_config(sources: Sequence[str]) -> ExactDedupConfig:
    return ExactDedupConfig(_text, _Priority(tuple(sources)), HASH)
