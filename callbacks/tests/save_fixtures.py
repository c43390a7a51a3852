"""Fixtures that many tests share, and the setup of a process that runs tests."""

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from genesis_callbacks.testing import fork_writers, preload

# No deadline, because the duration of an example depends on the load of the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Imports take longer than most tests, so ranks and writers are forked from a process with the tests' imports done.
preload("torch.distributed.optim", "pytest", "hypothesis", "plain_project", "outside.projects", "simulated.project")
fork_writers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """Seeds each test: else values would depend on the tests before, and which these are on the other workers."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def started_writers() -> Iterator[None]:
    """Starts writers as trainers outside of tests do: for tests of the start, or of the whole process."""
    fork_writers(False)
    yield
    fork_writers()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Yields a directory in memory if possible: hundreds of saves with injected faults need no real disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as directory:
        yield Path(directory)
