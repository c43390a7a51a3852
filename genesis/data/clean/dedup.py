"""Exact and near-duplicate removal: options, and datatrove's blocks for them in the order in which they run.

Each removal has three passes: signatures of all documents, a search among the signatures, and the removal of all but
one document of each group.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
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
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.data.clean.documents import SOURCE, PassReader
from genesis.data.clean.execute import Phase
from genesis.data.clean.words import HASH, Words
from genesis_callbacks.base.untrusted import open_file

CLUSTER = "minhash_cluster_id"
"""The key of a document's metadata in which datatrove records the group of near-duplicates."""
_MAX_PRIORITY = 65_535
"""The highest priority that datatrove accepts."""


@dataclass(frozen=True)
class ExactDuplicates:
    """Keeps one of the documents with an identical text, from the source that is listed first."""

    name: ClassVar[str] = "exact_duplicates"

    def build_signature(self, work: Path, sources: Sequence[str]) -> PipelineStep:
        """Returns the step that computes a signature of each document."""
        return ExactDedupSignature(str(work / "signatures"), _exact_config(sources))

    def build_searches(self, work: Path, label: str) -> list[Phase]:
        """Returns the searches for duplicates among the signatures, by the name of the stage."""
        finder = ExactFindDedups(str(work / "signatures"), str(work / "duplicates"), _exact_config(()))
        return [Phase(f"{label}-find", (finder,), 1)]

    def build_removal(self, work: Path) -> PipelineStep:
        """Returns the step that removes the duplicates."""
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
        """Returns the step that computes a signature of each document."""
        return MinhashDedupSignature(str(work / "signatures"), self.config, language=Words())

    def build_searches(self, work: Path, label: str) -> list[Phase]:
        """Returns the searches for duplicates among the signatures, by the name of the stage."""
        buckets = MinhashDedupBuckets(str(work / "signatures"), str(work / "pairs"), config=self.config)
        cluster = MinhashDedupCluster(str(work / "pairs"), str(work / "duplicates"), self.config, save_cluster_id=True)
        return [
            Phase(f"{label}-buckets", (buckets,), self.num_buckets),
            Phase(f"{label}-cluster", (cluster,), 1),
        ]

    def build_removal(self, work: Path) -> PipelineStep:
        """Returns the step that removes the duplicates."""
        return MinhashDedupFilter(str(work / "duplicates"), load_cluster_ids=True)


def _read(path: Path) -> NDArray[np.uint32]:
    with open_file(path) as file:
        return np.fromfile(file, "<u4")


def read_kept(work: Path, clusters: Collection[int]) -> dict[int, Document]:
    """Returns, for each of `clusters`, the document that the removal of near-duplicates in `work` keeps."""
    kept = {}
    for path in sorted((work / "duplicates").glob("*.clusters")):
        removal = path.with_suffix(".remove")
        removed = _read(removal) if removal.exists() else np.empty(0, "<u4")
        members = _read(path).reshape(-1, 2)
        wanted = members[np.isin(members[:, 1], list(clusters)) & ~np.isin(members[:, 0], removed)]
        for number, cluster in wanted.tolist():
            documents = PassReader(work / "documents").run(rank=int(path.stem))
            kept[cluster] = next(islice(documents, number, None))
    return kept


@dataclass(frozen=True)
class _Priority:
    """Returns a document's priority, which is higher if its source is listed earlier."""

    sources: tuple[str, ...]

    def __call__(self, document: Document) -> int:
        return max(1, _MAX_PRIORITY - self.sources.index(document.metadata[SOURCE]))


def _text(document: Document) -> str:
    return str(document.text)


def _exact_config(sources: Sequence[str]) -> ExactDedupConfig:
    return ExactDedupConfig(_text, _Priority(tuple(sources)), HASH)
