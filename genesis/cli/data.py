"""`genesis data prepare`, `genesis data plan`, `genesis data inspect` and `genesis data verify`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from genesis.base.console import Console
from genesis.base.errors import UserError, numbered
from genesis.base.run_directory import RunDirectory
from genesis.chat.render import read_template
from genesis.chat.stops import describe_ends, find_turn_ends
from genesis.cli.options import FAILED_CHECK, PLAIN_WIDTH, build_parser, make, parse
from genesis.data.conversations import ConversationCounts
from genesis.data.corpus import open_corpus
from genesis.data.inspect import (
    Lengths,
    PackingReport,
    Sample,
    draw_samples,
    measure_lengths,
    report_packings,
    verify_corpus,
    verify_pairs,
    verify_plans,
)
from genesis.data.manifest import FEW_HELD_OUT, MANIFEST_NAME, SPLITS, CorpusManifest, SourceRecord, read_manifest
from genesis.data.plans import PlannedPacking, count_lost_documents, list_plans, write_plan
from genesis.data.prepare import PrepareOptions, prepare_corpus
from genesis.tokenizer.open import open_tokenizer

_PREPARE_DESCRIPTION = """Turns text into token shards with a manifest, in OUT/NAME.
Reads .txt and source code (one document per file), .jsonl, .json, .csv and .tsv, all of these as .gz and .zst, and
.parquet and .arrow. It prints how many files of each kind it reads, and which files it does not. A fraction of the
documents is held out for validation. The command may be killed at any time: the same command continues, with the same
result. Give sources in a YAML file: genesis data prepare --config configs/data.yaml"""

_PLAN_DESCRIPTION = """Plans a packing: which documents go into which sequence. The shards are not changed.
best_fit keeps documents whole where they fit, pad puts one document into each sequence; chunk, the default for
text, needs no plan. Training finds the plan by data.packing and data.seq_len, and makes that of conversations itself.
Example: genesis data plan corpora/demo --packing best_fit --seq_len 2048"""

_INSPECT_DESCRIPTION = """Shows the content of a corpus and some decoded samples, with a rule at each document's end.
Of conversations, the learned text is green, or between \u27e6 and \u27e7 without colors. A sample of pairs is one pair.
With --seq_len it reports the effect of each packing: labels is the share of positions with a label (the others are
padding, or tokens that are only read), truncated the share of labels whose document's beginning is cut off, dropped the
number of labels that no sequence contains.
Example: genesis data inspect corpora/demo --num_samples 5 --seq_len 2048"""

_VERIFY_DESCRIPTION = """Reads every shard and plan of a corpus, and compares its size and hash with the manifest.
Exit status 1 if one of them differs. Example: genesis data verify corpora/demo"""


_LEARNED = ("\u27e6", "\u27e7")
"""Marks around learned text where there are no colors."""
_LABELS_CELL = 5
"""Index of the labels cell among the cells of a source: after its tokens."""


@dataclass(frozen=True)
class InspectOptions:
    """Options of `genesis data inspect`.

    Args:
        split: The split to sample documents from.
        num_samples: Number of samples, spread evenly over all documents.
        sample_tokens: Number of tokens per sample.
        seed: Seed of the choice of samples.
        seq_len: Sequence length for which to report the effect of each packing on the training set; existing plans are
            reported without it.
    """

    split: Literal["train", "validation"] = "train"
    num_samples: int = 3
    sample_tokens: int = 200
    seed: int = 0
    seq_len: int | None = None

    def __post_init__(self) -> None:
        if self.seq_len is not None and self.seq_len < 1:
            raise UserError(f"seq_len {self.seq_len} must be at least 1")
        if self.num_samples < 0 or self.sample_tokens < 1:
            raise UserError(
                f"num_samples {self.num_samples} must be at least 0 and sample_tokens {self.sample_tokens} at least 1"
            )


def prepare_main(argv: list[str]) -> int:
    """Runs `genesis data prepare` and returns its exit status."""
    parser = build_parser("data prepare", _PREPARE_DESCRIPTION)
    parser.add_class_arguments(PrepareOptions)
    parser.add_argument("--restart", action="store_true", help="discard the results of an earlier attempt in OUT/NAME")
    arguments = parse(parser, argv, PrepareOptions)
    options = make(PrepareOptions, arguments)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    plans = list_plans(options.corpus)
    was_complete = (options.corpus / MANIFEST_NAME).exists() and not arguments.restart
    manifest = prepare_corpus(
        options,
        restart=arguments.restart,
        warn=_warn,
        note=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
    )
    has_plans = options.packing is None or list_plans(options.corpus) == plans
    if was_complete and has_plans:
        print(f"nothing to do: {options.corpus} was complete; --restart prepares it again")
    console.print(_manifest_table(options.corpus, manifest))
    _print_chat(console, options.corpus, manifest)
    _print_packing(console, options)
    num_held_out = sum(source.num_documents for source in manifest.validation)
    if options.validation_fraction and not num_held_out:
        fraction = options.validation_fraction
        console.print(
            "No document is held out for validation: the corpus is too small for its validation_fraction "
            f"{fraction:g}; {manifest.advise_held_out(fraction)}.",
            highlight=False,
        )
    elif num_held_out and num_held_out < FEW_HELD_OUT:
        console.print(
            f"Only {num_held_out} of the documents {'is' if num_held_out == 1 else 'are'} held out for validation: "
            f"the loss of so few is little evidence; {manifest.advise_held_out(options.validation_fraction)}.",
            highlight=False,
        )
    return 0


def _print_packing(console: Console, options: PrepareOptions) -> None:
    """Prints how many conversations the planned packing cuts."""
    if options.packing is None or options.seq_len is None:
        return
    for source in open_corpus(options.corpus, verify_hashes="never").train:
        if source.has_conversations:
            lost = count_lost_documents(source, options.seq_len, options.packing)
            console.print(f"{source.name}: {lost.describe(options.packing, options.seq_len)}", highlight=False)


def plan_main(argv: list[str]) -> int:
    """Runs `genesis data plan` and returns its exit status."""
    parser = build_parser("data plan", _PLAN_DESCRIPTION)
    parser.add_argument("corpus", type=Path, help="directory of a corpus")
    parser.add_argument("--packing", type=PlannedPacking, default="best_fit", help="how documents are packed")
    parser.add_argument("--seq_len", type=int, required=True, help="tokens per sequence, equal to data.seq_len")
    arguments = parse(parser, argv)
    corpus = open_corpus(arguments.corpus, verify_hashes="never")
    plans = list_plans(corpus.path)
    plan = write_plan(corpus, arguments.packing, arguments.seq_len)
    if plan in plans:
        print("nothing to do: the plan was complete")
    reports = [
        PackingReport(source, plan.packing, plan.seq_len, record.figures, "ready")
        for source, record in plan.sources.items()
    ]
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(_packing_table(reports))
    return 0


def inspect_main(argv: list[str]) -> int:
    """Runs `genesis data inspect` and returns its exit status."""
    parser = build_parser("data inspect", _INSPECT_DESCRIPTION)
    parser.add_argument("corpus", type=Path, help="a directory written by `genesis data prepare`")
    parser.add_class_arguments(InspectOptions)
    arguments = parse(parser, argv, InspectOptions)
    options = make(InspectOptions, arguments)
    manifest = read_manifest(arguments.corpus)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(_manifest_table(arguments.corpus, manifest))
    _print_chat(console, arguments.corpus, manifest)
    corpus = open_corpus(arguments.corpus, verify_hashes="never")
    for lengths in measure_lengths(corpus, options.split):
        console.print(_describe_lengths(lengths, options.split, is_paired=manifest.is_paired), highlight=False)
    reports = report_packings(corpus, options.seq_len)
    if reports:
        console.print(_packing_table(reports))
    for line in _describe_sequences(reports, manifest):
        console.print(line, highlight=False)
    for sample in draw_samples(corpus, options.split, options.num_samples, options.sample_tokens, options.seed):
        if manifest.is_paired:
            _print_pair(console, sample)
        else:
            _print_sample(console, sample)
    return 0


def _warn(line: str) -> None:
    print(f"genesis: warning: {line}", file=sys.stderr)


def _describe_turn_ends(corpus: Path) -> str:
    """Returns a line with the tokens that end the assistant's turns."""
    tokenizer = open_tokenizer(corpus)
    ends = find_turn_ends(read_template(RunDirectory(corpus).chat_template), tokenizer)
    return f"the assistant's turns end with {describe_ends(ends.ids, tokenizer) or 'a token that is not known'}"


