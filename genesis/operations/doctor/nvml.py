"""GPUs and their links, by NVML where `nvidia-ml-py` and a driver are there, else by torch."""

from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, Literal

from genesis.base.device import can_access_peer, count_devices, is_available, read_free_memory, read_properties

try:
    import pynvml
except ImportError:
    pynvml = None

LinkKind = Literal["nvlink", "pcie switch", "pcie host", "numa", "unknown"]

_KIND: Final = "cuda"
_NO_PACKAGE: Final = "nvidia-ml-py is not installed: pip install 'genesis-lm[nvml]'"
# NVML's levels of the nearest common ancestor of two devices.
_SWITCH_LEVEL: Final = 20
_HOST_LEVEL: Final = 40


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Args:
        name: Its name.
        memory_bytes: Its memory.
        free_bytes: What is free of it.
        capability: The compute capability, as (9, 0); None if unknown.
        pcie: The generation and the width of its link to the host, now and at most, as text; empty if unknown.
        processes: The processes that hold its memory: id and bytes, None if the driver does not tell the bytes.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None
    pcie: str = ""
    processes: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class Link:
    """How two GPUs are linked.

    Args:
        one: The number of a GPU.
        other: The number of the other.
        kind: NVLink; one or several PCIe switches; the host's bridge; or the link between sockets.
        has_peer_access: Whether each can read the other's memory; None if unknown.
    """

    one: int
    other: int
    kind: LinkKind
    has_peer_access: bool | None


def read_gpus() -> tuple[str | None, tuple[Gpu, ...], tuple[Link, ...], str]:
    """Returns the driver's version, the GPUs, their links, and why NVML was not asked (empty if it was)."""
    if pynvml is None:
        return (None, *_read_by_torch(), _NO_PACKAGE)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (None, *_read_by_torch(), f"NVML: {error}")
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_read_gpu(handle) for handle in handles)
        links = tuple(
            _read_link(one, other, handles[one], handles[other]) for one, other in combinations(range(len(handles)), 2)
        )
        return str(pynvml.nvmlSystemGetDriverVersion()), gpus, links, ""
    except pynvml.NVMLError as error:
        return (None, *_read_by_torch(), f"NVML: {error}")
    finally:
        pynvml.nvmlShutdown()


def _read_by_torch() -> tuple[tuple[Gpu, ...], tuple[Link, ...]]:
    gpus = []
    for index in range(count_devices(_KIND) if is_available(_KIND) else 0):
        properties, memory = read_properties(_KIND, index), read_free_memory(_KIND, index)
        assert memory is not None
        gpus.append(Gpu(properties.name, memory[1], memory[0], (properties.major, properties.minor)))
    links = [
        Link(one, other, "unknown", can_access_peer(_KIND, one, other))
        for one, other in combinations(range(len(gpus)), 2)
    ]
    return tuple(gpus), tuple(links)


def _read_gpu(handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        pcie=_describe_pcie(handle),
        processes=tuple((int(each.pid), each.usedGpuMemory) for each in processes),
    )


def _describe_pcie(handle: Any) -> str:
    asked = [
        _ask(getattr(pynvml, f"nvmlDeviceGet{when}PcieLink{what}"), handle)
        for when in ("Curr", "Max")
        for what in ("Generation", "Width")
    ]
    if any(value is None for value in asked):
        return ""
    generation, width, max_generation, max_width = asked
    return f"PCIe {generation}.0 x{width} (at most {max_generation}.0 x{max_width})"


def _read_link(one: int, other: int, handle: Any, other_handle: Any) -> Link:
    linked = _ask(pynvml.nvmlDeviceGetP2PStatus, handle, other_handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    peer = _ask(pynvml.nvmlDeviceGetP2PStatus, handle, other_handle, pynvml.NVML_P2P_CAPS_INDEX_READ)
    access = None if peer is None else peer == pynvml.NVML_P2P_STATUS_OK
    if linked == pynvml.NVML_P2P_STATUS_OK:
        return Link(one, other, "nvlink", access)
    level = _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, other_handle)
    return Link(one, other, name_level(level), access)


def name_level(level: int | None) -> LinkKind:
    """Returns the kind of a link without NVLink, by NVML's level of the nearest common ancestor.

    Example:
        >>> name_level(10), name_level(30), name_level(50)
        ('pcie switch', 'pcie host', 'numa')
    """
    if level is None:
        return "unknown"
    return "pcie switch" if level <= _SWITCH_LEVEL else "pcie host" if level <= _HOST_LEVEL else "numa"


def _ask(function: Any, *arguments: Any) -> Any:
    """Returns the answer of NVML; None where this GPU or driver has none."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
