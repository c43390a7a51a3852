"""Accelerators, as the application uses them: the only module of `genesis` that asks torch for a kind of device.

Every kind takes the same path, through the module that torch names for it (`torch.cuda`, which is ROCm's, too;
`torch.xpu`; that of a backend in another package). A function that such a module lacks has an answer here. The engine
of the checkpoints has streams, events and pinned memory of its own in `genesis_callbacks.checkpoint.device`.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from genesis.base.errors import UserError

CPU: Final = "cpu"
_COMPILED: Final = (CPU, "cuda", "xpu")
"""Kinds for which torch.compile generates code."""
_MISSING_COMPILER: Final = (
    "InvalidCxxCompiler",
    "Failed to find C compiler",
    "No working C++ compiler",
    "TritonMissing",
)


class PeakMemory(NamedTuple):
    """The peak bytes of a process on a device: those of tensors, and those that the allocator reserved."""

    allocated_bytes: int
    reserved_bytes: int


def is_host(kind: str) -> bool:
    """Returns whether tensors of this kind of device lie in the host's memory, or have no memory."""
    return kind in (CPU, "meta")


def is_available(kind: str) -> bool:
    """Returns whether this process can use a device of this kind: `cpu`, `cuda`, `xpu` ..."""
    if kind == CPU:
        return True
    module = _find_module(kind)
    return module is not None and bool(module.is_available())


def check_available(kind: str) -> None:
    """Refuses a kind of device that this process cannot use.

    Raises:
        UserError: Torch finds no such device, or knows no such kind.
    """
    if is_available(kind):
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    others = f"cpu or {found.type}" if found is not None else "cpu"
    label = "CUDA" if kind == "cuda" else kind
    raise UserError(
        f"no {label} device was found; remove --device {kind}, or give --device {others} (torch {torch.__version__})"
    )


def find_kind() -> str:
    """Returns the kind of accelerator that torch finds, or `cpu`."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return CPU if found is None else found.type


def count_devices(kind: str) -> int:
    """Returns how many devices of a kind this process can use; 1 for the CPU."""
    module = _find_module(kind)
    return 1 if module is None else int(module.device_count())


def name_device(kind: str, index: int = 0) -> str:
    """Returns the name that the driver gives to a device; for the CPU and where there is no name, the kind."""
    read = getattr(_find_module(kind), "get_device_name", None)
    return kind if read is None else str(read(index))


def has_bfloat16(kind: str) -> bool:
    """Returns whether devices of a kind multiply bfloat16 themselves. Torch can emulate it, slower than float32."""
    read = getattr(_find_module(kind), "is_bf16_supported", None)
    return kind != CPU and read is not None and bool(read(including_emulation=False))


def has_bfloat16_products(device: torch.device) -> bool:
    """Returns whether a device multiplies bfloat16 matrices at least as fast as float32 ones.

    On x86, oneDNN has such products with AVX-512 only. Without it, torch's own take twenty times as long as float32's.
    """
    return device.type != CPU or torch.backends.cpu.get_cpu_capability() != "AVX2"


def read_capability(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of a CUDA device (on ROCm, major and minor of its architecture); else None."""
    if _measurements:
        return _MEASURED_CAPABILITY if kind_of(device) == "cuda" else None
    read = getattr(_find_module(device.type), "get_device_capability", None)
    found = None if read is None else read(device)
    return found if isinstance(found, tuple) else None


def has_float8(device: torch.device) -> bool:
    """Returns whether a device multiplies float8 matrices: CUDA from capability 8.9 on, ROCm from gfx94 (MI300) on."""
    least = (8, 9) if torch.version.hip is None else (9, 4)
    found = read_capability(device)
    return device.type == "cuda" and found is not None and found >= least


def leave_memory_unfilled() -> None:
    """Keeps torch's deterministic mode from filling each tensor that it allocates, a kernel each, in this process.

    Only a computation that reads memory before it writes there would need that.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch's module


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host on a device, without a wait for what the device has yet to do where that is safe.

    CUDA takes a copy of pageable memory before the call returns, so that the host may change or free the tensor. Of
    other kinds this is not known, and the host waits.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def find_missing_compiler(kind: str) -> str | None:
    """Returns why torch.compile cannot generate code for a kind of device on this machine, in a line; None if it can.

    It compiles a small function, which takes seconds the first time.
    """
    if kind not in _COMPILED:
        return f"torch.compile has no code generator for {kind}"
    try:
        torch.compile(lambda x: x + 1.0)(torch.zeros(2, device=kind))
    except Exception as error:
        text = f"{type(error).__name__} {error}"
        if not any(words in text for words in _MISSING_COMPILER):
            raise
        return f"torch.compile finds no compiler: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return None


def select_device(kind: str, index: int) -> None:
    """Makes a device this process's current one; nothing on the CPU."""
    select = getattr(_find_module(kind), "set_device", None)
    if select is not None:
        select(index)


