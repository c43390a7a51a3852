"""The messages between `genesis bench checkpoint` and its workers, and the gate between the workers' windows.

    worker    {"versions": ..., "num_parameters": ...}  when it has trained some short windows and saved nothing
    parent    go K                                      train K windows, the first of which ends with a save
    worker    {"step_seconds": [...], ...}              when they are trained and the save has ended
    parent    quit
    worker    {"state_bytes": ..., "saves": ...}        what it says of its saves itself

Every rank of a contender is a worker. Contenders take turns: no contender trains during another contender's save.
"""

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from genesis.base.device import read_peak_memory, synchronize
from genesis.bench.workers.protocol import NoMoreStepsError, Workload


@dataclass(frozen=True)
class Mode:
    """A way to save.

    Args:
        name: Name in the report.
        summary: A description of one line.
        saver: The project whose code saves; `none` saves nothing.
        writer: The writer of files: the training thread, another thread, or a process.
        staging: The option of `AsyncProcessCheckpoint`.
        is_pinned: Whether tensors are copied from a GPU to page-locked memory.
        has_plan_cache: Whether several saves share a plan.
        has_own_cores: Whether the trainer leaves one core to the writer process.
    """

    name: str
    summary: str
    saver: Literal["none", "genesis", "torch"]
    writer: Literal["sync", "thread", "process"] = "sync"
    staging: Literal["blocking", "overlapped"] = "blocking"
    is_pinned: bool = False
    has_plan_cache: bool = True
    has_own_cores: bool = False


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
class TrainerReady:
    """A worker's message when the worker is ready for its first turn."""

    versions: dict[str, str]
    device_name: str
    num_parameters: int


@dataclass(frozen=True)
class Turn:
    """One rank's turn.

    Args:
        step_seconds: From each window's boundary to the next; the first window ends with the save.
        step: Lightning's global step of the save.
        stall_seconds: Time in the hooks of the saving callback, measured around the hooks.
        begin_seconds: Time in the hook in which the save began.
        save_seconds: From that hook's begin until the save was complete; None without a save.
        num_steps_beside: Number of later windows that began before the save was complete.
        wait_seconds: How long the save continued after the turn.
        file_bytes: Size of all files of the checkpoint.
        peak_resident_bytes: Peak resident memory of the trainer's process since its start.
        peak_device_bytes: Peak memory of tensors on the GPU since the start; None on the CPU.
    """

    step_seconds: list[float]
    step: int
    stall_seconds: float
    begin_seconds: float
    save_seconds: float | None
    num_steps_beside: int
    wait_seconds: float
    file_bytes: int
    peak_resident_bytes: int
    peak_device_bytes: int | None


@dataclass(frozen=True)
class Farewell:
    """A worker's message when training has ended.

    Args:
        state_bytes: Size of the live parameters that are trained and of the optimizer state, over all ranks.
        tensor_bytes: Size of the same tensors in the last checkpoint; 0 without a checkpoint.
        stall_seconds_by_step: Step of a save to the stall that the callback itself logged, if it logs stalls.
    """

    state_bytes: int
    tensor_bytes: int
    stall_seconds_by_step: dict[str, float]


@dataclass(frozen=True)
class SaveEnd:
    """The wall-clock time at which a save was complete, and the total size of its files."""

    at_seconds: float
    file_bytes: int


@dataclass
class SaveClock:
    """Measurements around the hooks of a callback, written by the worker's hooks and read by the gate.

    Args:
        stall_seconds: Total time in all hooks so far.
        begin_seconds: Time in the hook in which the last save began.
        began_at_seconds: Wall-clock time at which the last save began.
    """

    stall_seconds: float = 0.0
    begin_seconds: float = 0.0
    began_at_seconds: float = 0.0


