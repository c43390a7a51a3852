"""`genesis data prepare`, `genesis data inspect` and `genesis data verify`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from genesis.cli.options import PLAIN_WIDTH, build_parser, make, parse
from genesis.data.inspect import Sample, draw_samples, verify_corpus
from genesis.data.manifest import CorpusManifest, SourceRecord, Split, read_manifest
from genesis.data.prepare import PrepareOptions, PrepareProgress, prepare_corpus
from genesis.errors import UserError

_PREPARE_DESCRIPTION = """Turns text into token shards with a manifest, in OUT/NAME.
Reads .txt and source code (a file is a document), .jsonl, all of these as .gz and .zst, and .parquet; a share of the
documents is held out for validation. It can be killed at any moment: the same command goes on where it was, to the same
result. Sources are best given in a YAML file: genesis data prepare --config configs/data.yaml"""

_INSPECT_DESCRIPTION = """Shows what a corpus holds and some decoded samples, a rule at each document's end.
Example: genesis data inspect corpora/demo --num_samples 5"""

_VERIFY_DESCRIPTION = """Reads every shard of a corpus and compares its size and hash with the manifest.
Exit status 2 if one differs. Example: genesis data verify corpora/demo"""


@dataclass(frozen=True)
class InspectOptions:
    """What to show.

    Args:
        split: Documents of which split.
        num_samples: Stretches of tokens to show, drawn evenly over all documents.
        sample_tokens: Length of each.
        seed: Chooses them.
    """

    split: Literal["train", "validation"] = "train"
    num_samples: int = 3
    sample_tokens: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 0 or self.sample_tokens < 1:
            raise UserError(
                f"cannot show {self.num_samples} samples of {self.sample_tokens} tokens; give at least 0 and 1"
            )


def prepare_main(argv: list[str]) -> int:
    """Runs `genesis data prepare` and returns its exit status."""
    parser = build_parser("data prepare", _PREPARE_DESCRIPTION)
    parser.add_class_arguments(PrepareOptions)
    parser.add_argument("--restart", action="store_true", help="throw away what an earlier attempt made in OUT/NAME")
    arguments = parse(parser, argv, PrepareOptions)
    options = make(PrepareOptions, arguments)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    with _ProgressBar(console).shown() as bar:
        manifest = prepare_corpus(options, restart=arguments.restart, report=bar.update)
    console.print(_manifest_table(options.corpus, manifest))
    if options.validation_fraction and not manifest.validation:
        console.print("No document fell to the validation set: the corpus is small for its validation_fraction.")
    return 0


def inspect_main(argv: list[str]) -> int:
    """Runs `genesis data inspect` and returns its exit status."""
    parser = build_parser("data inspect", _INSPECT_DESCRIPTION)
    parser.add_argument("corpus", type=Path, help="directory that `genesis data prepare` made")
    parser.add_class_arguments(InspectOptions)
    arguments = parse(parser, argv, InspectOptions)
    options = make(InspectOptions, arguments)
    manifest = read_manifest(arguments.corpus)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(_manifest_table(arguments.corpus, manifest))
    for sample in draw_samples(
        arguments.corpus, manifest, options.split, options.num_samples, options.sample_tokens, options.seed
    ):
        _print_sample(console, sample)
    return 0


def verify_main(argv: list[str]) -> int:
    """Runs `genesis data verify` and returns its exit status."""
    parser = build_parser("data verify", _VERIFY_DESCRIPTION)
    parser.add_argument("corpus", type=Path, help="directory that `genesis data prepare` made")
    corpus: Path = parse(parser, argv).corpus
    shards = list(verify_corpus(corpus))
    num_bytes = sum(shard.file_bytes for shard in shards)
    print(f"{corpus}: {len(shards):,} shards, {num_bytes:,} bytes, all as the manifest says")
    return 0


class _ProgressBar:
    """Speaks of input bytes, tokens per second and the time that is left."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("tokenizing"),
            BarColumn(),
            TextColumn("{task.percentage:>5.1f}%"),
            TextColumn("{task.fields[tokens]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._start_seconds = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator["_ProgressBar"]:
        with self._progress:
            yield self

    def update(self, progress: PrepareProgress) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=progress.num_bytes, tokens="")
            self._start_seconds = time.monotonic()
        elapsed_seconds = max(1e-9, time.monotonic() - self._start_seconds)
        self._progress.update(
            self._task,
            completed=progress.num_bytes_done,
            tokens=f"{progress.num_new_tokens:,} tokens, {progress.num_new_tokens / elapsed_seconds:,.0f} tokens/s",
        )


def _manifest_table(corpus: Path, manifest: CorpusManifest) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{corpus}: {manifest.token_dtype} tokens of a vocabulary of {manifest.vocab_size:,}",
        caption=f"tokenizer {manifest.tokenizer_hash[:16]}",
    )
    for column in ("split", "source", "weight", "documents", "bytes", "tokens", "bytes/token", "shards"):
        table.add_column(column, justify="left" if column in ("split", "source") else "right")
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        for source in manifest.split(split):
            table.add_row(split, *_source_cells(source))
    return table


def _source_cells(source: SourceRecord) -> tuple[str, ...]:
    return (
        source.name,
        str(source.weight),
        f"{source.num_documents:,}",
        f"{source.num_text_bytes:,}",
        f"{source.num_tokens:,}",
        f"{source.num_text_bytes / max(1, source.num_tokens):.3f}",
        f"{len(source.shards):,}",
    )


def _print_sample(console: Console, sample: Sample) -> None:
    console.rule(f"{sample.shard}, from document {sample.first_document}", style="bold")
    for index, (text, num_tokens) in enumerate(zip(sample.texts, sample.num_tokens, strict=True)):
        is_cut = sample.is_cut and index + 1 == len(sample.texts)
        console.print(Text("<s>", style="dim"), Text(text), Text("…" if is_cut else "</s>", style="dim"), sep="")
        console.rule(f"{num_tokens:,} tokens" + (" (cut here)" if is_cut else ""), style="dim", align="right")