def synchronize(kind: str) -> None:
    """Waits until the current device has done everything; returns at once on the CPU."""
    if not is_host(kind):
        torch.accelerator.synchronize()


def read_peak_memory(kind: str, index: int | None = None) -> PeakMemory | None:
    """Returns the peak of this process's memory on a device, None where torch does not count it. It does not wait."""
    module = _find_module(kind)
    if not hasattr(module, "max_memory_allocated"):
        return None
    assert module is not None
    return PeakMemory(int(module.max_memory_allocated(index)), int(module.max_memory_reserved(index)))


def counts_memory(kind: str) -> bool:
    """Returns whether torch counts the memory of a kind of device; it sets no device up."""
    return is_available(kind) and hasattr(_find_module(kind), "max_memory_allocated")


def reset_peak_memory(kind: str) -> None:
    """Begins to look for the peak again."""
    module = _find_module(kind)
    if not hasattr(module, "reset_peak_memory_stats"):
        return
    assert module is not None
    if hasattr(module, "init"):  # before that torch has no allocator whose peak it could reset
        module.init()
    module.reset_peak_memory_stats()


def limit_memory(kind: str, num_bytes: int) -> bool:
    """Makes the current device refuse more memory than that, and returns whether torch can do that for the kind."""
    limit = getattr(_find_module(kind), "set_per_process_memory_fraction", None)
    properties = read_properties(kind)
    if limit is None or properties is None:
        return False
    limit(min(1.0, num_bytes / properties.total_memory))
    return True


def record_timer(device: torch.device) -> torch.Event:
    """Returns an event at the current position of the device's stream, from which time to another can be measured."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


@contextlib.contextmanager
def warning_of_waits(kind: str) -> Iterator[bool]:
    """Makes each wait of the host for the device a warning, and yields whether torch can do that for this kind."""
    set_mode = getattr(_find_module(kind), "set_sync_debug_mode", None)
    if set_mode is None:
        yield False
        return

    def set_silently(mode: str) -> None:
        # torch warns at the first call of a process that the mode is a prototype, which is no wait.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            set_mode(mode)

    set_silently("warn")
    try:
        yield True
    finally:
        set_silently("default")


def can_access_peer(kind: str, index: int, peer: int) -> bool | None:
    """Returns whether a device copies from another without the host between; None where torch does not know."""
    read = getattr(_find_module(kind), "can_device_access_peer", None)
    return None if read is None else bool(read(index, peer))


def read_properties(kind: str, index: int = 0) -> Any:
    """Returns torch's properties of a device; None where it has none, or this process cannot use the device."""
    if not is_available(kind):
        return None
    read = getattr(_find_module(kind), "get_device_properties", None)
    return None if read is None else read(index)


def read_free_memory(kind: str, index: int = 0) -> tuple[int, int] | None:
    """Returns the free and the total bytes of a device, of all processes; None where torch does not know them."""
    read = getattr(_find_module(kind), "mem_get_info", None)
    if read is None or not is_available(kind):
        return None
    free, total = read(index)
    return int(free), int(total)


def name_collectives(kind: str) -> str:
    """Returns the backend of torch.distributed for tensors of a kind of device: gloo, nccl, xccl ...; or `none`."""
    try:
        return str(torch.distributed.get_default_backend_for_device(kind))
    except (ValueError, RuntimeError):  # without a backend; or a kind that torch does not know
        return "none"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device or the host had no memory left; for a CPU only the message of torch names it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _find_module(kind: str) -> Any | None:
    """Returns torch's module for a kind of device; None for the CPU and for a kind that this torch does not know."""
    if is_host(kind):
        return None
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


# ---- measuring for a device that is not here


class Measurement(NamedTuple):
    """A kind of device that host tensors without memory stand for, while `genesis plan` runs the model on them."""

    kind: str
    run_kernel: Callable[..., Any]
    """Calls a function as one kernel: only its results take memory."""


_measurements: list[Measurement] = []
_MEASURED_CAPABILITY: Final = (9, 0)


@contextlib.contextmanager
def measured_as(measurement: Measurement) -> Iterator[None]:
    """Makes `kind_of` and `find_measured_kernel` answer for a measurement."""
    _measurements.append(measurement)
    try:
        yield
    finally:
        _measurements.pop()


def kind_of(device: torch.device) -> str:
    """Returns the kind of a device, or the one that it stands for in a measurement.

    Code whose allocations differ between kinds asks this, so that a plan has those of the real device.
    """
    return _measurements[-1].kind if _measurements else device.type


def find_measured_kernel() -> Callable[..., Any] | None:
    """Returns what runs a function as one kernel in a measurement, where nothing is compiled; None outside of one."""
    return _measurements[-1].run_kernel if _measurements else None
