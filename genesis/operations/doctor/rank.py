"""The program of a rank that a part of the doctor starts: `python -m genesis.operations.doctor.rank TASK VARIANT`."""

import sys

from genesis.operations.doctor.probe import task_from_json
from genesis.operations.doctor.training import train_one_rank

if __name__ == "__main__":
    train_one_rank(task_from_json(sys.argv[1]), sys.argv[2])
