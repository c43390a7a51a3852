"""The options of a stream."""

from dataclasses import dataclass
from typing import Literal

from genesis.base.errors import UserError
from genesis.data.sources import SourceOptions, check_sources, refuse_sources


@dataclass(frozen=True)
class StreamOptions:
    """Training straight from raw shards, without a corpus on disk.

    Args:
        sources: Named sources of text, each with paths, weight and format, as `genesis data prepare` takes them.
        tokenizer: A directory that holds a tokenizer, or its file; by default that of data.corpus.
        num_lanes: Number of parts of the stream that ranks share; by default as many as the files allow, up to 64.
        block_tokens: Number of tokens that a worker reads, packs and shuffles together.
        num_workers: Number of processes per rank that read and tokenize; 0 uses the thread that builds windows.
        max_worker_restarts: Number of killed workers of a rank that are replaced before the run ends with an error.
        on_bad_document: Whether to end the run at an unreadable document or shard, or to skip and count it.
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
        remedy = "which a stream does not read; make a corpus by `genesis data prepare`"
        refuse_sources(self.sources, conversations=remedy)
        for name, least in (("num_lanes", 1), ("block_tokens", 1), ("num_workers", 0), ("max_worker_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"data.stream.{name} is {value}; it must be at least {least}")
