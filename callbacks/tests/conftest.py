"""Setup of the test session. As in other projects, genesis cannot be imported here, even if it is installed."""

import os
import sys
from pathlib import Path

import pytest

pytest_plugins = ["forked_workers", "tiers", "default_signals", "shared_ranks", "short_ids", "second_run"]

TESTS = Path(__file__).parent
WITHOUT_GENESIS = str(TESTS / "without_genesis")

sys.path.insert(0, WITHOUT_GENESIS)
# Ranks, writers and programs that tests start search this directory first, too; the fork server finds its preloads.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WITHOUT_GENESIS, str(TESTS), os.environ.get("PYTHONPATH"))))


def pytest_configure(config: pytest.Config) -> None:
    """Imports the fixtures, unless this process is the controller of pytest-xdist.

    The controller runs no tests, and its workers start only after its imports: torch and Lightning take seconds.
    """
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("save_fixtures")  # "fixtures" is a plugin of pytest itself
