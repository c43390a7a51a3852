"""The messages between a benchmark of training and its workers, and the work of all workers.

    worker    {"versions": ..., "device_name": ...}     after its warm-up
    parent    go N                                      train N windows
    worker    {"seconds": ..., "tokens": ..., ...}      when the device has finished them
    parent    quit

Workers train one after another in short bursts, so that a slow minute of the machine affects all of them. A worker
waits inside its own training loop: nothing is built, loaded or warmed up again between bursts. The messages are also
those of earlier versions, with which `versions` compares.

This module imports only torch, the device layer and the standard library, because workers of other projects import it
in their own environments.
"""

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from genesis.base.device import limit_memory, name_device, read_peak_memory, synchronize

NUM_DISTINCT_WINDOWS = 64
"""Number of distinct windows of random tokens, which are used in turn: few enough for memory, too many to memorize."""

ENDLESS = 1_000_000
"""A number of steps that no benchmark reaches, for training loops that require a last step."""

IGNORE_INDEX = -100


class TimedWork(Protocol):
    """What the parent and the gate read of a workload."""

    @property
    def device(self) -> str:
        """The type of device."""

    @property
    def num_threads(self) -> int:
        """Threads of each contender on the CPU."""

    @property
    def num_warmup_steps(self) -> int:
        """Steps before the first burst."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the device that may be used; None for all."""

    @property
    def tokens_per_window(self) -> int:
        """Tokens of a step of a burst."""

    def to_json(self) -> str:
        """Returns the line that the worker reads."""


@dataclass(frozen=True)
class Workload:
    """The training that every contender runs.

    Args:
        decoder: The keyword arguments of `DecoderConfig`, all of them.
        optimizer: The keyword arguments of `OptimizerOptions` that AdamW reads.
        seq_len: Tokens of a sequence.
        micro_batch_size: Sequences of one forward and backward.
        num_micro_batches: Micro-batches of a window.
        documents: Whether a row holds one document or about four; attention does not cross documents.
        flops_per_token: Floating-point operations of forward and backward; converts the matmul worker's operations
            to tokens.
        device: The type of device: `cpu` or `cuda`.
        precision: Lightning's name of the precision.
        is_compiled: Whether the model is compiled.
        num_threads: Threads of each contender on the CPU.
        num_warmup_steps: Steps before the first burst.
        memory_bytes: Memory of the device that may be used; None for all.
    """

    decoder: dict[str, Any]
    optimizer: dict[str, Any]
    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    documents: Literal["one_per_row", "packed"]
    flops_per_token: float
    device: str
    precision: Literal["32-true", "bf16-mixed"]
    is_compiled: bool
    num_threads: int
    num_warmup_steps: int
    memory_bytes: int | None = None

    @property
    def sequences_per_window(self) -> int:
        """Sequences between two optimizer steps."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def tokens_per_window(self) -> int:
        """Tokens between two optimizer steps, valid or not."""
        return self.sequences_per_window * self.seq_len

    def to_json(self) -> str:
        """Returns the one line that `workload_from_json` reads."""
        return json.dumps(self.to_plain())

    def to_plain(self) -> dict[str, Any]:
        """Returns the fields; without `memory_bytes`, which earlier versions do not have, if it is not given."""
        fields = asdict(self)
        if self.memory_bytes is None:
            del fields["memory_bytes"]
        return fields


def workload_from_json(text: str) -> Workload:
    """Returns the workload that `Workload.to_json` wrote."""
    return Workload(**json.loads(text))


@dataclass(frozen=True)
class Ready:
    """A worker's message after its warm-up."""

    versions: dict[str, str]
    device_name: str


