"""The task of a worker of the benchmark `checkpoint`. Every rank of a mode is a worker."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.workers.protocol import Workload


@dataclass(frozen=True)
class Mode:
    """A way to save.

    Args:
        name: Name in the report.
        summary: A description of one line.
        saver: The project whose code saves; `none` saves nothing.
        writer: The writer of files: the training thread, another thread, or a process.
        staging: The option of `AsyncProcessCheckpoint`.
    """

    name: str
    summary: str
    saver: Literal["none", "genesis", "torch"]
    writer: Literal["sync", "thread", "process"] = "sync"
    staging: Literal["blocking", "overlapped"] = "blocking"


@dataclass(frozen=True)
class Task:
    """The task of one rank.

    Args:
        mode: The way to save.
        workload: The training.
        strategy: Whether parameters are replicated or sharded.
        every_n_steps: Windows of a turn, of which the first ends with a save.
        run_dir: The run's directory, the same for all ranks of this contender.
        rank: The rank.
        num_ranks: Number of ranks, all on this machine.
        adapter: The fields of `AdapterConfig`, with the base, of a training whose saves hold the adapters alone; None
            to train and save all weights.
    """

    mode: Mode
    workload: Workload
    strategy: Literal["replicated", "sharded"]
    every_n_steps: int
    run_dir: str
    rank: int
    num_ranks: int
    adapter: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Returns the one line that `task_from_json` reads."""
        return json.dumps({**asdict(self), "workload": self.workload.to_plain()})


def task_from_json(text: str) -> Task:
    """Returns the task that `Task.to_json` wrote."""
    content = json.loads(text)
    return Task(**{**content, "mode": Mode(**content["mode"]), "workload": Workload(**content["workload"])})


@dataclass(frozen=True)
class Farewell:
    """A worker's message when training has ended.

    Args:
        num_parameters: The parameters of the model, of all ranks.
        state_bytes: Size of the live parameters that are trained and of the optimizer state, over all ranks.
        tensor_bytes: Size of the same tensors in the last checkpoint; 0 without a checkpoint.
        stall_seconds_by_step: Step of a save to the stall that the callback itself logged, if it logs stalls.
    """

    num_parameters: int
    state_bytes: int
    tensor_bytes: int
    stall_seconds_by_step: dict[str, float]
