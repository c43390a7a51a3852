"""Runs a test many times beside busy processes, and prints how often it failed, with the first failure.

The test is a path or an id of pytest, in the environment variable T: `make stress T=tests/test_words.py`. Each is a
process of its own, because the state of one process would hide or repeat a failure. The load ends with this process.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

NUM_TIMES = 20
NUM_BUSY = 4
BUSY = """
import os, signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""
"""A process of the load. It also ends if this process is killed."""


@contextmanager
def load() -> Iterator[None]:
    """Keeps NUM_BUSY processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run_once(test: str) -> subprocess.CompletedProcess[str]:
    """Runs the test as `make test` does, without workers; a path in `callbacks` is a test of that distribution."""
    inside = test.removeprefix("callbacks/")
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={directory}/t", inside]
        return subprocess.run(
            command,
            cwd="callbacks" if inside != test else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def main() -> int:
    """Returns 0 if the test passed each time, 1 if it failed, and 2 if there is no such test."""
    test = os.environ.get("T")
    if not test:
        print("no test: run make stress T=PATH, with a path or an id of pytest", file=sys.stderr)
        return 2
    num_failed, first = 0, ""
    with load():
        for number in range(1, NUM_TIMES + 1):
            started = time.monotonic()
            done = run_once(test)
            if done.returncode > 1:
                # Neither passed nor failed: pytest could not collect the test, or found none.
                print(done.stdout)
                return 2
            num_failed += done.returncode != 0
            first = first or (done.stdout if done.returncode else "")
            last = (done.stdout.splitlines() or ["no output"])[-1]
            print(f"{number:3} of {NUM_TIMES}, {time.monotonic() - started:.0f} s: {last}", flush=True)
    if first:
        print(f"\nThe first failure:\n{first}")
    print(f"{test}: failed {num_failed} of {NUM_TIMES} times beside {NUM_BUSY} busy processes")
    return 1 if num_failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
