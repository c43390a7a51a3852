"""`genesis evaluate`."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis.chat.options import ChatOptions
from genesis.cli.device import add_device_options, read_device
from genesis.cli.main import MISUSE
from genesis.cli.options import PLAIN_WIDTH
from genesis.evaluate.answer import Settings, answer_questions, read_hashes
from genesis.evaluate.plot import PLOT_NAME, plot_results
from genesis.evaluate.questions import ChatQuestion, HeldOutQuestion, Question
from genesis.evaluate.results import (
    METRICS_NAME,
    Result,
    plain,
    read_results,
    select_comparable,
    write_metrics,
)
from genesis.evaluate.score import BATCH_TOKENS_OF_THREAD
from genesis.evaluate.table import build_table
from genesis.evaluate.watch import watch
from genesis.generate.checkpoint_reference import BEST, Reference, read_reference
from genesis_callbacks.checkpoint import list_committed

CORPUS = "corpus"
"""The value of --heldout that stands for the validation set of the corpus in the recipe."""

_OWN_TEMPLATE = "the tokenizer's own"

UNANSWERED = 1
"""The exit status if a task has a row that the model cannot process; all other rows are evaluated."""

_DESCRIPTION = """Evaluates a checkpoint, or the checkpoints of a run: tasks of EleutherAI's lm-eval, with the same
metrics as its `hf` backend on the export, and bits per byte on held-out text. Without --tasks only held-out text. Does
not need or disturb a trainer. Results are written to RUN/evaluations, and existing results are not recomputed.
Example: genesis evaluate runs/demo/run --tasks hellaswag,./my_tasks/animals --limit 100 --checkpoints all"""


AskTask = Callable[[str, Namespace, ChatQuestion | None], Question]
"""Returns the question for a task's name or folder, with the arguments of the command."""


def main(argv: list[str], ask_task: AskTask | None = None) -> int:
    """Runs `genesis evaluate` and returns its exit status.

    Args:
        argv: The arguments after the command.
        ask_task: For --tasks, which needs lm-eval (`evaluate_tasks.py`).
    """
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
        raise UserError(f"--watch needs a run, but {arguments.checkpoint} is one checkpoint; give the run")
    checkpoints = [] if arguments.watch else _choose(reference, arguments.checkpoints)
    out = _place(reference, arguments.out)
    questions = _list_questions(arguments, reference, ask_task)
    if arguments.watch:
        print(f"watching {reference.path}; Ctrl-C stops", file=sys.stderr, flush=True)
        return _status(*watch(reference.path, questions, settings, out, until_step=arguments.until_step))
    results: list[Result] = []
    unanswered: list[str] = []
    num_refused = 0
    for checkpoint in checkpoints:
        try:
            answers = answer_questions(checkpoint, questions, settings, out)
            results += answers.results
            unanswered += answers.unanswered
        except UserError as error:
            if len(checkpoints) == 1:
                raise
            num_refused += 1
            print(f"genesis: error: {error}", file=sys.stderr)
    if results or not unanswered:
        _report(out, results, read_hashes(reference.path), is_json=arguments.json)
    for line in unanswered:  # printed last, where users see them
        print(f"genesis: error: {line}", file=sys.stderr)
    return _status(num_refused, len(unanswered))


def _status(num_refused: int, num_unanswered: int) -> int:
    """Returns the exit status for the numbers of unreadable checkpoints and of questions that failed."""
    return MISUSE if num_refused else UNANSWERED if num_unanswered else 0


