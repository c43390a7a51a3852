"""Opens a stream: finds its files, divides them into spans, and assigns the spans to lanes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final

from genesis.base.errors import UserError, numbered
from genesis.data.packing import Packing
from genesis.data.remote import file_name
from genesis.data.sources import InputFile, Listing, SourceOptions, Span, list_source, plan_spans
from genesis.data.sources.files import READING, kind_of
from genesis.data.stream.block import BlockRecipe, LanePart
from genesis.data.stream.lanes import choose_num_lanes, deal_spans
from genesis.data.stream.options import StreamOptions
from genesis.data.stream.worker import LaneSource
from genesis.tokenizer.tokenizer import Tokenizer

_MAX_SPAN_BYTES: Final = 4 << 20
_MIN_SPAN_BYTES: Final = 16 << 10
_SPANS_PER_SOURCE: Final = 256


@dataclass(frozen=True)
class Stream:
    """An open stream; `open_stream` builds it.

    Args:
        options: The stream's options.
        tokenizer: The tokenizer.
        recipe: The settings of all blocks.
        num_lanes: L.
        parts: The part of each source that each lane reads, in the order of the sources.
        file_hashes: A hash per source, of its files' names and sizes and of the options that find documents in them.
        listings: The files of each source.
        reading: The rules by which files are read, `READING` or those of the run that is continued.
    """

    options: StreamOptions
    tokenizer: Tokenizer
    recipe: BlockRecipe
    num_lanes: int
    parts: dict[LaneSource, LanePart]
    file_hashes: dict[str, str]
    listings: tuple[Listing, ...] = ()
    reading: int = READING

    def read_by(self, reading: int) -> "Stream":
        """Returns the stream whose files are read by other rules."""
        parts = {
            key: replace(part, spans=tuple(replace(span, reading=reading) for span in part.spans))
            for key, part in self.parts.items()
        }
        return replace(self, parts=parts, reading=reading)

    @property
    def max_epochs(self) -> dict[str, int | None]:
        """Returns the epoch limit of each source."""
        return {part.source.name: part.max_epochs for part in self.parts.values()}

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the sources' names."""
        return tuple(source.name for source in self.options.sources)

    def hash(self) -> str:
        """Returns a hash of all the stream's files."""
        return blake2b(repr(sorted(self.file_hashes.items())).encode(), digest_size=16).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Returns the settings, in plain types, that must equal those of a saved run that is continued."""
        return {
            "seed": self.recipe.seed,
            "seq_len": self.recipe.seq_len,
            "packing": self.recipe.packing,
            "block_tokens": self.recipe.block_tokens,
            "num_lanes": self.num_lanes,
            "tokenizer": self.tokenizer.hash,
            "max_epochs": self.max_epochs,
            "files": self.file_hashes,
        }


def open_stream(
    options: StreamOptions,
    tokenizer: Tokenizer,
    *,
    seed: int,
    seq_len: int,
    packing: Packing,
    max_epochs: Mapping[str, int] | None = None,
) -> Stream:
    """Finds the files of a stream and assigns them to lanes; it reads only the footers of parquet files.

    Args:
        options: The stream's options.
        tokenizer: The tokenizer.
        seed: Seed of all shuffles.
        seq_len: S.
        packing: The packing.
        max_epochs: Epoch limits by source; a source without a limit never ends.

    Raises:
        UserError: A path does not exist, a parquet file lacks the column, or the files are too few for the lanes.
    """
    if options.block_tokens <= seq_len:
        raise UserError(
            f"data.stream.block_tokens is {options.block_tokens}, less than a sequence of data.seq_len {seq_len}; "
            f"give at least {seq_len + 1}, preferably a hundred times as much"
        )
    limits = _check_limits(options, max_epochs or {})
    listings = tuple(map(list_source, options.sources))
    files = {listing.source.name: listing.files for listing in listings}
    spans = {source.name: _cut(source, files[source.name]) for source in options.sources}
    num_lanes = choose_num_lanes({name: len(found) for name, found in spans.items()}, options.num_lanes)
    parts = {
        LaneSource(lane, index): LanePart(source, lane, dealt, limits.get(source.name))
        for index, source in enumerate(options.sources)
        for lane, dealt in enumerate(deal_spans(spans[source.name], num_lanes))
    }
    recipe = BlockRecipe(seed, seq_len, packing, options.block_tokens, options.on_bad_document)
    hashes = {source.name: _hash_files(source, files[source.name]) for source in options.sources}
    return Stream(options, tokenizer, recipe, num_lanes, parts, hashes, listings)


def _check_limits(options: StreamOptions, max_epochs: Mapping[str, int]) -> Mapping[str, int]:
    names = [source.name for source in options.sources]
    for name, limit in max_epochs.items():
        if name not in names:
            raise UserError(f"data.max_epochs names the source {name!r}, which is not among {', '.join(names)}")
        if limit < 1:
            raise UserError(f"data.max_epochs gives the source {name!r} {numbered(limit, 'epochs')}; give at least 1")
    return max_epochs


def _cut(source: SourceOptions, files: Sequence[InputFile]) -> list[Span]:
    """Returns spans small enough for many lanes, and large enough for sequential reads."""
    num_bytes = sum(file.num_bytes for file in files)
    target_bytes = min(max(num_bytes // _SPANS_PER_SOURCE, _MIN_SPAN_BYTES), _MAX_SPAN_BYTES)
    return list(plan_spans(source, files, target_bytes))


def _hash_files(source: SourceOptions, files: Sequence[InputFile]) -> str:
    """Returns a hash of the files' names, sizes and, in a store, versions: the same where all of them were moved."""
    # Not os.path.commonpath, because a source may mix absolute and relative paths and URLs.
    paths = [file.path.split("/") for file in files]
    in_common = takewhile(lambda names: len(set(names)) == 1, zip(*(path[:-1] for path in paths), strict=False))
    depth = len(list(in_common))
    names = ["/".join(path[depth:]) for path in paths]
    described = (
        *(source.format, source.text_field, source.separator, source.on_undecodable),
        *(("skip",) if source.on_bad_row == "skip" else ()),
        *((name, file.num_bytes, file.identity) for name, file in zip(names, files, strict=True)),
        *(kind for path in files if (kind := _kind_since_2(path.path, source))),
    )
    return blake2b(repr(described).encode(), digest_size=16).hexdigest()


def _kind_since_2(path: str, source: SourceOptions) -> str:
    """Returns the kind of a file that the rules 1 took for text by its name; empty for other files."""
    kind = kind_of(path, source)
    stem = file_name(path).removesuffix(".gz").removesuffix(".zst")
    was_text = not stem.endswith((".jsonl", ".ndjson", ".parquet", ".arrow"))
    return kind if source.format == "auto" and kind != "text" and was_text else ""
