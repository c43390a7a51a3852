"""Questions about a checkpoint: tasks of lm-eval, and held-out text."""

import io
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
import numpy as np
import torch
from lm_eval.evaluator import evaluate

from genesis.chat.options import ChatOptions
from genesis.chat.render import ChatRenderer, open_renderer
from genesis.data.paths import find_path, read_path
from genesis.errors import UserError
from genesis.evaluate.environment import refuse_wrong_answers
from genesis.evaluate.heldout import HeldOut, check_is_there, measure_held_out, open_validation_set, read_texts
from genesis.evaluate.model import GenesisLM
from genesis.evaluate.results import Measure
from genesis.evaluate.score import default_batch_tokens
from genesis.evaluate.tasks import LoadedTasks
from genesis.generate.load import Loaded
from genesis.model.recipe import build_decoder_config
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.checkpoint import Manifest

Progress = Callable[[int], None]
_RANDOM_SEED: Final = 0
_OTHER_SEED: Final = 1234
"""The seeds of lm-eval's own command, so that few-shot examples are the same."""
_BOOTSTRAP_ITERATIONS: Final = 1000
_NOT_METRICS: Final = ("name", "alias", "sample_len", "sample_count")
_ITEM_FIELDS: Final = ("doc_id", "doc", "target", "resps", "filtered_resps", "filter")


class Answer(NamedTuple):
    """The answer to a question: measures, and records of single items."""

    measures: list[Measure]
    items: list[dict[str, Any]]


class Question(ABC):
    """A question about checkpoints."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Returns the name of the files with its results."""

    @abstractmethod
    def describe(self, manifest: Manifest, tokenizer: Tokenizer, learned: Path | None) -> dict[str, Any]:
        """Returns everything that determines the answer besides checkpoint and dtype, in plain types.

        Args:
            manifest: The checkpoint's manifest.
            tokenizer: The checkpoint's tokenizer.
            learned: The file of the chat template that the checkpoint has learned; None if it has learned none.
        """

    @abstractmethod
    def answer(self, loaded: Loaded, manifest: Manifest, batch_tokens: int | None, on_progress: Progress) -> Answer:
        """Returns the answer for a loaded checkpoint."""


@dataclass(frozen=True)
class ChatQuestion:
    """How the contexts of tasks become conversations.

    Args:
        options: The chat template and the date that it prints.
        system: The system message; None for none.
        is_multiturn: Whether each example becomes a turn of the user and one of the assistant, or all share one turn.
    """

    options: ChatOptions
    system: str | None = None
    is_multiturn: bool = True

    def open(self, tokenizer: Tokenizer, learned: Path | None) -> ChatRenderer:
        """Returns the renderer for a tokenizer, and for the chat template that the model has learned, if any.

        Raises:
            UserError: There is no chat template, or it is invalid.
        """
        return open_renderer(tokenizer, self.options, is_training=False, learned=learned)

    def describe(self, tokenizer: Tokenizer, learned: Path | None) -> dict[str, Any]:
        """Returns everything that determines the contexts, in plain types."""
        return {"template": self.open(tokenizer, learned).hash, "system": self.system, "multiturn": self.is_multiturn}


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
        lm = GenesisLM(loaded.decoder, loaded.text_tokenizer, batch_tokens, on_progress, chat, loaded.stop_ids)
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
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
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


class HeldOutQuestion(Question):
    """Bits per byte on held-out text.

    Args:
        path: A file or folder of text; None for the validation set of the corpus in the recipe.
        run_dir: The run's directory, to find its corpus from any working directory; None searches only at the path in
            the recipe.

    Raises:
        UserError: There is no text at `path`.
    """

    def __init__(self, path: Path | None = None, run_dir: Path | None = None) -> None:
        if path is not None:
            check_is_there(path)
        self._path = path
        self._run_dir = run_dir
        self._opened: dict[tuple[str, int, str], HeldOut] = {}  # the same for all checkpoints of a run

    @property
    def name(self) -> str:
        """Returns a name derived from the text."""
        return "heldout" if self._path is None else f"heldout-{self._path.resolve().name.split('.')[0]}"

    def describe(self, manifest: Manifest, tokenizer: Tokenizer, learned: Path | None) -> dict[str, Any]:
        """Returns the hash of the text, and the settings that cut it into sequences."""
        held_out = self._open(manifest, tokenizer)
        return {"kind": "heldout", "data_hash": held_out.data_hash, "seq_len": held_out.sequence_format.seq_len}

    def answer(self, loaded: Loaded, manifest: Manifest, batch_tokens: int | None, on_progress: Progress) -> Answer:
        """Sums the loss over the text."""
        held_out = self._open(manifest, loaded.text_tokenizer)
        device = loaded.decoder.output_weight.device.type
        measures = measure_held_out(loaded.decoder, held_out, batch_tokens or default_batch_tokens(device), on_progress)
        prefix = "" if self._path is None else f"{self.name.removeprefix('heldout-')}/"
        return Answer([replace(measure, subject=prefix + measure.subject) for measure in measures], [])

    def _open(self, manifest: Manifest, tokenizer: Tokenizer) -> HeldOut:
        data, model = (manifest.recipe.get(key) or {} for key in ("data", "model"))
        config = build_decoder_config(model.get("decoder"), where=f"the recipe of step {manifest.step}")
        seq_len = data.get("seq_len") or config.max_seq_len
        place = self._path or self._find_corpus(manifest.recipe)
        key = (str(place), seq_len, tokenizer.hash)
        if key not in self._opened:
            opens = open_validation_set if self._path is None else read_texts
            self._opened[key] = opens(place, seq_len, tokenizer)
        return self._opened[key]

    def _find_corpus(self, recipe: dict[str, Any]) -> Path:
        named = read_path(recipe, "data", "corpus")
        if named is None:
            raise UserError("the recipe has no corpus, and therefore no validation set; give --heldout PATH")
        if self._run_dir is None:
            return Path(named)
        return find_path(named, self._run_dir, recipe, what="the corpus", remedy="give --heldout PATH")


def list_versions() -> dict[str, str]:
    """Returns the versions of the packages that affect an answer."""
    return {name: version(name) for name in ("genesis-lm", "lm-eval", "torch")}


def _describe_shots(shots: set[int | None]) -> str:
    return "".join(f"-{number}shot" for number in sorted(number for number in shots if number))


def _read_items(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for task, samples in found["samples"].items():
        for sample in samples:
            fields = (*_ITEM_FIELDS, *sample["metrics"])
            yield {"task": task, **{field: sample[field] for field in fields if field in sample}}
