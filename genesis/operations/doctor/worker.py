"""The program of a part's process: `python -m genesis.operations.doctor.worker PART TASK FINDINGS`."""

import sys
from pathlib import Path

from genesis.operations.doctor.parts import find_part
from genesis.operations.doctor.probe import Probe, SkippedError, task_from_json


def main(arguments: list[str]) -> int:
    """Runs one part and returns 0; a part that does not apply records why."""
    name, task, path = arguments
    probe = Probe(task_from_json(task), Path(path))
    try:
        find_part(name).load()(probe)
    except SkippedError as reason:
        probe.skip(str(reason))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
