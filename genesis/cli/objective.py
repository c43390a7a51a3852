"""The context in which an objective prepares a fit, with the teachers that a run finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genesis.data.training_data import TrainingData
from genesis.generate.teacher import TeacherReference, find_teacher, load_teacher
from genesis.objectives.objective import FitContext
from genesis.objectives.teacher import Teacher, TeacherDtype


def build_context(
    data: TrainingData,
    tokenizer: str | None,
    recorded: Mapping[str, Any],
    directory: Path,
    *,
    has_adapters: bool = False,
    is_training: bool = True,
) -> FitContext:
    """Returns the context of a run.

    Args:
        data: The data of the run.
        tokenizer: Where the files of the data's tokenizer lie.
        recorded: The identity in the checkpoint that the run continues from; empty for a new run.
        directory: Where the run keeps what an objective computes before training.
        has_adapters: Whether the run trains adapters.
        is_training: Whether it trains.
    """

    def find(given: str, recorded_hash: str | None) -> "_Found":
        tokenizer_hash = data.identity["tokenizer_hash"]
        files = Path(tokenizer) if tokenizer is not None and tokenizer_hash else None
        found = find_teacher(given, recorded_hash)
        found.check_tokenizer(tokenizer_hash, data.vocabulary_owner, files)
        return _Found(found, files, data)

    files = None if tokenizer is None else Path(tokenizer)
    return FitContext(data, files, has_adapters, is_training, recorded, directory, find)


@dataclass(frozen=True)
class _Found:
    """The `FoundTeacher` of a checkpoint or an export."""

    reference: TeacherReference
    tokenizer: Path | None
    data: TrainingData

    @property
    def path(self) -> Path:
        return self.reference.path

    @property
    def hash(self) -> str:
        return self.reference.hash

    def load(self, *, top_k: int, temperature: float, dtype: TeacherDtype | None) -> Teacher:
        teacher, _ = load_teacher(
            self.reference,
            tokenizer=self.tokenizer,
            vocab_size=self.data.vocab_size,
            seq_len=self.data.options.seq_len,
            top_k=top_k,
            temperature=temperature,
            dtype=dtype,
        )
        return teacher
