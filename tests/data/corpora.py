"""Writes small corpora in the layout of docs/architecture.md, without the code that prepares real ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from genesis.data.manifest import CorpusManifest, ShardRecord, SourceRecord, write_manifest

BOS, EOS = 2, 3
FIRST_PIECE = 16
VOCAB_SIZE = 300
FAKE_TOKENIZER = b"a tokenizer"

Documents = Sequence[Sequence[int]]


def make_documents(num_documents: int, num_pieces: int, seed: int = 0) -> list[list[int]]:
    """Documents of 0 to 2 * num_pieces random pieces, bos and eos included."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 2 * num_pieces + 1, num_documents)
    return [[BOS, *rng.integers(FIRST_PIECE, VOCAB_SIZE, length).tolist(), EOS] for length in lengths]


def write_corpus(
    path: Path,
    train: dict[str, Documents],
    validation: dict[str, Documents] | None = None,
    *,
    weights: dict[str, int] | None = None,
    documents_per_shard: int = 3,
    token_dtype: str = "uint16",
    tokenizer: bytes = FAKE_TOKENIZER,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.model").write_bytes(tokenizer)
    splits = {}
    for split, sources in (("train", train), ("validation", validation or {})):
        splits[split] = tuple(
            _write_source(
                path, f"{split}/{name}", documents, (weights or {}).get(name, 1), documents_per_shard, token_dtype
            )
            for name, documents in sources.items()
        )
    manifest = CorpusManifest(
        name="tiny",
        hash_algorithm="blake3",
        tokenizer_hash=blake3(tokenizer).hexdigest(),
        vocab_size=VOCAB_SIZE,
        bos_id=BOS,
        eos_id=EOS,
        token_dtype="uint16" if token_dtype == "uint16" else "uint32",
        train=splits["train"],
        validation=splits["validation"],
    )
    write_manifest(path, manifest)
    return path


def _write_source(
    corpus: Path, folder: str, documents: Documents, weight: int, documents_per_shard: int, token_dtype: str
) -> SourceRecord:
    (corpus / folder).mkdir(parents=True, exist_ok=True)
    shards = []
    for number, first in enumerate(range(0, len(documents), documents_per_shard)):
        part = documents[first : first + documents_per_shard]
        path = f"{folder}/{number:05d}.ds"
        data = np.array(
            [token for document in part for token in document], f"<u{np.dtype(token_dtype).itemsize}"
        ).tobytes()
        index = np.cumsum([len(document) for document in part]).astype("<u8").tobytes()
        (corpus / path).write_bytes(data)
        (corpus / f"{path}.index").write_bytes(index)
        num_tokens = sum(map(len, part))
        shards.append(
            ShardRecord(
                path=path,
                num_tokens=num_tokens,
                num_documents=len(part),
                num_text_bytes=num_tokens,
                file_bytes=len(data),
                hash=blake3(data).hexdigest(),
                index_hash=blake3(index).hexdigest(),
            )
        )
    return SourceRecord(
        name=folder.split("/")[1],
        weight=weight,
        num_documents=len(documents),
        num_text_bytes=sum(shard.num_text_bytes for shard in shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
        shards=tuple(shards),
    )
