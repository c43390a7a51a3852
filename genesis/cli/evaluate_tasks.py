"""`genesis evaluate --tasks`, the form that needs lm-eval."""

from argparse import Namespace

from genesis.cli import evaluate
from genesis.evaluate.questions import ChatQuestion, Question
from genesis.evaluate.task_question import TaskQuestion
from genesis.evaluate.tasks import load_tasks


def main(argv: list[str]) -> int:
    """Runs `genesis evaluate` with tasks of lm-eval and returns its exit status."""
    return evaluate.main(argv, _ask)


def _ask(spec: str, arguments: Namespace, chat: ChatQuestion | None) -> Question:
    tasks = load_tasks(spec, arguments.num_fewshot, may_run_code=arguments.allow_code)
    return TaskQuestion(tasks, arguments.limit, chat)
