"""The tasks of the benchmark `evaluate`: one or two of each kind of request that lm-eval sends to a model.

Texts come from the documentation within Python, and questions with answers from conversations. The lengths are similar
to those of well-known tasks: HellaSwag (a context of many words, four long endings), ARC (a question, four short
answers), documents of WikiText's kind, and questions that are answered freely, without and with examples.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import yaml

from genesis.chat.conversation import message_text, read_conversation
from genesis.evaluate.tasks import load_tasks

MAX_NEW_TOKENS: Final = 64
"""The most new tokens of an answer that is written freely."""
NUM_EXAMPLES: Final = 5
"""The number of examples before each question of the task with examples."""
_NUM_CHOICES: Final = 4
_LEAST_WORDS: Final = 200
_MOST_WORDS_OF_QUESTION, _MOST_WORDS_OF_ANSWER = 60, 40

Row = dict[str, Any]
Pair = tuple[str, str]
"""A question and its answer."""
Range = tuple[int, int]
"""The minimum and maximum number of words."""


@dataclass(frozen=True)
class BenchTask:
    """A task.

    Args:
        kind: The method of lm-eval's models that answers its requests.
        summary: A description of one line.
        build_rows: Returns rows, of a source of random numbers, a number of rows and conversations.
        settings: The settings of its task.yaml.
        share: Number of rows for each of those that the user asks for.
    """

    kind: str
    summary: str
    build_rows: Callable[[random.Random, int, Sequence[Pair]], list[Row]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0


def _write_choices(context: Range, choice: Range) -> Callable[[random.Random, int, Sequence[Pair]], list[Row]]:
    def build(chooser: random.Random, num_rows: int, _: Sequence[Pair]) -> list[Row]:
        return [
            {
                "question": cut_words(chooser, *context),
                "choices": [cut_words(chooser, *choice) for _ in range(_NUM_CHOICES)],
                "answer": 0,
            }
            for _ in range(num_rows)
        ]

    return build


def _write_documents(chooser: random.Random, num_rows: int, _: Sequence[Pair]) -> list[Row]:
    return [{"page": cut_words(chooser, 100, 700)} for _ in range(num_rows)]


def _write_questions(chooser: random.Random, num_rows: int, conversations: Sequence[Pair]) -> list[Row]:
    chosen = chooser.choices(conversations, k=num_rows)
    return [
        {
            "question": " ".join(question.split()[:_MOST_WORDS_OF_QUESTION]),
            "answer": " ".join(answer.split()[:_MOST_WORDS_OF_ANSWER]),
        }
        for question, answer in chosen
    ]


_CHOICES: Final = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}
_ANSWERS: Final = {
    "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["Question:", "\n\n"], "max_gen_toks": MAX_NEW_TOKENS},
}

TASKS: Final = {
    "hellaswag-like": BenchTask(
        "loglikelihood", "four long endings of a context", _write_choices((30, 60), (15, 30)), _CHOICES
    ),
    "arc-like": BenchTask(
        "loglikelihood", "four short answers to a question", _write_choices((12, 35), (1, 8)), _CHOICES, share=2.0
    ),
    "documents": BenchTask(
        "loglikelihood_rolling",
        "every token of documents of 100 to 700 words",
        _write_documents,
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{page}}"},
        share=0.5,
    ),
    "answers": BenchTask(
        "generate_until", f"up to {MAX_NEW_TOKENS} new tokens after a question", _write_questions, _ANSWERS, share=2.0
    ),
    "answers-5-shot": BenchTask(
        "generate_until",
        f"the same after {NUM_EXAMPLES} examples, which are the same for all questions",
        _write_questions,
        {**_ANSWERS, "num_fewshot": NUM_EXAMPLES, "fewshot_config": {"sampler": "first_n", "split": "train"}},
        share=2.0,
    ),
}
"""The tasks by their names."""


def read_pairs(path: Path) -> list[Pair]:
    """Returns the first question and answer of each conversation in a JSONL file."""
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = read_conversation(json.loads(line)).messages
        texts = {message["role"]: message_text(message) for message in reversed(messages)}
        pairs.append((texts["user"], texts["assistant"]))
    return pairs


def make_requests(folder: Path, num_rows: int, conversations: Sequence[Pair]) -> list[Any]:
    """Returns lm-eval's requests for a task that is written to `folder`; the task's name is a key of `TASKS`."""
    task = TASKS[folder.name]
    chooser = random.Random(folder.name)
    rows = task.build_rows(chooser, max(1, round(num_rows * task.share)), conversations)
    settings = {"task": folder.name, "test_split": "test", **task.settings}
    splits = {"test": rows}
    if "num_fewshot" in settings:
        splits["train"] = task.build_rows(chooser, NUM_EXAMPLES, conversations)
        settings["training_split"] = "train"
    folder.mkdir()
    (folder / "task.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    for split, of_split in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in of_split)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (loaded,) = load_tasks(f"{folder}/").tasks["tasks"].values()
    loaded.build_all_requests(limit=None, rank=0, world_size=1)
    requests: list[Any] = loaded.instances
    return requests


def cut_words(chooser: random.Random, least: int, most: int) -> str:
    """Returns some consecutive words of a page of Python's documentation, at most as many as the page has."""
    words = chooser.choice(_documents())
    num_words = min(chooser.randint(least, most), len(words) - 1)
    start = chooser.randrange(len(words) - num_words)
    return " ".join(words[start : start + num_words])


@cache
def _documents() -> list[list[str]]:
    return [words for _, text in sorted(topics.items()) if len(words := text.split()) > _LEAST_WORDS]
