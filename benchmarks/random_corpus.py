"""Writes a corpus of random tokens, with documents of realistic length in several shards."""

from pathlib import Path
from typing import Final

import numpy as np

from genesis.data.manifest import CorpusManifest, ShardRecord, SourceRecord, write_manifest
from genesis.data.shards import EncodedDocuments, ShardWriter
from genesis.tokenizer.train import BOS_ID, EOS_ID

VOCAB_SIZE: Final = 49_152
FIRST_PIECE: Final = 16
MEAN_DOCUMENT_TOKENS: Final = 800
NUM_SHARDS: Final = 8
WEIGHTS: Final = {"web": 7, "code": 3}


def write_random_corpus(path: Path, num_tokens: int, vocab_size: int = VOCAB_SIZE) -> Path:
    """Writes a corpus of two sources with `NUM_SHARDS` shards each, and a flat file of the same tokens.

    Returns:
        The path of the flat file, whose type is uint16.
    """
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    flat_path = path.with_suffix(".tokens")
    sources = []
    with flat_path.open("wb") as flat:
        for name, weight in WEIGHTS.items():
            shards = []
            for number in range(NUM_SHARDS):
                relative = f"train/{name}/{number:05d}.ds"
                (path / relative).parent.mkdir(parents=True, exist_ok=True)
                shard_tokens = num_tokens // (len(WEIGHTS) * NUM_SHARDS)
                shards.append(_write_random_shard(path / relative, relative, shard_tokens, rng, vocab_size))
                flat.write((path / relative).read_bytes())
            sources.append(
                SourceRecord(
                    name,
                    weight,
                    num_documents=sum(shard.num_documents for shard in shards),
                    num_text_bytes=sum(shard.num_text_bytes for shard in shards),
                    num_tokens=sum(shard.num_tokens for shard in shards),
                    shards=shards,
                )
            )
    write_manifest(
        path,
        CorpusManifest(
            name="random",
            hash_algorithm="blake3",
            tokenizer_hash="",
            vocab_size=vocab_size,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            token_dtype="uint16",
            train=tuple(sources),
            validation=(),
        ),
    )
    return flat_path


def _write_random_shard(
    path: Path, relative: str, num_tokens: int, rng: np.random.Generator, vocab_size: int
) -> ShardRecord:
    lengths = 2 + rng.geometric(1 / MEAN_DOCUMENT_TOKENS, max(1, num_tokens // MEAN_DOCUMENT_TOKENS))
    ends = np.cumsum(lengths)
    tokens = rng.integers(FIRST_PIECE, vocab_size, ends[-1], dtype=np.int32)
    tokens[ends - lengths] = BOS_ID
    tokens[ends - 1] = EOS_ID
    writer = ShardWriter(path, "uint16", "random", EOS_ID)
    writer.append(EncodedDocuments(tokens, lengths, num_text_bytes=0))
    return writer.finish(relative)
