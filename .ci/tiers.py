"""A pytest plugin that finds the slow tests which repeat others, and reports the duration of each tier.

The report, which also lists the quick tests that are too slow, is never a failure, because a test's duration also
depends on the load of the machine. CONTRIBUTING.md describes how to choose a test's tier.
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Generator

import pytest
from stages import NOTES

TIERS = ("long", "slow", "bench", "demo")
"""The markers of all tiers except the quick tier, which has no marker."""
LIMIT_SECONDS = 2.0
"""Limit of each phase (setup, call or teardown) of a quick test, on two idle cores."""
MAX_LISTED = 20


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the marker `repeat` to the slow cases of a test that another case proves, before pytest selects by markers.

    A test of which a case is quick is proved by that case; a test of slow cases alone by its first.
    """
    by_test: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        test = item.nodeid.rpartition("::")[0], getattr(item, "originalname", item.name)
        by_test.setdefault(test, []).append(item)
    for cases in by_test.values():
        is_quick = any(not any(case.get_closest_marker(tier) for tier in TIERS) for case in cases)
        slow = [case for case in cases if case.get_closest_marker("slow") and not case.get_closest_marker("long")]
        for case in slow[0 if is_quick else 1 :]:
            if not case.get_closest_marker("each"):
                case.add_marker("repeat")


class TierReport:
    """Adds up the durations of the phases of tests, with pytest-xdist over all workers."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()
        self._over: list[tuple[float, str]] = []
        self._of_files: Counter[str] = Counter()
        self._processor_of_files: Counter[str] = Counter()
        self._processor_seconds = time.process_time()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Puts the longest tests first, and writes each test's tier to the test's report.

        A long test that starts last leaves the other workers idle. pytest-xdist sends the report from worker to
        controller.

        Raises:
            pytest.UsageError: The installed pytest-xdist cannot group the tests of the installed pytest. Grouping needs
                a private attribute of pytest; without groups each worker would build the fixtures that a group shares.
        """
        items.sort(key=lambda item: item.get_closest_marker("early") is None)
        is_grouped = config.getoption("loadgroup", default=False)
        for item in items:
            if is_grouped and item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError(
                    f"pytest-xdist does not group tests under pytest {pytest.__version__}: "
                    "install the versions of constraints.txt"
                )
            tier = next((tier for tier in TIERS if item.get_closest_marker(tier)), "quick")
            item.user_properties.append(("tier", tier))

    def pytest_collection_finish(self) -> None:
        """Takes the modules and tests out of garbage collection, which would look at millions of objects again."""
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Notes in each report the processor time of this process since the report before."""
        report = yield
        before, self._processor_seconds = self._processor_seconds, time.process_time()
        report.user_properties.append(("processor_seconds", self._processor_seconds - before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts one phase of one test."""
        properties = dict(report.user_properties)
        tier = properties.get("tier")
        if tier is None:  # The worker of this test has crashed, and pytest-xdist reports the test in its place.
            return
        self._seconds[tier] += report.duration
        self._tests[tier] += report.when == "call"
        file = report.nodeid.partition("::")[0]
        self._of_files[file] += report.duration
        self._processor_of_files[file] += properties["processor_seconds"]
        if tier == "quick" and report.duration > LIMIT_SECONDS:
            self._over.append((report.duration, f"{report.when:8} {report.nodeid}"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the durations of the tiers, and the quick tests that took longest."""
        for tier, seconds in self._seconds.items():
            terminalreporter.write_line(
                f"{tier} tier: {self._tests[tier]} tests took {seconds:.0f} s, one after another"
            )
        if self._over:
            terminalreporter.section(
                f"quick tests over {LIMIT_SECONDS:g} s: see CONTRIBUTING.md, unless others were busy"
            )
            for seconds, name in sorted(self._over, reverse=True)[:MAX_LISTED]:
                terminalreporter.write_line(f"{seconds:6.1f} s {name}")
            if len(self._over) > MAX_LISTED:
                terminalreporter.write_line(f"and {len(self._over) - MAX_LISTED} more")
        if NOTES in os.environ:
            terminalreporter.section("files that took longest, and how much of that the worker computed itself")
            for file, seconds in self._of_files.most_common(MAX_LISTED):
                terminalreporter.write_line(f"{file}: {seconds:.0f} s, {self._processor_of_files[file]:.0f} s")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the report."""
    config.pluginmanager.register(TierReport())
