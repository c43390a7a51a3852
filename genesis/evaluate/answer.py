"""Answers questions about one checkpoint: computes results that do not exist yet, and writes each one as it is done."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.base.run_directory import RunDirectory
from genesis.evaluate.questions import Question, UnanswerableError, list_versions
from genesis.evaluate.results import Result, read_result, write_result
from genesis.generate.checkpoint_reference import verify_shown
from genesis.generate.load import find_learned_template, load_decoder, load_tokenizer, require_tokenizer
from genesis_callbacks.base.events import EventLog
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.base.run_directory import MANIFEST_NAME
from genesis_callbacks.checkpoint import (
    CheckpointError,
    Manifest,
    list_committed,
    read_manifest,
)


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation.

    Args:
        device: The decoder's device.
        dtype: The type of its weights.
        batch_tokens: See `Scorer`.
        tokenizer: Tokenizer file or directory; None for the checkpoint's own tokenizer.
        again: Whether to recompute existing results.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    batch_tokens: int | None = None
    tokenizer: Path | None = None
    again: bool = False


class Answers(NamedTuple):
    """The results for a checkpoint, and a line for each question that this model cannot answer."""

    results: list[Result]
    unanswered: list[str]


def answer_questions(checkpoint: Path, questions: Sequence[Question], settings: Settings, out: Path) -> Answers:
    """Returns the results of all questions about a checkpoint; existing results in `out` are reused.

    The checkpoint is verified before it is loaded, and its weights are compared with their digests. It is loaded only
    if a result is missing.

    Args:
        checkpoint: The checkpoint's directory.
        questions: The questions.
        settings: The settings.
        out: The directory of results: `RUN/evaluations`.

    Raises:
        UserError: The checkpoint does not verify, or a task's rows or settings are wrong for every model.
    """
    manifest = read_manifest(checkpoint)
    checkpoint_hash = read_committed_hash(checkpoint)
    tokenizer = require_tokenizer(load_tokenizer(settings.tokenizer, manifest, checkpoint), checkpoint)
    dtype = str(settings.dtype).removeprefix("torch.")
    learned = find_learned_template(checkpoint, manifest)
    asked = [(question, {**question.describe(manifest, tokenizer, learned), "dtype": dtype}) for question in questions]
    standing = {
        question.name: result
        for question, details in asked
        if (result := _find(out / checkpoint.name / f"{question.name}.json")) is not None
        and result.answers(details, checkpoint_hash)
        and not settings.again
    }
    open_questions = [(question, details) for question, details in asked if question.name not in standing]
    if open_questions:
        verify_shown(checkpoint)
        loaded = load_decoder(checkpoint, settings.tokenizer, settings.device, settings.dtype, allows_body=True)
        if read_committed_hash(checkpoint) != checkpoint_hash:
            raise UserError(f"{checkpoint} was replaced while it was evaluated: run the evaluation again")
    unanswered = []
    for question, details in open_questions:
        start_seconds = perf_counter()
        try:
            # What is counted are tokens scored, or requests answered.
            with stage(f"{checkpoint.name} {question.name}", unit="done") as shown:
                measures, items = question.answer(loaded, manifest, settings.batch_tokens, shown.advance)
        except UnanswerableError as error:
            unanswered.append(f"{checkpoint.name}: {error}")
            continue
        standing[question.name] = result = Result(
            checkpoint.name,
            manifest.step,
            checkpoint_hash,
            question.name,
            details,
            tuple(measures),
            list_versions(),
            perf_counter() - start_seconds,
        )
        write_result(out, result, items)
    new = [standing[question.name] for question, _ in open_questions if question.name in standing]
    _note(checkpoint.resolve(), manifest, new, out)
    answered = [standing[question.name] for question in questions if question.name in standing]
    return Answers(answered, unanswered)


def _note(checkpoint: Path, manifest: Manifest, results: Sequence[Result], out: Path) -> None:
    """Logs new results as an event of the run, if they are stored there."""
    run = RunDirectory.of(checkpoint)
    if not results or out.resolve() != run.evaluations:
        return
    measures = [measure for result in results for measure in result.measures]
    EventLog(run.path, None).write(
        "evaluated",
        step=manifest.step,
        clocks=manifest.counters,
        checkpoint=checkpoint,
        metrics={measure.key: math.nan if measure.value is None else measure.value for measure in measures},
        text=", ".join(result.name for result in results),
    )


def read_hashes(place: Path) -> dict[str, str]:
    """Returns the manifest hashes of all checkpoints of a run by name, also for a path of one of its checkpoints."""
    hashes = {}
    for path, _ in list_committed(place.parent if (place / MANIFEST_NAME).exists() else place):
        with suppress(OSError, CheckpointError):  # retention may remove a checkpoint at any moment
            hashes[path.name] = read_committed_hash(path)
    return hashes


def _find(path: Path) -> Result | None:
    return read_result(path) if path.exists() else None