def _check(arguments: Namespace) -> None:
    for name, least in (("limit", 1), ("batch_tokens", 1), ("num_fewshot", 0), ("until_step", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}: it must be at least {least}")
    if arguments.until_step is not None and not arguments.watch:
        raise UserError("--until_step has no effect without --watch: give --watch, too, or remove --until_step")


def _report(out: Path, results: Sequence[Result], hashes: Mapping[str, str], *, is_json: bool) -> None:
    """Updates the files that summarise all results, and prints the table of them, or `results` as JSON."""
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


def _list_questions(arguments: Namespace, reference: Reference, ask_task: AskTask | None) -> list[Question]:
    specs = [spec for spec in (arguments.tasks or "").split(",") if spec]
    held_out = arguments.heldout or (None if specs else CORPUS)
    questions: list[Question] = []
    chat = _read_chat(arguments)
    if held_out is not None:
        questions.append(HeldOutQuestion(None if held_out == CORPUS else Path(held_out), reference.run.path))
    for spec in specs:
        assert ask_task is not None, "the table of commands takes the form for tasks where --tasks is given"
        questions.append(ask_task(spec, arguments, chat))
    names = [question.name for question in questions]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is given twice: name each task once")
    return questions


def _read_chat(arguments: Namespace) -> ChatQuestion | None:
    if arguments.apply_chat_template is None:
        for name in ("chat_template_date", "system_instruction"):
            if getattr(arguments, name) is not None:
                raise UserError(f"--{name} belongs to a chat template: add --apply_chat_template")
        if arguments.no_multiturn:
            raise UserError("--no_multiturn belongs to a chat template: add --apply_chat_template")
        return None
    template = None if arguments.apply_chat_template == _OWN_TEMPLATE else Path(arguments.apply_chat_template)
    options = ChatOptions(template=template, date=arguments.chat_template_date)
    return ChatQuestion(options, arguments.system_instruction, is_multiturn=not arguments.no_multiturn)


def _choose(reference: Reference, which: str) -> list[Path]:
    """Returns the selected checkpoints. A reference to one checkpoint selects it alone, whatever `which` is."""
    if reference.kind != "run" or reference.selector is not None or which == "newest":
        return [reference.find_checkpoint(level="quick")]
    if which == BEST:
        return [reference.select(BEST).find_checkpoint(level="quick")]
    found = [checkpoint for checkpoint, _ in list_committed(reference.path)]
    if not found:
        raise UserError(f"{reference.path} has no committed checkpoint; `genesis fit` writes them")
    return found


def _place(reference: Reference, out: Path | None) -> Path:
    """Returns the directory of the results: the run's own, or --out."""
    if out is not None:
        return out
    if reference.kind == "run":
        reference.run.check_own()
        return reference.run.evaluations
    checkpoint = reference.path.resolve()
    run = RunDirectory.of(checkpoint)
    if run.checkpoints != checkpoint.parent:
        raise UserError(f"{reference.path} is not in a run's checkpoints; give the directory of its results by --out")
    run.check_own()
    return run.evaluations


def _build_parser() -> Parser:
    # Without abbreviations: the table of commands looks for --tasks in full.
    parser = Parser(prog="genesis evaluate", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", type=Path, help="a run, RUN/best, RUN/STEP, or a checkpoint's directory")
    add(
        "--tasks",
        help="tasks of lm-eval by name, or folders (with a slash) that contain task.yaml or a task's rows; needs "
        "genesis-lm[evaluate]",
    )
    add(
        "--heldout",
        nargs="?",
        const=CORPUS,
        metavar="PATH",
        help="bits per byte by source of a file or folder of text; without PATH, of the corpus's validation set",
    )
    add(
        "--checkpoints",
        choices=("newest", "best", "all"),
        default="newest",
        help="the checkpoints of a run to evaluate; default newest",
    )
    add("--limit", type=int, help="number of questions per task, from the first; default: all")
    add("--num_fewshot", type=int, help="examples before each question; default: as the task defines")
    add(
        "--apply_chat_template",
        nargs="?",
        const=_OWN_TEMPLATE,
        metavar="FILE",
        help="write each question of a task as a conversation, by the tokenizer's chat template, or by that in FILE",
    )
    add("--chat_template_date", help="the date that a chat template prints which asks for today's, as 2026-01-31")
    add("--system_instruction", help="system message of the conversations")
    add("--no_multiturn", action="store_true", help="write all examples of --num_fewshot into one turn of the user")
    add(
        "--batch_tokens",
        type=int,
        help=f"tokens per forward; default on a CPU {BATCH_TOKENS_OF_THREAD} for each thread, more on cuda",
    )
    add_device_options(parser)
    add("--tokenizer", type=Path, help="tokenizer file or directory; default: the checkpoint's own tokenizer")
    add("--out", type=Path, help="directory of results; default RUN/evaluations")
    add("--again", action="store_true", help="recompute existing results")
    add("--allow_code", action="store_true", help="run Python functions that a task.yaml names")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    add("--watch", action="store_true", help="evaluate each new checkpoint of a training run, the newest first")
    add("--until_step", type=int, help="with --watch: exit when a checkpoint of this step or later has been evaluated")
    return parser
