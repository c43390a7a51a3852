"""The site, built once for all tests that look at it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import REPOSITORY


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the finished site, which CI has just built, or which is built here."""
    if built := os.environ.get("GENESIS_SITE"):
        return Path(built)
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, str(REPOSITORY / "docs/site/build_site.py"), "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return out / "site"
