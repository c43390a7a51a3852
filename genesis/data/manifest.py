"""The corpus manifest: what a prepared corpus holds, with the hash of everything.

`genesis data prepare` writes it last and atomically; whoever opens a corpus starts here.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from genesis.errors import UserError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class ShardRecord:
    """One token shard: `path` is relative to the corpus; `index_hash` is that of its `.ds.index`."""

    path: str
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    file_bytes: int
    hash: str
    index_hash: str


@dataclass(frozen=True)
class SourceRecord:
    """One named source of one split; `weight` is the integer weight of the mix it was prepared with."""

    name: str
    weight: int
    num_documents: int
    num_text_bytes: int
    num_tokens: int
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class CorpusManifest:
    """Everything about a prepared corpus. Hashes are hex digests made with `hash_algorithm`."""

    name: str
    hash_algorithm: str
    tokenizer_hash: str
    vocab_size: int
    bos_id: int
    eos_id: int
    token_dtype: Literal["uint16", "uint32"]
    train: tuple[SourceRecord, ...]
    validation: tuple[SourceRecord, ...]
    schema_version: int = SCHEMA_VERSION

    def split(self, split: Split) -> tuple[SourceRecord, ...]:
        """Returns the sources of `split`."""
        return self.train if split == "train" else self.validation


def write_manifest(corpus: Path, manifest: CorpusManifest) -> None:
    """Writes `manifest` into `corpus`, whole or not at all, durable when this returns."""
    staging = corpus / (MANIFEST_NAME + ".staging")
    with staging.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(corpus / MANIFEST_NAME)
    directory = os.open(corpus, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_manifest(corpus: Path) -> CorpusManifest:
    """Returns the manifest of the corpus in the directory `corpus`.

    Raises:
        UserError: There is none, it is not JSON, or its schema is newer than this version reads.
    """
    path = corpus / MANIFEST_NAME
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{corpus} is not a prepared corpus (no {MANIFEST_NAME}); run `genesis data prepare`") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the corpus again") from None
    schema = raw.get("schema_version") if isinstance(raw, dict) else None
    if schema != SCHEMA_VERSION:
        raise UserError(f"{path} has schema {schema}, this version reads {SCHEMA_VERSION}; upgrade genesis")
    try:
        for split in ("train", "validation"):
            raw[split] = tuple(
                SourceRecord(**{**source, "shards": tuple(ShardRecord(**shard) for shard in source["shards"])})
                for source in raw[split]
            )
        return CorpusManifest(**raw)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the corpus again") from None
