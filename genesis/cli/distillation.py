"""Distillation in a recipe of `genesis fit`: finds the teacher or its cache, and compares them with the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.data.corpus_data import CorpusData
from genesis.data.fixed_sequences import identify_sequences
from genesis.data.prompt_data import PromptData
from genesis.data.training_data import TrainingData
from genesis.generate.teacher import TeacherReference, find_teacher, load_teacher
from genesis.objectives.distillation import Distillation
from genesis.objectives.teacher_cache import CacheIdentity, TeacherCache, open_cache

TEACHER: Final = "teacher"
TEACHER_CACHE: Final = "teacher_cache"
"""Entries of a checkpoint's identity: the hash of the teacher, and that of the cache."""
NO_CACHE: Final = "none"


def start_distillation(
    objective: Distillation, data: TrainingData, tokenizer: str | None, recorded: Mapping[str, Any]
) -> dict[str, str]:
    """Loads the teacher, or lets the windows of training have its probabilities from the cache.

    The paths in `objective` become absolute, as the run's recipe keeps them.

    Args:
        objective: The objective of the run.
        data: The training data of the run.
        tokenizer: Where the files of the data's tokenizer lie.
        recorded: The identity in the checkpoint that the run continues from; empty for a new run.

    Returns:
        The entries of the checkpoints' identity, by which a resume with another teacher is refused.

    Raises:
        UserError: Teacher, cache and data do not belong together.
    """
    if isinstance(data, PromptData):
        raise UserError(
            "model.objective is a distillation, but data.prompts has no text to learn: give data.corpus or data.stream"
        )
    found = None if objective.teacher is None else find_teacher(objective.teacher, recorded.get(TEACHER))
    tokenizer_hash = data.identity["tokenizer_hash"]
    tokenizer_path = Path(tokenizer) if tokenizer is not None and tokenizer_hash else None
    if found is not None:
        found.check_tokenizer(tokenizer_hash, data.vocabulary_owner, tokenizer_path)
        objective.teacher = str(found.path)
    if objective.cache is not None:
        cache = _open_cache(objective, data, found)
        return {TEACHER: cache.identity.teacher, TEACHER_CACHE: cache.hash}
    assert found is not None, "the objective has a teacher or a cache"
    objective.loaded_teacher, _ = load_teacher(
        found,
        tokenizer=tokenizer_path,
        vocab_size=data.vocab_size,
        seq_len=data.options.seq_len,
        top_k=objective.top_k,
        temperature=objective.temperature,
        dtype=objective.teacher_dtype,
    )
    return {TEACHER: found.hash, TEACHER_CACHE: NO_CACHE}


def _open_cache(objective: Distillation, data: TrainingData, found: TeacherReference | None) -> TeacherCache:
    assert objective.cache is not None
    if not isinstance(data, CorpusData):
        raise UserError(
            f"model.objective.init_args.cache is {objective.cache}, but a stream has no fixed sequences that a cache "
            "could hold: leave it out and give the teacher, or train on a corpus"
        )
    path = Path(objective.cache).resolve()
    cache = open_cache(path)
    cache.check(
        CacheIdentity(
            teacher=cache.identity.teacher if found is None else found.hash,
            teacher_dtype=objective.teacher_dtype or cache.identity.teacher_dtype,
            vocab_size=data.vocab_size,
            top_k=objective.top_k,
            temperature=objective.temperature,
            log_probs=cache.identity.log_probs,
            sequences=identify_sequences(data),
        )
    )
    objective.cache = str(path)
    data.columns = cache
    return cache
