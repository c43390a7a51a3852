"""Tasks of lm-eval as questions about a checkpoint. Everything else that evaluates needs no lm-eval."""

import io
import random
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lm_eval.evaluator import evaluate

from genesis.base.errors import UserError
from genesis.evaluate.environment import refuse_wrong_answers
from genesis.evaluate.model import GenesisLM
from genesis.evaluate.questions import Answer, ChatQuestion, Progress, Question
from genesis.evaluate.results import Measure
from genesis.evaluate.task_template import TaskTemplateError
from genesis.evaluate.tasks import LoadedTasks, describe_failure
from genesis.generate.load import Loaded
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.checkpoint import Manifest

_RANDOM_SEED: Final = 0
_OTHER_SEED: Final = 1234
"""The seeds of lm-eval's own command, so that few-shot examples are the same."""
_BOOTSTRAP_ITERATIONS: Final = 1000
_OF_THE_TASK: Final = (
    *(TaskTemplateError, ArithmeticError, LookupError, TypeError, ValueError),
    *(SyntaxError, RecursionError, MemoryError),  # of lists that templates write, and lm-eval evaluates
)
_NOT_METRICS: Final = ("name", "alias", "sample_len", "sample_count")
_ITEM_FIELDS: Final = ("doc_id", "doc", "target", "resps", "filtered_resps", "filter")


@dataclass(frozen=True)
class TaskQuestion(Question):
    """A task, or several under one name.

    Args:
        tasks: The tasks from `load_tasks`.
        limit: Number of questions per task; None for all.
        chat: How contexts become conversations; None without a chat template.
    """

    tasks: LoadedTasks
    limit: int | None
    chat: ChatQuestion | None = None

    @property
    def name(self) -> str:
        """Returns the task's name, with the number of shots and the limit, if any."""
        shots = {task.get_config("num_fewshot") for task in self.tasks.tasks["tasks"].values()}
        return f"{self.tasks.name}{_describe_shots(shots)}{self._variant}"

    @property
    def _variant(self) -> str:
        chat = "" if self.chat is None else "-chat"
        return chat if self.limit is None else f"{chat}-limit{self.limit}"

    def describe(self, manifest: Manifest, tokenizer: Tokenizer, learned: Path | None) -> dict[str, Any]:
        """Returns names, versions, shots, limit, and the hash of the user's own data."""
        tasks = self.tasks.tasks["tasks"]
        return {
            "kind": "task",
            "task": self.tasks.name,
            "versions": {name: str(task.VERSION) for name, task in tasks.items()},
            "num_fewshot": {name: task.get_config("num_fewshot") for name, task in tasks.items()},
            "limit": self.limit,
            "data_hash": self.tasks.data_hash,
            "lm_eval": version("lm-eval"),
            **({} if self.chat is None else {"chat": self.chat.describe(tokenizer, learned)}),
        }

    def answer(self, loaded: Loaded, manifest: Manifest, batch_tokens: int | None, on_progress: Progress) -> Answer:
        """Runs lm-eval on our model."""
        random.seed(_RANDOM_SEED)
        np.random.seed(_OTHER_SEED)
        torch.manual_seed(_OTHER_SEED)
        for task in self.tasks.tasks["tasks"].values():
            task.set_fewshot_seed(seed=_OTHER_SEED)
        chat = None if self.chat is None else self.chat.open(loaded.text_tokenizer, loaded.learned)
        lm = GenesisLM(loaded.model, loaded.text_tokenizer, batch_tokens, on_progress, chat, loaded.stop_ids)
        try:
            with refuse_wrong_answers(), redirect_stdout(io.StringIO()):  # lm-eval prints its bootstrap progress
                found = evaluate(
                    lm,
                    self.tasks.tasks,
                    limit=self.limit,
                    bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                    system_instruction=None if self.chat is None else self.chat.system,
                    apply_chat_template=chat is not None,
                    fewshot_as_multiturn=self.chat is not None and self.chat.is_multiturn,
                )
        except UserError:
            raise
        except _OF_THE_TASK as error:
            reason = describe_failure(error)
            raise UserError(f"task {self.tasks.name} failed on its rows or settings: {reason}; check both") from error
        return Answer(list(self._read_measures(found)), list(_read_items(found)))

    def _read_measures(self, found: dict[str, Any]) -> Iterator[Measure]:
        for task, values in found["results"].items():
            subject = f"{task}{_describe_shots({found['n-shot'].get(task)})}{self._variant}"
            for key, value in values.items():
                metric, _, filter_name = key.partition(",")
                if key in _NOT_METRICS or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                stderr = values.get(f"{metric}_stderr,{filter_name}")
                yield Measure(
                    subject,
                    metric if filter_name in ("", "none") else key,
                    float(value),
                    stderr if isinstance(stderr, float) else None,
                    found["higher_is_better"].get(task, {}).get(metric),
                    int(values.get("sample_len") or 0),
                )


def _describe_shots(shots: set[int | None]) -> str:
    return "".join(f"-{number}shot" for number in sorted(number for number in shots if number))


def _read_items(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for task, samples in found["samples"].items():
        for sample in samples:
            fields = (*_ITEM_FIELDS, *sample["metrics"])
            yield {"task": task, **{field: sample[field] for field in fields if field in sample}}
