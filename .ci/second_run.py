"""A pytest plugin that runs failed tests a second time, alone and in the order of collection.

Only CI does so: `.ci/stages.py` sets the environment variable NOTES, which `make test` alone does not have. A test
that fails beside busy workers and passes alone is flaky: it does not fail the session, and the session's line in that
file has it with its first traceback. A session has no second run where passing tests would prove too little: after more
failures than MAX_FAILED, an error of the collection, or tests that no worker has run.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from stages import NOTES

ALONE = "GENESIS_TESTS_ALONE"
"""The file with the ids of the tests that a second run keeps, to which it writes the ids of those that passed."""
MAX_FAILED = 20
"""More failures than these in one session have one cause, which is not the load of the machine."""


def strip_group(nodeid: str) -> str:
    """Returns the id of a test without the name of its group, which pytest-xdist appends after an @."""
    return nodeid.rpartition("@")[0] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid


class FirstRun:
    """Notes what failed, and runs it again when the session ends."""

    def __init__(self, config: pytest.Config, notes: Path) -> None:
        self._config = config
        self._notes = notes
        self._collected: list[str] = []
        self._seen: set[str] = set()
        self._skipped: set[str] = set()
        self._failures: dict[str, str] = {}
        self._is_collection_whole = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Lists the tests of a session without workers."""
        self._collected = [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Lists the tests that a worker has collected; all workers collect the same."""
        self._collected = [strip_group(nodeid) for nodeid in ids]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes an error of the collection."""
        self._is_collection_whole &= not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the first failure of a test: in its setup, its call or its teardown, or because its worker crashed."""
        nodeid = strip_group(report.nodeid)
        self._seen.add(nodeid)
        if report.skipped:
            self._skipped.add(nodeid)
        if report.failed and nodeid not in self._failures:
            self._failures[nodeid] = report.longreprtext
            # At once: a run that is stopped at its limit of time has no summary.
            self._print(f"\nFAILED {nodeid}: {report.longreprtext.rstrip().rpartition(chr(10))[2]}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None]:
        """Runs what failed again, after pytest's own summary, and appends the session to the notes."""
        yield
        passed_alone: list[str] = []
        if exitstatus == pytest.ExitCode.TESTS_FAILED:
            refusal = self._find_refusal()
            if refusal is None:
                passed_alone = self._run_alone()
            else:
                self._print(f"nothing is run a second time: {refusal}")
        if passed_alone and len(passed_alone) == len(self._failures):
            session.exitstatus = pytest.ExitCode.OK
        self._write_notes(passed_alone)

    def _find_refusal(self) -> str | None:
        num_missed = len(set(self._collected) - self._seen)
        if not self._is_collection_whole:
            return "the collection failed"
        if len(self._failures) > MAX_FAILED:
            return f"{len(self._failures)} tests failed, more than {MAX_FAILED}"
        return f"{num_missed} tests did not run at all" if num_missed else None

    def _run_alone(self) -> list[str]:
        order = {nodeid: index for index, nodeid in enumerate(self._collected)}
        failed = sorted(self._failures, key=lambda nodeid: order.get(nodeid, len(order)))
        self._print(f"a second run, alone and in order: {len(failed)} failed tests")
        with tempfile.TemporaryDirectory() as directory:
            kept = Path(directory, "tests.json")
            kept.write_text(json.dumps(failed), encoding="utf-8")
            environ = {name: value for name, value in os.environ.items() if name != NOTES} | {ALONE: str(kept)}
            # Files and not ids: pytest would look for brackets and colons of parameters in an id.
            files = dict.fromkeys(nodeid.partition("::")[0] for nodeid in failed)
            # The first session's own directory, which stays where a test fails.
            base = self._config.option.basetemp
            options = [f"--basetemp={base}-alone"] if base else []
            options += [f"--override-ini={setting}" for setting in self._config.option.override_ini or ()]
            command = [sys.executable, "-m", "pytest", "-q", *options, *files]
            status = subprocess.run(command, cwd=self._config.rootpath, env=environ).returncode
            outcome = json.loads(kept.read_text(encoding="utf-8"))
        # A process that has crashed has written no outcome, and the file is still the list of what it was asked to run.
        is_whole = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and isinstance(outcome, dict)
        passed = [nodeid for nodeid in failed if is_whole and nodeid in outcome["passed"]]
        for nodeid in failed:
            self._print(f"{'FLAKY' if nodeid in passed else 'FAILED TWICE'} {nodeid}")
        return passed

    def _write_notes(self, passed_alone: list[str]) -> None:
        skipped = self._skipped - self._failures.keys()
        failed = self._failures.keys() - set(passed_alone)
        counts = {"passed": len(self._seen - skipped - failed), "skipped": len(skipped), "failed": len(failed)}
        flaky = {nodeid: self._failures[nodeid] for nodeid in passed_alone}
        note = {"root": str(self._config.rootpath), "counts": counts, "flaky": flaky}
        with self._notes.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(note) + "\n")

    def _print(self, line: str) -> None:
        self._config.pluginmanager.get_plugin("terminalreporter").write_line(line)
        sys.stdout.flush()


class SecondRun:
    """Keeps the tests that a first run names, and reports which passed."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drops the other tests of the same files."""
        kept = set(json.loads(self._kept.read_text(encoding="utf-8")))
        items[:] = [item for item in items if item.nodeid in kept]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test as passed if its call passed and no phase failed; a skipped test has proved nothing."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Writes what passed."""
        self._kept.write_text(json.dumps({"passed": sorted(self._passed - self._failed)}), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the part that the environment asks for; a worker of pytest-xdist has none."""
    if config.getoption("dist", "no") != "no":
        config.pluginmanager.import_plugin("crashed_workers")
    if hasattr(config, "workerinput"):
        return
    if ALONE in os.environ:
        # The tests start programs, and a session of pytest among these is not this one.
        config.pluginmanager.register(SecondRun(Path(os.environ.pop(ALONE))))
    elif NOTES in os.environ:
        config.pluginmanager.register(FirstRun(config, Path(os.environ[NOTES])))
