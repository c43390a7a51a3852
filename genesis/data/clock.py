"""Measures the time that data cost: building windows, waiting for them, copying them to a device."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from operator import add
from threading import Lock

import torch

from genesis.base.device import is_host, record_timer
from genesis.data.window import AccumulationWindow


@dataclass(frozen=True)
class LoaderTimes:
    """Counts and times of a loader over a part of the training.

    Args:
        num_made: Number of windows built.
        num_tokens: Number of valid labels in these windows.
        num_positions: Number of label positions in these windows.
        make_seconds: Time spent on building them, ahead of their use or while training waited.
        num_given: Number of windows given to training.
        wait_seconds: Time that training waited for these windows.
    """

    num_made: int = 0
    num_tokens: int = 0
    num_positions: int = 0
    make_seconds: float = 0.0
    num_given: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: "LoaderTimes") -> "LoaderTimes":
        return LoaderTimes(*map(add, astuple(self), astuple(other)))


class LoaderClock:
    """Adds up a loader's counts and times. The loader's and the training thread write, any thread may read."""

    def __init__(self) -> None:
        self._times = LoaderTimes()
        self._num_ready = 0
        self._lock = Lock()

    @property
    def num_ready(self) -> int:
        """Returns the number of windows that are built but not yet given to training."""
        return self._num_ready

    def begin(self) -> None:
        """Forgets windows that an earlier iteration built but did not use."""
        with self._lock:
            self._num_ready = 0

    def take(self) -> LoaderTimes:
        """Returns the counts and times since the last call, and resets them."""
        with self._lock:
            times, self._times = self._times, LoaderTimes()
        return times

    def made(self, window: AccumulationWindow, seconds: float) -> None:
        """Adds a window that took `seconds` to build."""
        num_positions = sum(micro_batch.labels.numel() for micro_batch in window.micro_batches)
        with self._lock:
            self._times += LoaderTimes(1, window.num_valid_tokens, num_positions, seconds)
            self._num_ready += 1

    def wait_for(self, windows: Iterator[AccumulationWindow]) -> AccumulationWindow | None:
        """Returns the next of `windows`, None after the last; measures the time until the window is ready."""
        begin_seconds = time.perf_counter()
        window = next(windows, None)
        if window is not None:
            seconds = time.perf_counter() - begin_seconds
            with self._lock:
                self._times += LoaderTimes(num_given=1, wait_seconds=seconds)
                self._num_ready -= 1
        return window


class CopyClock:
    """Copies windows to a device and measures the copies with events of the device, without waiting for them.

    Only the training thread may use the clock. On the CPU it neither copies nor measures.
    """

    def __init__(self) -> None:
        self._running: deque[tuple[torch.Event, torch.Event]] = deque()
        self._finished_ms: list[float] = []

    def copy(self, window: AccumulationWindow, device: torch.device) -> AccumulationWindow:
        """Returns the window on `device`; from page-locked memory the host does not wait for the copy.

        The device makes the copy in its turn, between the kernels before and after it.
        """
        if is_host(device.type):
            return window.to(device, non_blocking=True)
        begin = record_timer(device)
        copied = window.to(device, non_blocking=True)
        self._running.append((begin, record_timer(device)))
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            self._finished_ms.append(begin.elapsed_time(end))
        return copied

    def take_mean_ms(self) -> float | None:
        """Returns the mean time of the copies that ended since the last call, None if none did."""
        finished, self._finished_ms = self._finished_ms, []
        return sum(finished) / len(finished) if finished else None