def _print_chat(console: Console, corpus: Path, manifest: CorpusManifest) -> None:
    """Prints how conversations became tokens, and which of them are cut or missing."""
    if manifest.chat is None:
        return
    chat = manifest.chat
    today = "" if chat.date is None else f", with the date {chat.date}"
    line = f"chat template {chat.template_name}{today}; learned: {chat.labels}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_describe_turn_ends(corpus), highlight=False, markup=False)
    for name, counts in chat.sources.items():
        found = ConversationCounts(**counts)
        missing = found.describe_missing()
        what = numbered(found.num_written, "pairs" if chat.is_paired else "conversations")
        what += " of answers" if chat.is_paired else ""
        console.print(f"{name}: {what}" + (f"; {missing}" if missing else ""))


def verify_main(argv: list[str]) -> int:
    """Runs `genesis data verify` and returns its exit status."""
    parser = build_parser("data verify", _VERIFY_DESCRIPTION)
    parser.add_argument("corpus", type=Path, help="a directory written by `genesis data prepare`")
    corpus: Path = parse(parser, argv).corpus
    if not (corpus / MANIFEST_NAME).exists():
        read_manifest(corpus)  # raises: a path without a corpus is the user's mistake, not damage
    try:
        shards = list(verify_corpus(corpus))
        opened = open_corpus(corpus, verify_hashes="never")
        plans = verify_plans(opened)
        verify_pairs(opened)
    except UserError as error:
        print(f"genesis: error: {error}", file=sys.stderr)
        return FAILED_CHECK
    num_bytes = sum({shard.path: shard.file_bytes for shard in shards}.values())
    found = ", ".join(f"{plan.packing} at seq_len {plan.seq_len}" for plan in plans) or "none"
    print(f"{corpus}: {numbered(len(shards), 'shards')}, {num_bytes:,} bytes, all as in the manifest; plans: {found}")
    return 0


