"""Looks into a corpus: checks it against its manifest, tells what packings make of it, and draws samples of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from genesis.data.corpus import Corpus
from genesis.data.manifest import CorpusManifest, ShardRecord, Split, read_manifest
from genesis.data.packing import Packing, PackingFigures
from genesis.data.plans import Plan, find_plan_fault, list_plans, measure_source, plan_fits
from genesis.data.shards import TokenDtype, hash_file, iterate_documents, shard_files
from genesis.errors import UserError
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.tokenizer.train import MODEL_NAME


@dataclass(frozen=True)
class Sample:
    """Tokens of one shard in their order, from the beginning of a document on, cut into documents.

    `texts` keeps the order; the last one may be cut short (`is_cut`), and `num_tokens` counts each with bos and eos.
    """

    source: str
    shard: str
    first_document: int
    texts: tuple[str, ...]
    num_tokens: tuple[int, ...]
    is_cut: bool


@dataclass(frozen=True)
class PackingReport:
    """What a packing makes of a source of the training set, and whether its plan is there."""

    source: str
    packing: Packing
    seq_len: int
    figures: PackingFigures
    plan: Literal["ready", "of other shards", "none", "not needed"]


def report_packings(corpus: Corpus, seq_len: int | None) -> list[PackingReport]:
    """Returns the figures of every plan that a corpus has, and of every packing at `seq_len` where it is given."""
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
        UserError: One is damaged or was made for other shards.
    """
    plans = list_plans(corpus.path)
    for plan in plans:
        fault = find_plan_fault(corpus, plan)
        if fault is not None:
            raise UserError(f"{fault}; remove the plan's directory and make it again with `genesis data plan`")
    return plans


def read_corpus_tokenizer(corpus: Path, manifest: CorpusManifest) -> Tokenizer:
    """Returns the tokenizer that the corpus was made with.

    Raises:
        UserError: The corpus holds none, or another.
    """
    tokenizer = Tokenizer.load(corpus / MODEL_NAME)
    if tokenizer.hash != manifest.tokenizer_hash:
        raise UserError(
            f"{corpus / MODEL_NAME} is tokenizer {tokenizer.hash[:16]}, the corpus was made with "
            f"{manifest.tokenizer_hash[:16]}; put that one back or prepare the corpus again"
        )
    return tokenizer


def verify_corpus(corpus: Path) -> Iterator[ShardRecord]:
    """Checks the tokenizer and every shard against the manifest; yields each shard that is found good.

    Raises:
        UserError: Some shard differs; raised after all have been looked at, it names the first and counts the rest.
    """
    manifest = read_manifest(corpus)
    read_corpus_tokenizer(corpus, manifest)
    faults: list[str] = []
    for split in ("train", "validation"):
        for source in manifest.split(split):
            for shard in source.shards:
                fault = find_fault(corpus, shard)
                if fault is None:
                    yield shard
                else:
                    faults.append(fault)
    if faults:
        others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{faults[0]}{others}; fetch the corpus again or prepare it again with --restart")


def find_fault(corpus: Path, shard: ShardRecord) -> str | None:
    """Returns how a shard differs from its record, None if it does not."""
    tokens, index, _ = shard_files(corpus / shard.path)
    for path, num_bytes, recorded in (
        (tokens, shard.file_bytes, shard.hash),
        (index, shard.num_documents * 8, shard.index_hash),
    ):
        if not path.exists():
            return f"{path} is missing"
        if path.stat().st_size != num_bytes:
            return f"{path} has {path.stat().st_size:,} bytes, the manifest says {num_bytes:,}"
        found = hash_file(path)
        if found != recorded:
            return f"{path} has hash {found[:16]}, the manifest says {recorded[:16]}"
    return None


def draw_samples(
    corpus: Path, manifest: CorpusManifest, split: Split, num_samples: int, sample_tokens: int, seed: int
) -> list[Sample]:
    """Returns stretches of about `sample_tokens`, each from a document's beginning, drawn evenly over documents.

    Raises:
        UserError: The split holds no documents.
    """
    tokenizer = read_corpus_tokenizer(corpus, manifest)
    shards = [(source.name, shard) for source in manifest.split(split) for shard in source.shards]
    ends = np.cumsum([shard.num_documents for _, shard in shards])
    if not shards:
        raise UserError(f"{corpus} has no {split} documents; choose another --split")
    samples = []
    for drawn in sorted(np.random.default_rng(seed).integers(ends[-1], size=num_samples).tolist()):
        which = int(np.searchsorted(ends, drawn, side="right"))
        source, shard = shards[which]
        first = int(drawn - (ends[which] - shard.num_documents))
        texts, lengths, is_cut = _read_sample(
            corpus / shard.path, manifest.token_dtype, tokenizer, first, sample_tokens
        )
        samples.append(Sample(source, shard.path, first, texts, lengths, is_cut))
    return samples


def _read_sample(
    path: Path, dtype: TokenDtype, tokenizer: Tokenizer, first_document: int, num_tokens: int
) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    texts: list[str] = []
    lengths: list[int] = []
    for document in islice(iterate_documents(path, dtype), first_document, None):
        room = num_tokens - sum(lengths)
        texts.append(tokenizer.decode(document[:room].tolist()))
        lengths.append(len(document))
        if len(document) >= room:
            return tuple(texts), tuple(lengths), len(document) > room
    return tuple(texts), tuple(lengths), False
