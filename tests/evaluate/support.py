"""Tasks of one's own, written the way a user would."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

WORDS = ("alpha", "beta", "class ", "def ", "    return", "été", "日本", "<s>", "\n\n", "  ", "▁", "😀")
ACCURACIES = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]


def make_text(chooser: random.Random, num_words: int) -> str:
    return "".join(chooser.choice(WORDS) + str(chooser.randrange(100)) for _ in range(num_words))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_task(folder: Path, settings: dict[str, Any], **splits: Iterable[dict[str, Any]]) -> str:
    """Writes the folder of a task and returns what is given for --tasks."""
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)
    (folder / "task.yaml").write_text(yaml.safe_dump({"task": folder.name, "test_split": "test", **settings}))
    return f"{folder}/"


def write_choices(folder: Path, num_rows: int = 12, **settings: Any) -> str:
    """A multiple-choice task: contexts from none to longer than a model's, choices from one token to many."""
    chooser = random.Random(folder.name)
    rows = [
        {
            "question": make_text(chooser, (0, 1, 5, 40, 300)[number % 5]),
            "choices": [make_text(chooser, 1 + number % 4), "a", "b", make_text(chooser, 8), "alpha1 beta", "alpha1 x"],
            "answer": number % 6,
        }
        for number in range(num_rows)
    ]
    choices = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": ACCURACIES,
    }
    return write_task(folder, {**choices, **settings}, test=rows, train=rows[::-1])


def write_rolling(folder: Path) -> str:
    chooser = random.Random(1)
    rows = [{"page": make_text(chooser, length)} for length in (1, 3, 30, 90, 400)]
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    settings = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{page}}"}
    return write_task(folder, {**settings, "metric_list": metrics}, test=rows)


def write_generation(folder: Path, **options: Any) -> str:
    chooser = random.Random(2)
    rows = [{"begin": make_text(chooser, length), "end": "a"} for length in (0, 1, 4, 20, 20, 60, 300)]
    settings = {
        "output_type": "generate_until",
        "doc_to_text": "{{begin}}",
        "doc_to_target": "{{end}}",
        "generation_kwargs": {"until": ["\n\n", "ret"], "max_gen_toks": 24, **options},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return write_task(folder, settings, test=rows)