def _manifest_table(corpus: Path, manifest: CorpusManifest) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{corpus}: {manifest.token_dtype} tokens of a vocabulary of {manifest.vocab_size:,}",
        caption=f"tokenizer {manifest.tokenizer_hash[:16] or 'unknown'}",
    )
    has_labels = any("labels_hash" in source.table.columns for split in SPLITS for source in manifest.split(split))
    labels = ("labels",) if has_labels else ()
    for column in ("split", "source", "weight", "documents", "bytes", "tokens", *labels, "bytes/token", "shards"):
        table.add_column(column, justify="left" if column in ("split", "source") else "right")
    for split in SPLITS:
        for source in manifest.split(split):
            cells = list(_source_cells(source))
            if has_labels:
                cells.insert(_LABELS_CELL, _labels_cell(source))
            table.add_row(split, *cells)
    return table


def _labels_cell(source: SourceRecord) -> str:
    """Returns the share of a source's tokens that have a label."""
    if "labels_hash" not in source.table.columns:
        return "all"
    return f"{source.num_labels / max(1, source.num_tokens):.2%}"


def _source_cells(source: SourceRecord) -> tuple[str, ...]:
    return (
        source.name,
        str(source.weight),
        f"{source.num_documents:,}",
        f"{source.num_text_bytes:,}" if source.num_text_bytes else "unknown",
        f"{source.num_tokens:,}",
        f"{source.num_text_bytes / source.num_tokens:.3f}" if source.num_text_bytes else "unknown",
        f"{len(source.shards):,}",
    )