def count_steps_beside(step_seconds: list[float], save_seconds: float, from_begin_seconds: float) -> int:
    """Returns how many windows after the first began before the save was complete.

    Args:
        step_seconds: Seconds of each of the turn's windows.
        save_seconds: From the save's begin until it was complete.
        from_begin_seconds: From the save's begin to the end of the first window.

    Example:
        >>> count_steps_beside([1.5, 1.0, 1.0, 1.0], save_seconds=1.7, from_begin_seconds=0.5)
        2
    """
    count, begin = 0, from_begin_seconds
    for seconds in step_seconds[1:]:
        if begin >= save_seconds:
            break
        count += 1
        begin += seconds
    return count


class TurnGate:
    """Releases the windows of a turn to the training loop, and waits between turns.

    Standard output carries messages to the parent alone, so the gate redirects the output of libraries to the error
    stream.

    Args:
        task: The rank's task.
        clock: Measurements around the hooks of the saving callback.
        wait_for_end: Returns when the save of a step has ended; None if the mode saves nothing.
        describe: Describes the worker after its warm-up.
    """

    def __init__(
        self,
        task: Task,
        clock: SaveClock,
        wait_for_end: Callable[[int], SaveEnd] | None,
        describe: Callable[[], TrainerReady],
    ) -> None:
        self._task = task
        self._clock = clock
        self._wait_for_end = wait_for_end
        self._describe = describe
        self._to_parent = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self.num_warmup_steps = task.every_n_steps - 1
        """Windows before the first turn: after them every turn's first window ends with a save."""
        self._num_steps_left = self.num_warmup_steps
        self._num_turns = 0
        self._boundaries: list[float] = []
        self._stall_before_seconds = 0.0

    def before_step(self) -> None:
        """Returns when the next window may begin.

        Raises:
            NoMoreStepsError: There are no more steps.
        """
        if self._num_steps_left == 0:
            self._end_turn()
            self._wait()
        self._boundaries.append(time.perf_counter())
        self._num_steps_left -= 1

    def send(self, message: TrainerReady | Turn | Farewell) -> None:
        """Sends a message to the parent."""
        print(json.dumps(asdict(message)), file=self._to_parent, flush=True)

    def _end_turn(self) -> None:
        self._synchronize()
        self._boundaries.append(time.perf_counter())
        if self._num_turns == 0:
            self.send(self._describe())
            return
        step_seconds = [end - begin for begin, end in itertools.pairwise(self._boundaries)]
        step = self._num_turns * self._task.every_n_steps
        ended_at = time.time()
        save_seconds, file_bytes, num_beside, wait_seconds = None, 0, 0, 0.0
        if self._wait_for_end is not None:
            end = self._wait_for_end(step)
            save_seconds, file_bytes = end.at_seconds - self._clock.began_at_seconds, end.file_bytes
            first_end = ended_at - sum(step_seconds[1:])
            num_beside = count_steps_beside(step_seconds, save_seconds, first_end - self._clock.began_at_seconds)
            wait_seconds = max(0.0, end.at_seconds - ended_at)
        peak = read_peak_memory(self._task.workload.device)
        self.send(
            Turn(
                step_seconds,
                step,
                self._clock.stall_seconds - self._stall_before_seconds,
                self._clock.begin_seconds,
                save_seconds,
                num_beside,
                wait_seconds,
                file_bytes,
                # In KiB on Linux.
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
                None if peak is None else peak.allocated_bytes,
            )
        )

    def _wait(self) -> None:
        words = sys.stdin.readline().split()
        if not words or words[0] == "quit":
            raise NoMoreStepsError
        self._num_steps_left = int(words[1])
        self._num_turns += 1
        self._boundaries = []
        self._stall_before_seconds = self._clock.stall_seconds
        self._synchronize()

    def _synchronize(self) -> None:
        synchronize(self._task.workload.device)


def sum_file_bytes(directory: Path) -> int:
    """Returns the size of all files in a checkpoint's directory."""
    return sum(path.stat().st_size for path in directory.iterdir())
