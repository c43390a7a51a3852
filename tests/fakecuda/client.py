"""The way from a test to the fake device's process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakecuda.compiler import build_shim

REPOSITORY = Path(__file__).parents[2]


class FakeDevice:
    """A process with a fake CUDA (`tests.fakecuda.server`); what fails there fails here with its traceback.

    It runs each case once for the same arguments, which several tests may ask for.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "GENESIS_FAKE_CUDA": str(build_shim())}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakecuda.server"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: dict[str, str] = {}

    def run(self, case: str, **arguments: Any) -> Any:
        """Returns what a case comes to, run in a process of its own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = json.dumps({"case": case, "arguments": arguments}, sort_keys=True)
        if request not in self._answers:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            self._answers[request] = self._process.stdout.readline()
            assert self._answers[request], "the process of the fake device has ended"
        answer = json.loads(self._answers[request])
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{answer['traceback']}")
        return answer["result"]

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
