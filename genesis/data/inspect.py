"""Inspects a corpus: compares it with its manifest, reports the effect of packings, and shows samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

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
            samples.append(_read_pair_sample(source, number, tokenizer, first - first % 2, sample_tokens))
            continue
        texts, lengths, is_cut = _read_sample(source, number, tokenizer, first, sample_tokens)
        start = source.document_start(number, first)
        num_labels = _count_labels(source, start, lengths)
        runs = None
        if num_labels is not None and tokenizer is not None:
            runs = _read_runs(source, tokenizer, start, lengths, sample_tokens)
        samples.append(Sample(source.name, shard.path, first, texts, lengths, is_cut, num_labels, runs))
    return samples


def _read_pair_sample(
    source: TokenSource, shard: int, tokenizer: Tokenizer | None, first: int, sample_tokens: int
) -> Sample:
    """Returns the two documents of a pair, of each its last tokens, which the answer is."""
    texts: list[str] = []
    runs: list[tuple[tuple[str, bool], ...]] = []
    starts = [source.document_start(shard, first + side) for side in (0, 1)]
    ends = source.shard_ends(shard)[first : first + 2].tolist()
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    for start, end in zip(starts, ends, strict=True):
        begin = max(start, end - sample_tokens)
        tokens = np.empty(end - begin, np.int64)
        source.read(begin, tokens)
        ids: list[int] = tokens.tolist()
        texts.append(" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids))
        if tokenizer is not None:
            runs += _read_runs(source, tokenizer, begin, [end - begin], sample_tokens)
    num_labels = [_count_labels(source, start, [length]) or (0,) for start, length in zip(starts, lengths, strict=True)]
    return Sample(
        source.name,
        source.shard(shard).path,
        first,
        tuple(texts),
        tuple(lengths),
        is_cut=max(lengths) > sample_tokens,
        num_labels=tuple(count for (count,) in num_labels),
        runs=tuple(runs) or None,
    )


def _count_labels(source: TokenSource, start: int, lengths: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the number of tokens with labels in each document from `start` on; first tokens have none."""
    if not source.has_label_column:
        return None
    ends = start + np.cumsum(lengths)
    counts = (source.count_labels(np.array([end - length + 1, end])) for end, length in zip(ends, lengths, strict=True))
    return tuple(int(count[1]) for count in counts)


def _read_runs(
    source: TokenSource, tokenizer: Tokenizer, start: int, lengths: Sequence[int], sample_tokens: int
) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """Returns the text of each run of tokens with and without labels, document by document, up to `sample_tokens`."""
    documents, end = [], start + sample_tokens
    for length in lengths:
        count = min(length, end - start)
        tokens, has_label = np.empty(count, np.int64), np.empty(count, np.bool_)
        source.read(start, tokens)
        source.read_labels(start, has_label)
        has_label[0] = False
        edges = [0, *(np.flatnonzero(np.diff(has_label)) + 1).tolist(), count]
        documents.append(
            tuple(
                (tokenizer.spell(tokens[first:last].tolist(), has_controls=True), bool(has_label[first]))
                for first, last in pairwise(edges)
            )
        )
        start += length
    return tuple(documents)


def _read_sample(
    source: TokenSource, shard: int, tokenizer: Tokenizer | None, first_document: int, num_tokens: int
) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    texts: list[str] = []
    lengths: list[int] = []
    start = source.document_start(shard, first_document)
    for end in source.shard_ends(shard)[first_document:].tolist():
        room = num_tokens - sum(lengths)
        tokens = np.empty(min(room, end - start), np.int64)
        source.read(start, tokens)
        ids: list[int] = tokens.tolist()
        texts.append(" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids))
        lengths.append(end - start)
        if end - start >= room:
            return tuple(texts), tuple(lengths), end - start > room
        start = end
    return tuple(texts), tuple(lengths), False
