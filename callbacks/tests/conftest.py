"""These tests run with genesis absent, as in other people's projects, even where it is installed."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

WITHOUT_GENESIS = str(Path(__file__).parent / "without_genesis")

sys.path.insert(0, WITHOUT_GENESIS)
# Ranks, writers and programs that tests start find it first too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WITHOUT_GENESIS, os.environ.get("PYTHONPATH"))))


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is such a thing: hundreds of saves whose faults are made need no real disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as directory:
        yield Path(directory)