@dataclass(frozen=True)
class Burst:
    """A worker's measurements over some windows.

    Args:
        seconds: From the parent's message to the end of the last step on the device.
        cpu_seconds: CPU time of all threads. With one thread, about the wall time on an idle machine.
        tokens: Number of trained tokens.
        peak_resident_bytes: Peak resident memory of the process since its start.
        peak_device_bytes: Peak memory of tensors on the GPU since the start; None on the CPU.
        loss: Loss of one of the last steps in nats per token, if the contender reports losses.
        figures: Other figures of the contender, by name.
        step_seconds: From the begin of each window to that of the next one, or to the end.
    """

    seconds: float
    cpu_seconds: float
    tokens: float
    peak_resident_bytes: int
    peak_device_bytes: int | None
    loss: float | None
    figures: dict[str, Any] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens over the seconds of the clock."""
        return self.tokens / self.seconds


def random_rows(workload: Workload) -> Tensor:
    """Returns the tokens of all distinct windows, one more per row than a sequence has: int64 [rows, seq_len + 1]."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_DISTINCT_WINDOWS * workload.sequences_per_window, workload.seq_len + 1)
    return torch.randint(workload.decoder["vocab_size"], shape, generator=generator)


class NoMoreStepsError(Exception):
    """The parent has sent `quit`; raised inside the training loop and caught outside."""


class Gate:
    """Releases the steps of the warm-up and of bursts in a training loop, and waits between bursts.

    Standard output carries messages to the parent alone, so the gate redirects the output of libraries to the error
    stream.

    Args:
        workload: The training.
        packages: The packages whose versions are reported.
        read_loss: Returns the loss of a late step. Called between bursts only.
        read_figures: Returns other figures of the burst, likewise.
    """

    def __init__(
        self,
        workload: TimedWork,
        packages: Sequence[str],
        read_loss: Callable[[], float | None] = lambda: None,
        read_figures: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._workload = workload
        self._packages = packages
        self._read_loss, self._read_figures = read_loss, read_figures
        self._to_parent = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._num_steps_left = workload.num_warmup_steps
        self._is_warm = False
        self._boundaries: list[float] = []
        self._cpu_began_at = 0.0
        torch.set_num_threads(workload.num_threads)
        if workload.memory_bytes is not None:
            limit_memory(workload.device, workload.memory_bytes)

    def may_begin(self) -> bool:
        """Waits until the next step may begin, and returns whether there is one."""
        if self._num_steps_left == 0:
            self._end_burst()
            words = sys.stdin.readline().split()
            if not words or words[0] == "quit":
                return False
            self._num_steps_left, self._boundaries = int(words[1]), []
            self._cpu_began_at = time.process_time()
        self._boundaries.append(time.perf_counter())
        self._num_steps_left -= 1
        return True

    def before_step(self) -> None:
        """Returns when the next step may begin.

        Raises:
            NoMoreStepsError: There are no more steps.
        """
        if not self.may_begin():
            raise NoMoreStepsError

    def passes(self) -> Iterator[int]:
        """Yields a number for each step that may begin, until there are no more: the gate as a loop."""
        return itertools.takewhile(lambda _: self.may_begin(), itertools.count())

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the parent."""
        print(json.dumps(message), file=self._to_parent, flush=True)

    def _end_burst(self) -> None:
        kind = self._workload.device
        synchronize(kind)
        boundaries, cpu_seconds = [*self._boundaries, time.perf_counter()], time.process_time() - self._cpu_began_at
        if not self._is_warm:
            self._is_warm = True
            versions = {package: version(package) for package in self._packages}
            self.send(asdict(Ready(versions, name_device(kind))))
            return
        figures = self._read_figures()
        peak = read_peak_memory(kind)
        burst = Burst(
            boundaries[-1] - boundaries[0],
            cpu_seconds,
            (len(boundaries) - 1) * self._workload.tokens_per_window,
            # In KiB on Linux. A process starts with its parent's peak, which is below that of one with a model.
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            None if peak is None else peak.allocated_bytes,
            self._read_loss(),
            figures,
            [end - begin for begin, end in itertools.pairwise(boundaries)],
        )
        self.send(asdict(burst))
