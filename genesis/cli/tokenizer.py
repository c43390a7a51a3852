"""`genesis tokenizer train` and `genesis tokenizer inspect`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from genesis.base.arguments import Bytes
from genesis.base.console import Console
from genesis.base.errors import UserError, numbered
from genesis.cli.options import PLAIN_WIDTH, build_parser, make, parse
from genesis.data.sources import SourceOptions, check_sources, sample_texts
from genesis.data.tokenizer_training import Sample, train_in_worker
from genesis.tokenizer.inspect import find_unused, measure_texts
from genesis.tokenizer.open import FORMATS, open_tokenizer
from genesis.tokenizer.train import TokenizerOptions

_TRAIN_DESCRIPTION = """Trains a byte-pair-encoding tokenizer on the text of named sources, and writes it to the
directory OUT. The tokenizer has byte fallback, splits digits and does not normalise: decoding returns every text byte
for byte. Text is sampled from the sources by weight, deterministically; the sample is held in memory.
Example: genesis tokenizer train --out tokenizers/web --sources '[{name: web, paths: [data/web]}]'"""

_INSPECT_DESCRIPTION = """Reports how well a tokenizer fits text: bytes per token of each source, whether every text
survives encoding and decoding, and which learned pieces the text never uses. Exit status 1 if a text changed.
Example: genesis tokenizer inspect --tokenizer tokenizers/web --sources '[{name: web, paths: [data/web]}]'"""


_TRAINED: Final = Bytes(200_000_000)
_MEASURED: Final = Bytes(50_000_000)


@dataclass(frozen=True)
class TrainOptions:
    """Text to train on.

    Args:
        sources: Named sources of text, each with paths, weight and format, as for `genesis data prepare`.
        out: Directory for the tokenizer.
        sample_bytes: Size of the text to train on, over all sources by weight.
        seed: Seed of the text sample.
    """

    sources: tuple[SourceOptions, ...]
    out: Path
    sample_bytes: Bytes = _TRAINED
    seed: int = 0

    def __post_init__(self) -> None:
        check_sources(self.sources)
        if self.sample_bytes < 1:
            raise UserError(f"sample_bytes {self.sample_bytes} must be at least 1")


@dataclass(frozen=True)
class InspectOptions:
    """Text to measure.

    Args:
        tokenizer: A directory that contains a tokenizer, or a tokenizer file.
        sources: Named sources of text, each with paths, weight and format, as for `genesis data prepare`.
        sample_bytes: Size of the text to measure, over all sources by weight.
        seed: Seed of the text sample.
        num_threads: Number of threads that encode.
    """

    tokenizer: Path
    sources: tuple[SourceOptions, ...]
    sample_bytes: Bytes = _MEASURED
    seed: int = 0
    num_threads: int = 2

    def __post_init__(self) -> None:
        check_sources(self.sources)
        if self.num_threads < 1:
            raise UserError(f"num_threads {self.num_threads} must be at least 1")


def train_main(argv: list[str]) -> int:
    """Runs `genesis tokenizer train` and returns its exit status."""
    parser = build_parser("tokenizer train", _TRAIN_DESCRIPTION)
    parser.add_class_arguments(TrainOptions)
    parser.add_class_arguments(TokenizerOptions)
    parser.add_argument("--replace", action="store_true", help="replace a tokenizer that is already in OUT")
    arguments = parse(parser, argv, TrainOptions, TokenizerOptions)
    options = make(TrainOptions, arguments)
    _check_is_free(options.out, may_replace=arguments.replace)
    sample = Sample(options.sources, options.sample_bytes, options.seed)
    path = train_in_worker(sample, make(TokenizerOptions, arguments), options.out, _warn)
    tokenizer = open_tokenizer(path)
    print(f"{path}: {numbered(tokenizer.vocab_size, 'ids')}, hash {tokenizer.hash[:16]}")
    return 0


def _warn(line: str) -> None:
    print(f"genesis: warning: {line}", file=sys.stderr)


def _check_is_free(out: Path, *, may_replace: bool) -> None:
    """Refuses a directory that has a tokenizer of any kind: corpora and runs may have been made with it.

    Raises:
        UserError: There is a tokenizer.
    """
    found = [name for form in FORMATS for name in form.file_names if (out / name).exists()]
    if found and not may_replace:
        raise UserError(f"{out} already has a tokenizer ({', '.join(found)}): give another --out, or add --replace")


def inspect_main(argv: list[str]) -> int:
    """Runs `genesis tokenizer inspect` and returns its exit status."""
    parser = build_parser("tokenizer inspect", _INSPECT_DESCRIPTION)
    parser.add_class_arguments(InspectOptions)
    options = make(InspectOptions, parse(parser, argv, InspectOptions))
    tokenizer = open_tokenizer(options.tokenizer)
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    num_changed = 0
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{options.tokenizer}: {tokenizer.kind}, {numbered(tokenizer.vocab_size, 'ids')}, "
        f"hash {tokenizer.hash[:16]}",
    )
    for column in ("source", "documents", "bytes", "tokens", "bytes/token", "single bytes", "round trip"):
        table.add_column(column, justify="left" if column in ("source", "round trip") else "right")
    total_weight = sum(source.weight for source in options.sources)
    for source in options.sources:
        texts = sample_texts([source], options.sample_bytes * source.weight // total_weight, options.seed, _warn)
        report = measure_texts(tokenizer, texts, options.num_threads)
        counts += report.id_counts
        num_changed += report.num_changed
        table.add_row(
            source.name,
            f"{report.num_documents:,}",
            f"{report.num_bytes:,}",
            f"{report.num_tokens:,}",
            f"{report.bytes_per_token:.3f}",
            f"{report.num_byte_tokens / max(1, report.num_tokens):.2%}",
            "exact" if not report.num_changed else f"{report.num_changed:,} changed",
        )
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(table)
    unused = find_unused(tokenizer, counts)
    examples = " ".join(repr(tokenizer.pieces[token]) for token in unused[:20])
    console.print(f"never used: {numbered(len(unused), 'learned pieces')}{', ' if unused else ''}{escape(examples)}")
    return 1 if num_changed else 0
