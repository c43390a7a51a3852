"""Questions about a checkpoint: what each one is, and held-out text. `task_question.py` has the tasks of lm-eval."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

from genesis.base.errors import UserError
from genesis.chat.options import ChatOptions
from genesis.chat.render import ChatRenderer, open_renderer
from genesis.data.paths import find_path, read_path
from genesis.evaluate.heldout import HeldOut, check_is_there, measure_held_out, open_validation_set, read_texts
from genesis.evaluate.results import Measure
from genesis.evaluate.score import default_batch_tokens
from genesis.generate.load import Loaded
from genesis.model.recipe import build_decoder_config
from genesis.tokenizer.losses import describe_losses
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.checkpoint import Manifest

Progress = Callable[[int], None]
_PACKAGES: Final = ("genesis-lm", "lm-eval", "torch")


class Answer(NamedTuple):
    """The answer to a question: measures, and records of single items."""

    measures: list[Measure]
    items: list[dict[str, Any]]


class UnanswerableError(UserError):
    """This model cannot process a row of a task; other tasks may still work."""


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
        """Returns the hash of the text, the settings that cut it into sequences, and what the tokenizer loses of it."""
        held_out = self._open(manifest, tokenizer)
        described = {"kind": "heldout", "data_hash": held_out.data_hash, "seq_len": held_out.sequence_format.seq_len}
        lost = describe_losses(tokenizer)
        return described if lost is None else {**described, "lost": lost}

    def answer(self, loaded: Loaded, manifest: Manifest, batch_tokens: int | None, on_progress: Progress) -> Answer:
        """Sums the loss over the text."""
        held_out = self._open(manifest, loaded.text_tokenizer)
        device = loaded.model.output_weight.device.type
        measures = measure_held_out(loaded.model, held_out, batch_tokens or default_batch_tokens(device), on_progress)
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
    """Returns the versions of the packages that affect an answer, as far as they are installed."""
    versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
