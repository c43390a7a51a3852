"""These tests run with genesis absent, as in other people's projects, even where it is installed."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from genesis_callbacks.testing import fork_writers, preload

pytest_plugins = ["tiers"]

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

TESTS = Path(__file__).parent
WITHOUT_GENESIS = str(TESTS / "without_genesis")

sys.path.insert(0, WITHOUT_GENESIS)
# Ranks, writers and programs that tests start find it first too, and the ranks' fork server finds what it imports.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WITHOUT_GENESIS, str(TESTS), os.environ.get("PYTHONPATH"))))

# An import costs more than most tests: ranks and writers are forked from a process that has imported what tests import.
preload("pytest", "hypothesis", "plain_project", "outside.projects", "simulated.project")
fork_writers()


@pytest.fixture
def started_writers() -> Iterator[None]:
    """Writers are started as trainers outside of tests start them: for tests of the start, or of the whole process."""
    fork_writers(False)
    yield
    fork_writers()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is such a thing: hundreds of saves whose faults are made need no real disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as directory:
        yield Path(directory)
