"""`genesis evaluate`."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from genesis.arguments import Parser
from genesis.checkpoint_reference import BEST, Reference, read_reference
from genesis.cli.device import add_device_options, read_device
from genesis.cli.main import MISUSE
from genesis.cli.options import PLAIN_WIDTH
from genesis.errors import UserError
from genesis.evaluate.answer import Settings, answer_questions, read_hashes
from genesis.evaluate.plot import PLOT_NAME, plot_results
from genesis.evaluate.questions import HeldOutQuestion, Progress, Question, TaskQuestion
from genesis.evaluate.results import (
    METRICS_NAME,
    Result,
    plain,
    read_results,
    select_comparable,
    write_metrics,
)
from genesis.evaluate.score import default_batch_tokens
from genesis.evaluate.table import build_table
from genesis.evaluate.tasks import load_tasks
from genesis.evaluate.watch import watch
from genesis.run_directory import RunDirectory
from genesis_callbacks.checkpoint import list_committed

CORPUS = "corpus"
"""The value of --heldout that means: the validation set of the corpus that the recipe names."""

UNANSWERED = 1
"""The exit status where a task has a row that the model cannot be asked; all others are answered."""

_DESCRIPTION = """Measures a checkpoint, or the checkpoints of a run: tasks of EleutherAI's lm-eval, with the figures of
its `hf` backend on the export, and bits per byte on held-out text. Without --tasks, held-out text alone. Needs no
trainer and disturbs none. Results lie in RUN/evaluations, and what stands there is not computed again.
Example: genesis evaluate runs/demo/run --tasks hellaswag,./my_tasks/animals --limit 100 --checkpoints all"""


def main(argv: list[str]) -> int:
    """Runs `genesis evaluate` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    _check(arguments)
    reference = read_reference(arguments.checkpoint)
    device = read_device(arguments)
    settings = Settings(
        device=device.name,
        dtype=device.dtype,
        batch_tokens=arguments.batch_tokens,
        tokenizer=arguments.tokenizer,
        again=arguments.again,
    )
    if arguments.watch and (reference.kind != "run" or reference.selector is not None):
        raise UserError(f"--watch follows a run, and {arguments.checkpoint} is one checkpoint; give the run")
    checkpoints = [] if arguments.watch else _choose(reference, arguments.checkpoints)
    out = _place(reference, arguments.out)
    questions = _list_questions(arguments, reference)
    if arguments.watch:
        print(f"watching {reference.path}; Ctrl-C ends it", file=sys.stderr, flush=True)
        return _status(*watch(reference.path, questions, settings, out, _show, until_step=arguments.until_step))
    results: list[Result] = []
    unanswered: list[str] = []
    num_refused = 0
    for checkpoint in checkpoints:
        try:
            answers = answer_questions(checkpoint, questions, settings, out, _show)
            results += answers.results
            unanswered += answers.unanswered
        except UserError as error:
            if len(checkpoints) == 1:
                raise
            num_refused += 1
            print(f"genesis: error: {error}", file=sys.stderr)
    if results or not unanswered:
        _report(out, results, read_hashes(reference.path), is_json=arguments.json)
    for line in unanswered:  # at the end, where they are seen
        print(f"genesis: error: {line}", file=sys.stderr)
    return _status(num_refused, len(unanswered))


def _status(num_refused: int, num_unanswered: int) -> int:
    """Returns the exit status: of checkpoints that cannot be read, and of questions that a model cannot be asked."""
    return MISUSE if num_refused else UNANSWERED if num_unanswered else 0


