"""A tokenizer that takes too long for a text ends `data prepare` in one line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from genesis.base import limited_workers, processes
from genesis.base.errors import UserError
from genesis.base.processes import PipedWorker
from genesis.data.prepare import prepare_corpus
from genesis.data.sources import SourceOptions
from genesis.data.tokenize_worker import FinishedPart, Job, Progress, Setup, tokenize
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import write_tokenizer
from tests.data.corpus_support import make_options, write_jsonl
from tests.forged.runner import ForkedWorker


def write_slow_tokenizer(directory: Path) -> Path:
    """Writes a tokenizer whose expression takes quadratic time for spaces."""
    directory.mkdir()
    write_tokenizer(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    slow = {"type": "Split", "pattern": {"Regex": r"\s*x|\s"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, content["pre_tokenizer"]]}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def test_an_expression_without_end_ends_the_command_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "start_worker", ForkedWorker)
    monkeypatch.setattr(limited_workers, "_ENCODING_SECONDS", 0.3)
    write_jsonl(tmp_path / "web.jsonl", ["a" + " " * 100_000 + "b"])
    sources = (SourceOptions("web", (str(tmp_path / "web.jsonl"),)),)
    options = make_options(tmp_path, tokenizer=write_slow_tokenizer(tmp_path / "slow"), sources=sources)
    with pytest.raises(UserError, match=r"^the tokenizer takes too long for a text: [^\n]*$"):
        prepare_corpus(options)


def test_lines_of_one_letter_are_encoded_in_bounded_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def run_here(jobs: Sequence[Job], setup: Setup, num_workers: int) -> Iterator[Progress | FinishedPart]:
        for job in jobs:
            for message in tokenize(setup, open_tokenizer(setup.tokenizer), job):
                counts.extend([message.num_tokens] if isinstance(message, Progress) and message.num_tokens else [])
                yield message

    monkeypatch.setattr("genesis.data.prepare.run_jobs", run_here)
    monkeypatch.setattr("genesis.data.tokenize_worker._BATCH_DOCUMENTS", 4096)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 10_000)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    sources = (SourceOptions("web", (str(tmp_path / "a.jsonl"),)),)
    prepare_corpus(make_options(tmp_path, tokenizer=tokenizer, sources=sources, shard_tokens=1 << 24))
    assert len(counts) == 3
    assert max(counts) <= 2 * 4096 + 2


def end_without_memory(descriptor: int) -> None:
    """What a worker does whose memory is at its limit."""

    def serve(connection: object) -> None:
        raise MemoryError

    processes.serve_pipe(descriptor, serve)


def test_a_worker_without_memory_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.data.test_prepare_limits.main", end_without_memory, raising=False)
    monkeypatch.setattr(processes, "start_worker", ForkedWorker)
    worker = PipedWorker(__name__)
    assert worker.describe_end() == "because it needs more memory"
    worker.end()
    assert capfd.readouterr() == ("", "")
