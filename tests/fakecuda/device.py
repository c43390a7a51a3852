"""What torch.cuda answers in a process with the shim: one device with bf16, whose streams and events do nothing.

Import it before torch: it loads the shim that GENESIS_FAKE_CUDA names.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

ctypes.CDLL(os.environ["GENESIS_FAKE_CUDA"])

import torch  # noqa: E402  # after the shim
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

T = TypeVar("T")

CAPABILITY = (9, 0)


class FakeStream:
    """A stream on which everything has ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> "FakeEvent":
        return event or FakeEvent()

    def __enter__(self) -> "FakeStream":
        STREAMS_ENTERED.append(self)
        return self

    def __exit__(self, *raised: object) -> None: ...


FREE_BYTES: list[int] = [0]
"""The free memory of the device, which a case sets."""

STREAMS_ENTERED: list[FakeStream] = []
"""Streams that were made current, with `with` or `torch.cuda.stream`."""


class FakeEvent:
    """An event that is over."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class FakeRuntime:
    """Pins what it is given."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        return 0


def outside(function: Callable[..., T]) -> Callable[..., T]:
    """Returns `function`, run on real tensors: outside of the fake mode and of what watches."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> T:
        with _disable_current_modes():
            return function(*arguments, **options)

    return run


def _apply_to_fakes(self: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`, whose way to change a parameter in place fake tensors do not have."""
    for child in self.children() if recurse else ():
        child._apply(function)
    for name, parameter in list(self._parameters.items()):
        if parameter is not None:
            new = torch.nn.Parameter(function(parameter.detach()), requires_grad=parameter.requires_grad)
            self._parameters[name] = new
    for name, buffer in list(self._buffers.items()):
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


def pretend() -> None:
    """Puts the fake device in the place of torch.cuda, for the rest of this process."""
    cuda: Any = torch.cuda
    current = FakeStream()
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "get_device_capability": CAPABILITY,
        "get_device_name": "Fake",
        "device_count": 1,
        "current_device": 0,
        "current_stream": current,
        "default_stream": current,
        "set_device": None,
        "set_stream": None,
        "synchronize": None,
        "empty_cache": None,
        "memory_stats": {},
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "set_sync_debug_mode": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "set_rng_state": None,
        "set_rng_state_all": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, functools.partial(_answer, answer))
    cuda.get_rng_state = outside(lambda device=None: torch.get_rng_state())
    cuda.get_rng_state_all = outside(lambda: [torch.get_rng_state()])
    cuda.Stream, cuda.Event = FakeStream, FakeEvent
    anywhere: Any = torch
    anywhere.Event = FakeEvent
    cuda.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    cuda.device = lambda device: contextlib.nullcontext()
    torch.Event = FakeEvent  # type: ignore[misc, assignment]
    torch.Stream = FakeStream  # type: ignore[misc, assignment]
    cuda.cudart = FakeRuntime
    accelerator: Any = torch.accelerator
    accelerator.synchronize = functools.partial(_answer, None)
    accelerator.current_stream = functools.partial(_answer, current)
    accelerator.get_memory_info = lambda device=None: (FREE_BYTES[0], FREE_BYTES[0])
    accelerator.device_index = lambda index: contextlib.nullcontext()
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(accelerator, name, functools.partial(_answer, 0))
    torch.nn.Module._apply = _apply_to_fakes  # type: ignore[method-assign]


def _answer(answer: Any, *arguments: Any, **options: Any) -> Any:
    return answer
