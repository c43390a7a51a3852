"""What a machine is, as values: `advice.py` judges them, and tests keep those of other machines."""

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from genesis.operations.doctor.nvml import Gpu, Link, read_gpus
from genesis_callbacks.base.files import sync_directory

SETTINGS: Final = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_P2P_DISABLE",
    "FLA_USE_TMA",
    "OMP_NUM_THREADS",
    "MASTER_PORT",
)
_DEFAULT_PORT: Final = 29500
_WRITTEN_BYTES: Final = 64 << 20
_SPARED_BYTES: Final = 1 << 30
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Disk:
    """The disk of the checkpoints.

    Args:
        free_bytes: What is free for this user.
        total_bytes: Its size.
        write_bytes_per_second: The speed of a file of some megabytes, until it is on the disk; None if not measured.
    """

    free_bytes: int
    total_bytes: int
    write_bytes_per_second: float | None = None


@dataclass(frozen=True)
class PlannedSaves:
    """The checkpoints that a recipe plans.

    Args:
        num_bytes: The bytes of one.
        num_kept: How many stay at the same time, at most, with the one that is being written; None if it is not known.
        disk_bytes: The bytes of these, and of a frozen base; None if that is not known.
    """

    num_bytes: int
    num_kept: int | None
    disk_bytes: int | None = None


@dataclass(frozen=True)
class MachineFacts:
    """A machine.

    Args:
        python: Python's version.
        packages: Versions of packages by name.
        build: What torch was built for: `cpu`, `cuda 12.8`, `rocm 6.4`.
        driver: The driver's version; None without a driver, or if it cannot be asked.
        nvml_fault: Why NVML could not be asked; empty if it was.
        gpus: The GPUs.
        links: How pairs of GPUs are linked.
        has_fla: Whether flash-linear-attention is installed.
        num_cores: The cores of the machine.
        num_usable_cores: Those that this process may use, by its affinity and the limit of its control group.
        memory_bytes: The memory of the machine.
        available_bytes: What new work may take of it.
        memory_limit_bytes: The limit of the control group; None without a limit.
        shared_bytes: The size of /dev/shm; None if there is none.
        max_open_files: The soft limit of open files.
        disk: The disk of the checkpoints; None if it was not looked at.
        port: The port at which ranks of one node meet.
        is_port_free: Whether it is free.
        settings: The environment variables among `SETTINGS` that are set.
    """

    python: str
    packages: Mapping[str, str]
    build: str
    num_cores: int
    num_usable_cores: float
    memory_bytes: int
    available_bytes: int
    max_open_files: int
    driver: str | None = None
    nvml_fault: str = ""
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    has_fla: bool = False
    memory_limit_bytes: int | None = None
    shared_bytes: int | None = None
    disk: Disk | None = None
    port: int = _DEFAULT_PORT
    is_port_free: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)


def read_facts(directory: Path) -> MachineFacts:
    """Returns the facts of this machine; writes and removes one file in `directory`, the disk of the checkpoints."""
    driver, gpus, links, fault = read_gpus()
    port = _read_port()
    return MachineFacts(
        python=platform.python_version(),
        packages={name: found for name in ("torch", "lightning", "genesis-lm") if (found := _find_version(name))},
        build=name_build(),
        driver=driver,
        nvml_fault=fault,
        gpus=gpus,
        links=links,
        has_fla=find_spec("fla") is not None,
        num_cores=os.cpu_count() or 1,
        num_usable_cores=count_usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=read_available_bytes(),
        memory_limit_bytes=_read_limit("memory.max", "memory/memory.limit_in_bytes"),
        shared_bytes=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disk=measure_disk(directory),
        port=port,
        is_port_free=_is_free(port),
        settings={name: os.environ[name] for name in SETTINGS if name in os.environ},
    )


def name_build() -> str:
    """Returns what torch was built for."""
    for name, label in (("cuda", "cuda"), ("hip", "rocm"), ("xpu", "xpu")):
        if getattr(torch.version, name, None):
            return f"{label} {getattr(torch.version, name)}"
    return "cpu"


def count_usable_cores() -> float:
    """Returns the cores that this process may use: its affinity, and the share of its control group."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _read_cores_limit()
    return float(own) if limit is None else min(float(own), limit)


def _read_cores_limit() -> float | None:
    path = _CGROUP / "cpu.max"
    if not path.is_file():
        return None
    quota, _, period = path.read_text(encoding="ascii").partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _read_limit(*names: str) -> int | None:
    """Returns the first limit in bytes among files of the control group, below what the kernel calls unlimited."""
    for name in names:
        path = _CGROUP / name
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def measure_disk(directory: Path) -> Disk:
    """Returns the space and the speed of the disk of a directory; on a nearly full disk nothing is written.

    Raises:
        OSError: The disk does not take the file.
    """
    usage = shutil.disk_usage(directory)
    if usage.free < _SPARED_BYTES:
        return Disk(usage.free, usage.total)
    content = os.urandom(1 << 20)
    path = directory / f".genesis-doctor-{os.getpid()}"
    try:
        begin = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(_WRITTEN_BYTES // len(content)):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)
        seconds = time.perf_counter() - begin
    finally:
        path.unlink(missing_ok=True)
    return Disk(usage.free, usage.total, _WRITTEN_BYTES / seconds)


def _read_port() -> int:
    text = os.environ.get("MASTER_PORT", "")
    return int(text) if text.isdecimal() else _DEFAULT_PORT


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_available_bytes() -> int:
    """Returns the memory that new work may take without swapping."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
