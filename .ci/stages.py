"""Runs the stages of CI up to the first that fails; prints their seconds, the flaky tests and the sums of all tests.

CONTRIBUTING.md describes what a flaky test is. The exit status is that of the stage that failed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

NOTES = "GENESIS_CI_NOTES"
"""The environment variable with the file to which each session of pytest appends a line of JSON."""
INSTALL_BROWSER = "apt-get install -y -qq --no-install-recommends chromium > /dev/null"
MAX_LINES = 100
"""The last lines of a traceback that are printed again at the end."""


def install_browser() -> int:
    """Installs a browser where there is none. With one, and only then, the tests in a real browser may not skip."""
    if not shutil.which("chromium"):
        run(("sh", "-c", f"{INSTALL_BROWSER} || {{ apt-get update -qq && {INSTALL_BROWSER}; }}"))
    if shutil.which("chromium"):
        os.environ["GENESIS_REQUIRE_BROWSER"] = "1"
    else:
        print("no browser can be installed: the tests of the page are skipped", file=sys.stderr)
    return 0


def run(command: tuple[str, ...]) -> int:
    """Runs a command and returns its exit status; it ends with this process, unless that is killed."""
    process = subprocess.Popen(command)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return status if status >= 0 else 128 - status


STAGES: dict[str, Callable[[], int]] = {
    "browser": install_browser,
    "make install": lambda: run(("make", "install")),
    "make check docs": lambda: run(("make", "-j2", "--output-sync", "check", "docs")),
    "make test-ci": lambda: run(("make", "test-ci")),
}


def format_flaky(nodeid: str, traceback: str) -> str:
    """Returns the lines of a flaky test: its id, and the end of its first traceback."""
    lines = traceback.splitlines()
    if len(lines) > MAX_LINES:
        lines = [f"({len(lines) - MAX_LINES} lines are left out here)", *lines[-MAX_LINES:]]
    return "\n".join(
        (f"FLAKY {nodeid}: it failed beside other tests, and passed alone. Its first failure:", *lines, "")
    )


def format_end(seconds: dict[str, float], notes: list[str]) -> str:
    """Returns what the run prints last: seconds of the stages, flaky tests, and sums over all sessions of pytest.

    Args:
        seconds: Of each stage that has started.
        notes: A line of each session, as `.ci/second_run.py` writes it.
    """
    sessions = [json.loads(line) for line in notes]
    total = sum(seconds.values())
    table = [f"{taken:7.0f} s  {name}" for name, taken in (*seconds.items(), ("total", total))]
    counts: Counter[str] = Counter()
    flaky = []
    for session in sessions:
        counts.update(session["counts"])
        root = os.path.relpath(session["root"])
        flaky += [format_flaky(os.path.normpath(f"{root}/{nodeid}"), text) for nodeid, text in session["flaky"].items()]
    counts["flaky"] = len(flaky)
    sums = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
    return "\n".join(("", *table, "", *flaky, f"all sessions: {sums or 'no tests'} in {total:.2f}s"))


def end(signal_number: int, frame: FrameType | None) -> None:
    """Ends the stage and this process, and lets the table be printed."""
    signal.signal(signal_number, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal_number)
    raise SystemExit(128 + signal_number)


def main() -> int:
    """Runs the stages; returns the exit status."""
    if sys.argv[1:]:
        print(f"{Path(__file__).name} takes no arguments; its stages are {', '.join(STAGES)}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    # The tests of the CUDA paths compile a shim, and those of saves a simulated device. They may not skip.
    os.environ["GENESIS_REQUIRE_COMPILER"] = "1"
    # The tests of the site look at the one that `make docs` has built.
    os.environ["GENESIS_SITE"] = str(Path("build/site").resolve())
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        notes = Path(directory, "notes")
        notes.touch()
        os.environ[NOTES] = str(notes)
        try:
            for name, stage in STAGES.items():
                started = time.monotonic()
                try:
                    status = stage()
                finally:
                    seconds[name] = time.monotonic() - started
                    print(f"== {name}: {seconds[name]:.0f} s", flush=True)
                if status:
                    print(f"== {name} failed with status {status}", flush=True)
                    return status
            return 0
        finally:
            print(format_end(seconds, notes.read_text(encoding="utf-8").splitlines()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
