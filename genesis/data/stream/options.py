"""What to stream."""

from dataclasses import dataclass
from typing import Literal

from genesis.data.sources import SourceOptions, check_sources
from genesis.errors import UserError


@dataclass(frozen=True)
class StreamOptions:
    """Training straight from raw shards, without a corpus on disk.

    Args:
        sources: Named sources of text, each with paths, weight and format, as `genesis data prepare` takes them.
        tokenizer: A directory that holds a tokenizer, or its file; by default that of data.corpus.
        num_lanes: Parts that the stream is cut into, for ranks to share; by default as many as the files allow, to 64.
        block_tokens: Tokens that a worker reads, packs and shuffles at a time.
        num_workers: Processes of each rank that read and tokenize; 0 does it in the thread that makes windows.
        max_worker_restarts: How many killed workers of a rank are replaced before the run ends with an error.
        on_bad_document: What to do with a document or a shard that cannot be read: end the run, or skip and count it.
    """

    sources: tuple[SourceOptions, ...]
    tokenizer: str | None = None
    num_lanes: int | None = None
    block_tokens: int = 131_072
    num_workers: int = 2
    max_worker_restarts: int = 3
    on_bad_document: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        check_sources(self.sources)
        for name, least in (("num_lanes", 1), ("block_tokens", 1), ("num_workers", 0), ("max_worker_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"data.stream.{name} is {value}; it counts from {least} up")
