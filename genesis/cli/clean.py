"""`genesis data clean`."""

import difflib
import re
import sys
from argparse import ArgumentError, RawDescriptionHelpFormatter
from dataclasses import MISSING, fields
from textwrap import fill
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser
from rich import box
from rich.table import Table

from genesis.base.console import Console
from genesis.base.errors import UserError, numbered
from genesis.cli.help import PlainHelp
from genesis.cli.options import PLAIN_WIDTH, build_parser, make, parse
from genesis.cli.type_errors import explain_types
from genesis.data.clean.clean import Submitted, clean_corpus
from genesis.data.clean.plan import STAGES, CleanOptions, StageOptions
from genesis.data.clean.report import MANIFEST_NAME, Amount, CleanReport
from genesis.data.row_notes import describe_blank

_DESCRIPTION = """Filters, deduplicates and decontaminates text, and reports how much was dropped for which reason.
The command may be killed at any time: the same command continues with the unfinished tasks, to the same result. The
result is OUT/text/SOURCE/*.jsonl.zst, which `genesis data prepare` reads.

A recipe is a YAML file, as for `genesis data clean --config clean.yaml`:

  sources: [{name: web, paths: [raw/web]}]
  out: cleaned
  stages: [{filter: length, min_words: 20}, {filter: repetition}, {filter: near_duplicates}]

Filters run in the given order. All except exact_duplicates and near_duplicates also take `sources` and `languages`, and
then check only these documents; others pass.

"""
_MANY_REASONS = 4


class _HelpFormatter(PlainHelp, RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description."""


def clean_main(argv: list[str]) -> int:
    """Runs `genesis data clean` and returns its exit status."""
    parser = build_parser("data clean", _DESCRIPTION + "\n".join(map(_describe, STAGES.values())))
    parser.formatter_class = _HelpFormatter
    parser.add_class_arguments(CleanOptions, skip={"stages"})
    parser.add_argument("--stages", type=list[dict[str, Any]], required=True, help="filters, in order of execution")
    parser.add_argument("--restart", action="store_true", help="discard the results of an earlier attempt in OUT")
    arguments = parse(parser, argv, CleanOptions)
    arguments.stages = tuple(build_stage(number, stage) for number, stage in enumerate(arguments.stages, 1))
    options = make(CleanOptions, arguments)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    was_complete = (options.out / MANIFEST_NAME).exists() and not arguments.restart
    result = clean_corpus(
        options,
        restart=arguments.restart,
        note=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
    )
    if isinstance(result, Submitted):
        jobs = ", ".join(result.jobs)
        print(f"submitted Slurm jobs {jobs}; run the same command after they have ended to see the result")
        return 0
    if was_complete:
        print(f"nothing to do: {options.out} was complete; --restart cleans it again")
    _print_report(console, options, result)
    return 0


def build_stage(number: int, given: dict[str, Any]) -> StageOptions:
    """Returns the stage `number` (from 1) of a recipe.

    Raises:
        UserError: The filter is unknown, or one of its options is unknown, missing or of a wrong type.
    """
    wanted = given.get("filter")
    if wanted is None:
        raise UserError(f"stage {number} has no filter; give `filter:` with one of {', '.join(STAGES)}")
    if not isinstance(wanted, str) or wanted not in STAGES:
        raise UserError(f"stage {number}: no such filter: {wanted!r}{_nearest(str(wanted), list(STAGES))}")
    stage, rest = STAGES[wanted], {key: value for key, value in given.items() if key != "filter"}
    names = [field.name for field in fields(stage)]
    for key in rest:
        if key not in names:
            raise UserError(f"stage {number} ({wanted}) has no option {key!r}{_nearest(str(key), names)}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(stage)
    try:
        arguments = parser.instantiate_classes(parser.parse_object(rest))
    except UserError:
        raise
    except (ArgumentError, ValueError) as error:
        raise UserError(f"stage {number} ({wanted}): {_explain(str(error), stage, rest)}") from None
    try:
        return make(stage, arguments)
    except UserError as error:
        raise UserError(f"stage {number}: {error}") from None


def _explain(message: str, stage: type[StageOptions], given: dict[str, Any]) -> str:
    """Returns a parser's message in one line; for an option of several types, only the value and the types."""
    key = re.search(r'Parser key "(\w+)"', message)
    if key and "Union" in message and key[1] in given:
        kind = str(get_type_hints(stage)[key[1]]).removeprefix("<class '").removesuffix("'>")
        return f"{key[1]} is {given[key[1]]!r}, not {kind}"
    return explain_types(" ".join(message.split()))


def _nearest(wanted: str, names: list[str]) -> str:
    near = difflib.get_close_matches(wanted, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(names)}"


def _describe(stage: type[StageOptions]) -> str:
    options = [
        f"{field.name}={_default(field.default)}"
        for field in fields(stage)
        if field.name not in ("sources", "languages")
    ]
    line = f"{stage.name}: {', '.join(options)}" if options else stage.name
    return fill(line, 116, initial_indent="  ", subsequent_indent="      ", break_long_words=False)


def _default(value: object) -> str:
    if value is MISSING or value is None or value in ((), ""):
        return "-"
    return str(value).replace(" ", "")


def _print_report(console: Console, options: CleanOptions, report: CleanReport) -> None:
    console.print(_stage_table(options, report))
    console.print(_source_table(report))
    for source in report.sources:
        if source.num_blank:
            line = f"source {source.name}: {describe_blank(source.num_blank)}"
            console.print(line, highlight=False, soft_wrap=True)
    for each in report.evaluation:
        if each.num_too_short:
            texts = numbered(each.num_texts, "evaluation texts")
            short = f"{each.num_too_short:,} of {texts} are too short to be searched for"
            console.print(f"{each.label}: {short}", highlight=False)
    console.print(f"Examples of dropped documents: {options.out / 'dropped'}", highlight=False, soft_wrap=True)


def _stage_table(options: CleanOptions, report: CleanReport) -> Table:
    unit = "characters" if options.tokenizer is None else "tokens"
    table = Table(box=box.SIMPLE_HEAD, title=f"{options.out}", title_justify="left")
    for column in ("filter", "documents in", "dropped", "kept", f"{unit} kept", "share"):
        table.add_column(column, justify="left" if column == "filter" else "right")
    table.add_column("dropped because", overflow="fold")
    table.add_row("(read)", "", "", *_cells(report.read, report.read), "")
    for each in report.stages:
        dropped = each.entered.documents - each.kept.documents
        cells = _cells(each.kept, report.read)
        table.add_row(each.label, f"{each.entered.documents:,}", f"{dropped:,}", *cells, _reasons(each.dropped))
    return table


def _cells(amount: Amount, whole: Amount) -> tuple[str, str, str]:
    size, all_of_it = _size(amount), _size(whole)
    return f"{amount.documents:,}", f"{size:,}", f"{100 * size / max(1, all_of_it):.1f}%"


def _size(amount: Amount) -> int:
    return amount.characters if amount.tokens is None else amount.tokens


def _reasons(dropped: dict[str, int]) -> str:
    parts = [f"{reason} {count:,}" for reason, count in list(dropped.items())[:_MANY_REASONS]]
    if len(dropped) > _MANY_REASONS:
        parts.append(f"{len(dropped) - _MANY_REASONS} more")
    return ", ".join(parts)


def _source_table(report: CleanReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("source", "documents read", "kept", "size kept", "share"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source in report.sources:
        table.add_row(source.name, f"{source.read.documents:,}", *_cells(source.kept, source.read))
    return table
