"""How long the data take: to be made, to be waited for, to be copied to a device."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Lock

import torch

from genesis.data.window import AccumulationWindow


@dataclass(frozen=True)
class LoaderTimes:
    """What a loader did in a stretch of training.

    Args:
        num_made: Windows made ready.
        num_tokens: Valid labels in them.
        num_places: Labels that would fit into them.
        make_seconds: Spent on making them, ahead of their use or while training waited.
        num_given: Windows given to training.
        wait_seconds: Training waited for those.
    """

    num_made: int = 0
    num_tokens: int = 0
    num_places: int = 0
    make_seconds: float = 0.0
    num_given: int = 0
    wait_seconds: float = 0.0


class LoaderClock:
    """Adds up what a loader does. Its thread and the training thread write, anyone may read."""

    def __init__(self) -> None:
        self._times = LoaderTimes()
        self._num_ready = 0
        self._lock = Lock()

    @property
    def num_ready(self) -> int:
        """Returns how many windows are made and not given yet."""
        return self._num_ready

    def begin(self) -> None:
        """Forgets windows that an iteration before made and nobody took."""
        with self._lock:
            self._num_ready = 0

    def take(self) -> LoaderTimes:
        """Returns what was added since the last call, and begins anew."""
        with self._lock:
            times, self._times = self._times, LoaderTimes()
        return times

    def made(self, window: AccumulationWindow, seconds: float) -> None:
        """Adds a window that took `seconds` to make."""
        num_places = sum(micro_batch.labels.numel() for micro_batch in window.micro_batches)
        with self._lock:
            times = self._times
            self._times = replace(
                times,
                num_made=times.num_made + 1,
                num_tokens=times.num_tokens + window.num_valid_tokens,
                num_places=times.num_places + num_places,
                make_seconds=times.make_seconds + seconds,
            )
            self._num_ready += 1

    def wait_for(self, windows: Iterator[AccumulationWindow]) -> AccumulationWindow | None:
        """Returns the next of `windows`, None after the last; the time until it is there is one of waiting."""
        begin_seconds = time.perf_counter()
        window = next(windows, None)
        if window is not None:
            seconds = time.perf_counter() - begin_seconds
            with self._lock:
                times = self._times
                self._times = replace(times, num_given=times.num_given + 1, wait_seconds=times.wait_seconds + seconds)
                self._num_ready -= 1
        return window


def _build_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types


class CopyClock:
    """Copies windows to a device and measures how long that takes there, without waiting for it.

    Used by the training thread alone. On the CPU nothing is copied and nothing measured.
    """

    def __init__(self) -> None:
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._finished_ms: list[float] = []

    def copy(self, window: AccumulationWindow, device: torch.device) -> AccumulationWindow:
        """Returns the window on `device`; from page-locked memory the host does not wait for the copy.

        The device makes the copy in its turn, between the kernels before and after it.
        """
        if device.type != "cuda":
            return window.to(device, non_blocking=True)
        begin, end = _build_event(), _build_event()
        begin.record()
        copied = window.to(device, non_blocking=True)
        end.record()
        self._running.append((begin, end))
        while self._running and self._running[0][1].query():  # type: ignore[no-untyped-call]  # as above
            begin, end = self._running.popleft()
            self._finished_ms.append(begin.elapsed_time(end))
        return copied

    def take_mean_ms(self) -> float | None:
        """Returns the mean over the copies known to have ended since the last call, None where there is none."""
        finished, self._finished_ms = self._finished_ms, []
        return sum(finished) / len(finished) if finished else None
