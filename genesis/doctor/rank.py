"""The program of a process that a part of the doctor starts: a rank, or a run that is killed and resumed."""

import sys

from genesis.doctor.probe import task_from_json
from genesis.doctor.training import fit_for_kill, train_one_rank


def main(arguments: list[str]) -> None:
    """Runs a rank (`TASK VARIANT`), or a run (`TASK VARIANT MODE NAME whole|killed`)."""
    task = task_from_json(arguments[0])
    if len(arguments) == 2:
        train_one_rank(task, arguments[1])
    else:
        variant, mode, name, end = arguments[1:]
        fit_for_kill(task, variant, mode, name, end == "killed")


if __name__ == "__main__":
    main(sys.argv[1:])
