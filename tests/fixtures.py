"""Fixtures that many tests share, and the setup of a process that runs tests."""

import logging
import math
import os
import random
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from genesis.base import processes
from genesis.base.parent import LAUNCHER_NAME, NONCE_NAME
from genesis.cli import progress
from genesis.evaluate.environment import make_quiet
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.texts import SCRIPTS
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from genesis_callbacks.testing import fork_writers, preload
from tests.commands import fork_starts, start_real_worker
from tests.data.corpora import make_documents, write_corpus
from tests.tiny_runs import build_decoder, save

WORDS = ("alpha", "beta", "    return", "class ", "def ", "\n\n", "====", "\u00e9t\u00e9", "\u65e5\u672c")

# lm-eval must be silenced before its import; `genesis evaluate` makes the same call.
make_quiet()

# No deadline, because the duration of an example depends on the load of the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# Imports take longer than most tests, so ranks, writers and commands are forked from processes with the imports done.
preload(
    *("genesis.cli.fit", "pytest", "hypothesis", "tests.cli.tiny", "tests.data.corpora"),
    *("sentencepiece.sentencepiece_model_pb2", "torch.profiler._cupti_monitor", "torch.utils.serialization.config"),
    "torch.distributed.optim",
)
fork_writers()
fork_starts()
progress.BEGIN_SECONDS = math.inf  # on a busy machine, any stage may take long enough for a line

_PLACE_NAMES = (
    *(LAUNCHER_NAME, NONCE_NAME, "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
)
"""What a fit leaves in the environment of its process. Ranks of later tests would take it for their own launcher's."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Seeds each test, and restores the place among ranks after it: a test may train in this process.

    Without a seed, values would depend on the tests that ran before, and which these are on the other workers.
    """
    torch.manual_seed(0)
    random.seed(0)
    before = {name: os.environ.get(name) for name in _PLACE_NAMES}
    try:
        return (yield)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture(autouse=True)
def _log_levels_stay() -> Generator[None]:
    """Fails a test after which Lightning logs less or more than before: later tests read its messages."""
    was_imported = "lightning.pytorch" in sys.modules
    before = _read_log_levels()
    yield
    assert not was_imported or _read_log_levels() == before


def _read_log_levels() -> dict[str, tuple[int, list[object]]]:
    logs = [logging.getLogger(name) for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric")]
    return {log.name: (log.getEffectiveLevel(), list(log.filters)) for log in logs}


@pytest.fixture
def started_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts workers over pipes as users do: for tests of the start, or that look for them among the processes."""
    monkeypatch.setattr(processes, "start_worker", start_real_worker)


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a corpus of two sources with a real tokenizer of 320 ids."""
    text = "".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(200))
    model = train_tokenizer([text], TokenizerOptions(vocab_size=320), tmp_path_factory.mktemp("tokenizer"))
    return write_corpus(
        tmp_path_factory.mktemp("corpus"),
        {"web": make_documents(120, 12, seed=1), "code": make_documents(60, 12, seed=2)},
        {"web": make_documents(9, 6, seed=3)},
        weights={"web": 2, "code": 1},
        tokenizer=model.read_bytes(),
    )


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chooser = random.Random(0)
    texts = ["".join(chooser.choice(WORDS) + str(chooser.randrange(100)) for _ in range(300)) for _ in range(20)]
    options = TokenizerOptions(vocab_size=700)
    return train_tokenizer([*texts, *SCRIPTS.values()], options, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """Returns a run's directory with a tokenizer and three checkpoints of different weights."""
    directory = tmp_path_factory.mktemp("run")
    shutil.copy(tokenizer_file, directory)
    for step in (1, 2, 3):
        save(directory / "checkpoints", step, build_decoder(step), {"tokenizer_hash": open_tokenizer(directory).hash})
    return directory


@pytest.fixture
def own_run(run: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run that a test may change."""
    return shutil.copytree(run, tmp_path / "own" / "run")


@pytest.fixture(scope="session")
def checkpoint(run: Path) -> Path:
    return run / "checkpoints/step-00000003"


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """Returns an exported model whose weights are in several files."""
    out = tmp_path_factory.mktemp("exported") / "model"
    export_checkpoints([checkpoint], out, ExportOptions(max_file_bytes=60_000))
    return out