def _packing_table(reports: Sequence[PackingReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="training set in sequences")
    left = ("packing", "source", "plan")
    for column in (*left[:2], "seq_len", "sequences", "labels", "truncated", "documents cut", "dropped", left[2]):
        table.add_column(column, justify="left" if column in left else "right")
    for report in reports:
        figures = report.figures
        table.add_row(
            report.packing,
            report.source,
            f"{report.seq_len:,}",
            f"{figures.num_sequences:,}",
            f"{figures.fill(report.seq_len):.2%}",
            f"{figures.num_truncated_tokens / max(1, figures.num_valid_tokens):.2%}",
            f"{figures.num_documents_cut:,} ({figures.num_documents_cut / max(1, figures.num_documents):.2%})",
            f"{figures.num_labels - figures.num_valid_tokens:,}",
            report.plan,
        )
    return table


def _describe_lengths(lengths: Lengths, split: str, *, is_paired: bool) -> str:
    document = "an answer with its prompt" if is_paired else "a conversation"
    return (
        f"{lengths.source}, {split}: tokens of {document}: median {lengths.median:,}, p95 {lengths.p95:,}, longest "
        f"{lengths.longest:,}; {lengths.num_labels:,} of {numbered(lengths.num_tokens, 'tokens')} are learned"
    )


def _describe_sequences(reports: Sequence[PackingReport], manifest: CorpusManifest) -> Iterator[str]:
    """Yields how many conversations a sequence holds, for each packing."""
    for report in reports:
        if manifest.chat is not None and report.source in manifest.chat.sources:
            mean = report.figures.num_documents / max(1, report.figures.num_sequences)
            packing = f"{report.packing} at seq_len {report.seq_len:,}"
            yield f"{report.source}, {packing}: {mean:.2f} conversations per sequence"


def _color_runs(runs: Sequence[tuple[str, bool]], *, has_colors: bool) -> Text:
    """Returns a text whose learned runs are in color, or between marks where there are no colors."""
    text = Text()
    for run, is_learned in runs:
        if has_colors:
            text.append(run, style="green" if is_learned else "")
        else:
            text.append(f"{_LEARNED[0]}{run}{_LEARNED[1]}" if is_learned else run)
    return text


def _print_pair(console: Console, sample: Sample) -> None:
    """Prints the ends of the two documents of a pair, where the answers are."""
    console.rule(f"{sample.shard}, pair {sample.first_document // 2}", style="bold")
    for index, side in enumerate(("chosen", "rejected")):
        text = Text(sample.texts[index])
        if sample.runs is not None:
            text = _color_runs(sample.runs[index], has_colors=console.color_system is not None)
        console.print(Text(f"{side}: ", style="bold"), text, sep="")
        num_labels = 0 if sample.num_labels is None else sample.num_labels[index]
        console.rule(
            f"{numbered(sample.num_tokens[index], 'tokens')}, {num_labels:,} of them learned",
            style="dim",
            align="right",
        )


def _print_sample(console: Console, sample: Sample) -> None:
    console.rule(f"{sample.shard}, from document {sample.first_document}", style="bold")
    for index, (text, num_tokens) in enumerate(zip(sample.texts, sample.num_tokens, strict=True)):
        is_cut = sample.is_cut and index + 1 == len(sample.texts)
        if sample.runs is not None:
            end = Text("…" if is_cut else "", style="dim")
            console.print(_color_runs(sample.runs[index], has_colors=console.color_system is not None), end, sep="")
        else:
            console.print(Text("<s>", style="dim"), Text(text), Text("…" if is_cut else "</s>", style="dim"), sep="")
        labels = "" if sample.num_labels is None else f", {sample.num_labels[index]:,} of them with labels"
        console.rule(
            f"{numbered(num_tokens, 'tokens')}{labels}" + (" (cut here)" if is_cut else ""), style="dim", align="right"
        )
