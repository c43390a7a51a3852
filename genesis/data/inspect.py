"""Inspects a corpus: compares it with its manifest, reports the effect of packings, and shows samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.data.corpus import Corpus, TokenSource, find_fault
from genesis.data.manifest import SPLITS, CorpusManifest, ShardRecord, Split, read_manifest
from genesis.data.packing import Packing, PackingFigures
from genesis.data.pairs import find_source_fault
from genesis.data.plans import Plan, find_plan_fault, list_plans, measure_source, plan_fits
from genesis.tokenizer.open import has_hash, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """Consecutive tokens of one shard from the beginning of a document, split into documents.

    The last text may be truncated (`is_cut`). `num_tokens` counts the tokens of each whole document with bos and eos.
    Without a tokenizer a text consists of the ids as numbers. A sample of pairs is one pair: two documents, each of
    which may be truncated. `num_labels` counts the tokens with labels of each
    document; it is None for a source whose tokens all have labels. Where it is not None, `runs` has each text again as
    (text, whether its tokens have labels), one after the other, control symbols spelled.
    """

    source: str
    shard: str
    first_document: int
    texts: tuple[str, ...]
    num_tokens: tuple[int, ...]
    is_cut: bool
    num_labels: tuple[int, ...] | None = None
    runs: tuple[tuple[tuple[str, bool], ...], ...] | None = None


@dataclass(frozen=True)
class Lengths:
    """How long the documents of a source are, in tokens, and how many tokens have a label."""

    source: str
    num_tokens: int
    num_labels: int
    median: int
    p95: int
    longest: int


@dataclass(frozen=True)
class PackingReport:
    """The effect of a packing on a source of the training set, and the state of its plan."""

    source: str
    packing: Packing
    seq_len: int
    figures: PackingFigures
    plan: Literal["ready", "of other shards", "none", "not needed"]


def measure_lengths(corpus: Corpus, split: Split) -> list[Lengths]:
    """Returns the lengths of the documents of each source of conversations; an empty list without such sources."""
    if corpus.manifest.chat is None:
        return []
    found = []
    for source in corpus.train if split == "train" else corpus.validation:
        if source.name in corpus.manifest.chat.sources:
            ends = np.concatenate([np.zeros(1, np.int64), *source.document_ends()])
            # No label follows from the first token of a document.
            num_first = int(_labels_at(source, ends[:-1]).sum())
            num_labels = int(source.count_labels(np.array([0, source.num_tokens]))[1]) - num_first
            lengths = np.sort(np.diff(ends))
            median, p95 = (int(lengths[min(len(lengths) - 1, len(lengths) * share // 100)]) for share in (50, 95))
            found.append(Lengths(source.name, source.num_tokens, num_labels, median, p95, int(lengths[-1])))
    return found


def _labels_at(source: TokenSource, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns 1 for each of these positions whose token has a label by the label column, else 0."""
    both = np.stack((places, places + 1), axis=1).reshape(-1)
    return np.diff(source.count_labels(both))[::2]


def report_packings(corpus: Corpus, seq_len: int | None) -> list[PackingReport]:
    """Returns the figures of every existing plan and, if `seq_len` is given, of every packing at that length.

    Pairs of answers are never packed.
    """
    if corpus.manifest.is_paired:
        return []
    plans = list_plans(corpus.path)
    reports = [
        PackingReport(
            source,
            plan.packing,
            plan.seq_len,
            record.figures,
            "ready" if plan_fits(plan, corpus) else "of other shards",
        )
        for plan in plans
        for source, record in plan.sources.items()
    ]
    if seq_len is None:
        return reports
    ready = {(plan.packing, plan.seq_len) for plan in plans if plan_fits(plan, corpus)}
    packings: tuple[Packing, ...] = ("chunk", "best_fit", "pad")
    for packing in packings:
        if (packing, seq_len) not in ready:
            reports += [
                PackingReport(
                    source.name,
                    packing,
                    seq_len,
                    measure_source(source, seq_len, packing),
                    "not needed" if packing == "chunk" else "none",
                )
                for source in corpus.train
            ]
    return reports


def verify_plans(corpus: Corpus) -> list[Plan]:
    """Checks every plan of a corpus and returns them.

    Raises:
        UserError: A plan is damaged, or was made for other shards.
    """
    plans = list_plans(corpus.path)
    for plan in plans:
        fault = find_plan_fault(corpus, plan)
        if fault is not None:
            raise UserError(f"{fault}; remove the plan's directory and run `genesis data plan` again")
    return plans


def verify_pairs(corpus: Corpus) -> None:
    """Checks that the documents of a corpus of pairs are two answers to one prompt each; does nothing for others.

    Raises:
        UserError: A source has a document without its pair.
    """
    if not corpus.manifest.is_paired:
        return
    for source in (*corpus.train, *corpus.validation):
        fault = find_source_fault(source)
        if fault is not None:
            raise UserError(fault)


def read_corpus_tokenizer(corpus: Path, manifest: CorpusManifest) -> Tokenizer | None:
    """Returns the tokenizer that the corpus was made with, None if it is unknown.

    Raises:
        UserError: The corpus has no tokenizer, or another one.
    """
    if not manifest.tokenizer_hash:
        return None
    tokenizer = open_tokenizer(corpus)
    if not has_hash(tokenizer, manifest.tokenizer_hash):
        raise UserError(
            f"{corpus} has the tokenizer {tokenizer.hash[:16]}, but was made with "
            f"{manifest.tokenizer_hash[:16]}; restore the original tokenizer, or prepare the corpus again"
        )
    return tokenizer


