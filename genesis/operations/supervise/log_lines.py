"""The lines that a supervisor prints, as text or as JSON for programs that collect logs."""

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

from genesis.base.errors import printable_lines

LogFormat = Literal["text", "json"]


def build_report(log_format: LogFormat, run_dir: Path, output: TextIO | None = None) -> Callable[[str], None]:
    """Returns a function that prints a line of the supervisor.

    With "json" each line is an object with `time`, `logger`, `run` and `message`. What the ranks print stays as it is.

    Args:
        log_format: Text or JSON.
        run_dir: The run's directory.
        output: Where to; None for the standard output.
    """

    def report(line: str) -> None:
        message = printable_lines(line)
        if log_format == "json":
            moment = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
            content = {"time": moment, "logger": "genesis supervise", "run": str(run_dir), "message": message}
            message = json.dumps(content)
        else:
            message = f"supervise: {message}"
        print(message, file=output or sys.stdout, flush=True)

    return report
