"""The time of steps by part: on the host by a clock, on a device by events that are read when they have passed.

A step is a chain of marks; the time between two marks belongs to one part. On a device a mark is an event in the stream
of training, so the time between two of them is what the device needed, waits for the host included. The host never
waits: it asks for a step's last event when later steps end, and reads the times of the step if the event has passed.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .checkpoint.device import build_timer, is_host
from .step_parts import Part

_MAX_OPEN_STEPS: Final = 64
"""A device that is further behind loses the times of its oldest steps."""
_DEFAULT_PART: Final[Part] = "other"


class HostMarks:
    """Marks of the host's clock."""

    def mark(self) -> float:
        """Returns the time."""
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        """Returns True: the host's time is known at once."""
        return True

    def measure_ms(self, begin: float, end: float) -> float:
        """Returns the time between two marks in milliseconds."""
        return 1e3 * (end - begin)

    def give_back(self, marks: Sequence[float]) -> None:
        """Does nothing."""


class DeviceMarks:
    """Marks in a device's stream of the calling thread, by events that are used again.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []

    def mark(self) -> torch.Event:
        """Returns an event that the device passes after the work that it has by now. The host does not wait."""
        event = self._free.pop() if self._free else build_timer(self._device)
        event.record()
        return event

    def has_passed(self, mark: torch.Event) -> bool:
        """Returns whether the device has passed an event. It does not wait."""
        return bool(mark.query())

    def measure_ms(self, begin: torch.Event, end: torch.Event) -> float:
        """Returns the time between two events that have passed."""
        return float(begin.elapsed_time(end))

    def give_back(self, marks: Sequence[torch.Event]) -> None:
        """Takes events to be recorded again."""
        self._free += marks


class StepTimeline:
    """Divides the time of the training thread, or of its device, among parts.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks: Any = HostMarks() if is_host(device) else DeviceMarks(device)
        self._open: deque[_Step] = deque()
        self.start()

    def start(self) -> None:
        """Begins a step now; what has been measured of the current one is dropped."""
        self._parts: list[Part | None] = [_DEFAULT_PART]
        self._step = _Step(self._marks.mark(), [])

    @property
    def part(self) -> Part | None:
        """The part that the time belongs to now; None in time that belongs to no step."""
        return self._parts[-1]

    def begin(self, part: Part | None) -> None:
        """Notes that a part begins; None for time that belongs to no step."""
        before = self._parts[-1]
        part = part if before is not None else None  # within time that belongs to no step
        self._parts.append(part)
        if part != before:  # a part within itself needs no mark
            self._cut(before)

    def end(self) -> None:
        """Notes that the innermost part ends."""
        if len(self._parts) == 1:  # it began before `start`
            return
        part = self._parts.pop()
        if part != self._parts[-1]:
            self._cut(part)

    def end_step(self, *, is_kept: bool = True) -> None:
        """Ends a step, which `read` returns once the device has passed it, unless it is not kept."""
        self._cut(self._parts[-1])
        step, self._step = self._step, _Step(self._step.segments[-1][1], [])
        if is_kept:
            self._open.append(step)
            if len(self._open) > _MAX_OPEN_STEPS:
                self._open.popleft()

    def read(self) -> list[dict[Part, float]]:
        """Returns the milliseconds by part of the steps that have passed since the last call, in order."""
        steps = []
        while self._open and self._marks.has_passed(self._open[0].segments[-1][1]):
            steps.append(self._measure(self._open.popleft()))
        return steps

    def _cut(self, part: Part | None) -> None:
        """Ends the current segment, which belongs to `part`."""
        self._step.segments.append((part, self._marks.mark()))

    def _measure(self, step: "_Step") -> dict[Part, float]:
        times: dict[Part, float] = {}
        begin = step.begin
        for part, end in step.segments:
            if part is not None:
                times[part] = times.get(part, 0.0) + self._marks.measure_ms(begin, end)
            begin = end
        # The last mark is the first one of the next step. The steps before this one have been measured.
        self._marks.give_back([step.begin, *(mark for _, mark in step.segments[:-1])])
        return times


class _Step(NamedTuple):
    """The first mark of a step, and the marks at which its segments end."""

    begin: Any
    segments: list[tuple[Part | None, Any]]


class LastGradient:
    """Calls a function in each backward after the first ones, when the gradient that came last in these is there.

    The order of gradients follows from the model, so that it is learned once, and later backwards have a single hook.

    Args:
        module: The module that trains.
        act: The function. It must neither wait nor change a gradient.
    """

    def __init__(self, module: nn.Module, act: Callable[[], None]) -> None:
        self._act = act
        self._last: Tensor | None = None
        trained = [each for each in module.parameters() if each.requires_grad]
        self._handles = [_hook(each, self._note) for each in trained]

    def _note(self, parameter: Tensor) -> None:
        self._last = parameter

    def learn(self) -> None:
        """Takes the gradient that came last until now; later calls do nothing."""
        if self._last is not None:
            last, self._last = self._last, None
            self.remove()
            self._handles = [_hook(last, lambda _: self._act())]

    def remove(self) -> None:
        """Removes all hooks."""
        while self._handles:
            self._handles.pop().remove()


def _hook(parameter: Tensor, act: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(act)  # type: ignore[no-untyped-call]
    return handle
