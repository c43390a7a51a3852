"""A release of the tiny export."""

from pathlib import Path

import pytest

from genesis.operations.release.options import ReleaseOptions
from genesis.operations.release.release import plan_release

OPTIONS = ReleaseOptions("some-lab/tiny", "apache-2.0", "1.2.0", ("en", "code"))


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Path:
    out = tmp_path_factory.mktemp("released") / "tiny"
    plan_release(exported, OPTIONS).write(out)
    return out
