"""The process on whose fake device everything runs: it imports once, then forks a child for each request.

A request is a line of JSON on stdin with the number of a request, the name of a case (`tests.fakecuda.cases`) and its
arguments; the answer is a line on stdout with the number and what the case returned, or the traceback of its error.
Each child runs one case, because what a case puts in the place of torch's own stays there.
"""

import gc
import json
import os
import sys
import traceback
from typing import Any

from tests.fakecuda import device  # before torch

device.pretend()

import torch  # noqa: E402

from tests.fakecuda.cases import CASES  # noqa: E402


def answer(case: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns what a case comes to."""
    try:
        return {"result": CASES[case](**arguments)}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    """Serves until stdin ends."""
    torch.set_num_threads(1)
    gc.freeze()
    out = os.dup(1)
    os.dup2(2, 1)  # what a case prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            result = answer(request["case"], request["arguments"])
            with os.fdopen(out, "w", encoding="utf-8") as answers:
                answers.write(json.dumps(result) + "\n")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            text = f"the case {request['case']} ended with status {os.waitstatus_to_exitcode(status)}"
            os.write(out, (json.dumps({"error": text, "traceback": ""}) + "\n").encode())


if __name__ == "__main__":
    main()
