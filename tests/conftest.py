"""Loads the fixtures where tests run."""

import os
from collections.abc import Iterator

import pytest

os.environ["GENESIS_ALLOW_IMPORTS"] = "tests"  # recipes of tests name their classes

pytest_plugins = ["forked_workers", "tiers", "default_signals", "shared_ranks", "short_ids", "second_run"]


def pytest_configure(config: pytest.Config) -> None:
    """Imports the fixtures, unless this process is the controller of pytest-xdist.

    The controller runs no tests, and its workers start only after its imports: torch and Lightning take seconds.
    """
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.fixture(autouse=True, scope="session")
def priority() -> Iterator[None]:
    """Keeps the priority of this process, in which tests run commands that give way to training, for good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda increment: 0)
        yield