def _check(arguments: Namespace) -> None:
    for name, least in (("limit", 1), ("batch_tokens", 1), ("num_fewshot", 0), ("until_step", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}: it must be at least {least}")
    if arguments.until_step is not None and not arguments.watch:
        raise UserError("--until_step says when --watch ends; give --watch, too")


def _report(out: Path, results: Sequence[Result], hashes: Mapping[str, str], *, is_json: bool) -> None:
    """Brings what is made of all results up to date, and prints the table of them, or `results` as JSON."""
    comparable, lines = select_comparable(read_results(out), hashes, results)
    for line in lines:
        print(f"genesis: {line}", file=sys.stderr)
    write_metrics(out, comparable)
    plot_results(comparable, out / PLOT_NAME)
    if is_json:
        print(json.dumps(plain([asdict(result) for result in results]), indent=2))
        return
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(build_table(comparable))
    print(f"{out}: results by checkpoint, {METRICS_NAME}, {PLOT_NAME}")


def _list_questions(arguments: Namespace, reference: Reference) -> list[Question]:
    specs = [spec for spec in (arguments.tasks or "").split(",") if spec]
    held_out = arguments.heldout or (None if specs else CORPUS)
    questions: list[Question] = []
    if held_out is not None:
        questions.append(HeldOutQuestion(None if held_out == CORPUS else Path(held_out), reference.run.path))
    for spec in specs:
        tasks = load_tasks(spec, arguments.num_fewshot, may_run_code=arguments.allow_code)
        questions.append(TaskQuestion(tasks, arguments.limit))
    names = [question.name for question in questions]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is asked twice: name each task once")
    return questions


def _choose(reference: Reference, which: str) -> list[Path]:
    """Returns the checkpoints that are meant; one that is named is taken, whatever else its run has."""
    if reference.kind != "run" or reference.selector is not None or which == "newest":
        return [reference.find_checkpoint(level="quick")]
    if which == BEST:
        return [reference.select(BEST).find_checkpoint(level="quick")]
    found = [checkpoint for checkpoint, _ in list_committed(reference.path)]
    if not found:
        raise UserError(f"there is no committed checkpoint in {reference.path}; `genesis fit` writes them")
    return found


def _place(reference: Reference, out: Path | None) -> Path:
    """Returns where results go: into the run, or where --out says."""
    if out is not None:
        return out
    if reference.kind == "run":
        return reference.run.evaluations
    checkpoint = reference.path.resolve()
    run = RunDirectory.of(checkpoint)
    if run.checkpoints != checkpoint.parent:
        raise UserError(f"{reference.path} does not lie in a run's checkpoints; say by --out where its results go")
    return run.evaluations


@contextmanager
def _show(what: str) -> Iterator[Progress]:
    """Shows the work on something on a terminal, and else its name when it begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(what, file=sys.stderr, flush=True)
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda number: bar.advance(task, number)


def _build_parser() -> Parser:
    parser = Parser(prog="genesis evaluate", description=_DESCRIPTION)
    add = parser.add_argument
    add("checkpoint", type=Path, help="a run, RUN/best, RUN/STEP, or a checkpoint's directory")
    add("--tasks", help="names that lm-eval knows, and folders (with a slash) that hold task.yaml or a task's rows")
    add(
        "--heldout",
        nargs="?",
        const=CORPUS,
        metavar="PATH",
        help="bits per byte by source: of a file or folder of text; without PATH, of the corpus's validation set",
    )
    add(
        "--checkpoints",
        choices=("newest", "best", "all"),
        default="newest",
        help="which of a run; default newest",
    )
    add("--limit", type=int, help="only the first so many questions of each task")
    add("--num_fewshot", type=int, help="examples before each question; default: what the task says")
    add(
        "--batch_tokens",
        type=int,
        help=f"fed at one time; default {default_batch_tokens('cpu')} on this CPU, more on cuda",
    )
    add_device_options(parser)
    add("--tokenizer", type=Path, help="file or directory; default: the one that belongs to the checkpoint")
    add("--out", type=Path, help="directory of results; default RUN/evaluations")
    add("--again", action="store_true", help="compute what stands computed")
    add("--allow_code", action="store_true", help="let task.yaml name Python functions: they run here")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    add("--watch", action="store_true", help="evaluate each checkpoint of a run that trains, the newest first")
    add("--until_step", type=int, help="of --watch: end when all are evaluated and one of this step or later is there")
    return parser