def verify_corpus(corpus: Path) -> Iterator[ShardRecord]:
    """Checks the tokenizer and every shard against the manifest; yields each shard without a fault.

    Raises:
        UserError: A shard differs. It is raised after all shards, names the first fault and counts the others.
    """
    manifest = read_manifest(corpus)
    read_corpus_tokenizer(corpus, manifest)
    faults: list[str] = []
    sources = [source for split in SPLITS for source in manifest.split(split)]
    with stage("verifying shards", sum(source.num_tokens for source in sources), "tokens") as shown:
        for shard in (shard for source in sources for shard in source.shards):
            fault = find_fault(corpus, manifest, shard)
            if fault is None:
                yield shard
            else:
                faults.append(fault)
            shown.advance(shard.num_tokens)
    if faults:
        others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{faults[0]}{others}; {_remedy(manifest)}")


def _remedy(manifest: CorpusManifest) -> str:
    if any(Path(source.shards[0].path).is_absolute() for source in manifest.train):
        return "restore the original files, or adopt them again"
    return "fetch the corpus again or prepare it again with --restart"


def draw_samples(corpus: Corpus, split: Split, num_samples: int, sample_tokens: int, seed: int) -> list[Sample]:
    """Returns samples of about `sample_tokens`, each from the beginning of a document, uniform over documents.

    Raises:
        UserError: The split has no documents.
    """
    tokenizer = read_corpus_tokenizer(corpus.path, corpus.manifest)
    sources = corpus.train if split == "train" else corpus.validation
    shards = [(source, number) for source in sources for number in range(source.num_shards)]
    ends = np.cumsum(
        [count for source in corpus.manifest.split(split) for count in source.table.column("num_documents")]
    )
    if not shards:
        raise UserError(f"{corpus.path} has no {split} documents; choose another --split")
    samples = []
    for drawn in sorted(np.random.default_rng(seed).integers(ends[-1], size=num_samples).tolist()):
        which = int(np.searchsorted(ends, drawn, side="right"))
        source, number = shards[which]
        shard = source.shard(number)
        first = int(drawn - (ends[which] - shard.num_documents))
        if corpus.manifest.is_paired:
            parts = list(_find_answers(source, number, first - first % 2, sample_tokens))
            samples.append(_read_sample(source, shard.path, first - first % 2, tokenizer, parts, has_labels=True))
        else:
            parts = list(_find_documents(source, number, first, sample_tokens))
            has_labels = source.has_label_column
            samples.append(_read_sample(source, shard.path, first, tokenizer, parts, has_labels=has_labels))
    return samples


class _Part(NamedTuple):
    """A document from `start` to `end`, of which a sample has the tokens from `first` to `last`."""

    start: int
    end: int
    first: int
    last: int


def _find_documents(source: TokenSource, shard: int, document: int, num_tokens: int) -> Iterator[_Part]:
    """Yields the documents from one on, until there are so many tokens; the last one may be truncated."""
    start = source.document_start(shard, document)
    for end in source.shard_ends(shard)[document:].tolist():
        yield _Part(start, end, start, min(end, start + num_tokens))
        num_tokens -= end - start
        if num_tokens <= 0:
            return
        start = end


def _find_answers(source: TokenSource, shard: int, document: int, num_tokens: int) -> Iterator[_Part]:
    """Yields the two documents of a pair, of each its last tokens, which the answer is."""
    for number in (document, document + 1):
        start, end = source.document_start(shard, number), int(source.shard_ends(shard)[number])
        yield _Part(start, end, max(start, end - num_tokens), end)


def _read_sample(
    source: TokenSource, shard: str, document: int, tokenizer: Tokenizer | None, parts: list[_Part], *, has_labels: bool
) -> Sample:
    return Sample(
        source.name,
        shard,
        document,
        tuple(_read_text(source, tokenizer, part) for part in parts),
        tuple(part.end - part.start for part in parts),
        is_cut=any(part.last - part.first < part.end - part.start for part in parts),
        num_labels=tuple(_count_labels(source, part) for part in parts) if has_labels else None,
        runs=tuple(_read_runs(source, tokenizer, part) for part in parts) if has_labels and tokenizer else None,
    )


def _read_text(source: TokenSource, tokenizer: Tokenizer | None, part: _Part) -> str:
    ids = _read_ids(source, part)
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


def _read_ids(source: TokenSource, part: _Part) -> list[int]:
    tokens = np.empty(part.last - part.first, np.int64)
    source.read(part.first, tokens)
    ids: list[int] = tokens.tolist()
    return ids


def _count_labels(source: TokenSource, part: _Part) -> int:
    """Returns the number of tokens with labels in a document, whose first token has none."""
    return int(source.count_labels(np.array([part.start + 1, part.end]))[1]) if source.has_label_column else 0


def _read_runs(source: TokenSource, tokenizer: Tokenizer, part: _Part) -> tuple[tuple[str, bool], ...]:
    """Returns the text of each run of tokens with and without labels."""
    ids = _read_ids(source, part)
    has_label = np.empty(len(ids), np.bool_)
    source.read_labels(part.first, has_label)
    has_label[0] = False
    edges = [0, *(np.flatnonzero(np.diff(has_label)) + 1).tolist(), len(ids)]
    return tuple(
        (tokenizer.spell(ids[first:last], has_controls=True), bool(has_label[first])) for first, last in pairwise(edges)
    )
