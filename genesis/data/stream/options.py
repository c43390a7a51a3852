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
        tokenizer: A model file or the directory that holds one; by default that of data.corpus.
        num_lanes: Parts that the stream is cut into, for ranks to share; by default as many as the files allow, to 64.
        block_tokens: Tokens that a worker reads, packs and shuffles at a time.
        num_workers: Processes of each rank that read and tokenize; 0 does it in the thread that makes windows.
        max_worker_restarts: How many killed workers of a rank are replaced before the run ends with an error.
        on_bad_document: What to do with a document or a shard that cannot be read: end the run, or skip and count it.
        max_epochs: How often each source is read, for all sources or by name; by default for ever.
    """

    sources: tuple[SourceOptions, ...]
    tokenizer: str | None = None
    num_lanes: int | None = None
    block_tokens: int = 131_072
    num_workers: int = 2
    max_worker_restarts: int = 3
    on_bad_document: Literal["error", "skip"] = "error"
    max_epochs: int | dict[str, int] | None = None

    def __post_init__(self) -> None:
        check_sources(self.sources)
        for name, least in (("num_lanes", 1), ("block_tokens", 1), ("num_workers", 0), ("max_worker_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"data.stream.{name} is {value}; it counts from {least} up")
        names = {source.name for source in self.sources}
        limits = self.max_epochs if isinstance(self.max_epochs, dict) else {"": self.max_epochs}
        for name, limit in limits.items():
            if name and name not in names:
                raise UserError(
                    f"data.stream.max_epochs names the source {name!r}, which is not among {', '.join(sorted(names))}"
                )
            if limit is not None and limit < 1:
                raise UserError(f"data.stream.max_epochs is {limit}; it counts from 1 up")

    def epochs_of(self, source: str) -> int | None:
        """Returns how often a source is read; None is for ever."""
        return self.max_epochs.get(source) if isinstance(self.max_epochs, dict) else self.max_epochs
