"""Parts of the doctor that measure the machine alone: devices, copies, proofs, products of matrices, the disk."""

import itertools
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from genesis.base.device import (
    CPU,
    can_access_peer,
    count_devices,
    has_bfloat16,
    is_host,
    name_device,
    read_capability,
    read_properties,
    select_device,
    synchronize,
)
from genesis.base.processes import run_program
from genesis.operations.doctor.probe import Probe, SkippedError
from genesis_callbacks.checkpoint.device_proof import DeviceProof, prove_device
from genesis_callbacks.device_peaks import PeakType, read_peak_flops

_COPY_BYTES: Final = 256 << 20
_SMALL_COPY_BYTES: Final = 8 << 20
"""The size of copies on the CPU and on devices whose memory torch does not report."""
_REPEATS: Final = 5
_MATRIX_SIZES: Final = {CPU: 512}
_MATRIX_SIZE: Final = 8192
_QUERY_SECONDS: Final = 20.0
_MAX_REASON: Final = 120
"""Maximum number of characters of an error, because torch lists all of its backends in one line."""
_DISK_BYTES: Final = 256 << 20


def inspect_devices(probe: Probe) -> None:
    """Lists the devices, and compares a computation on each with its known result."""
    kind = probe.task.kind
    probe.figure("torch", torch.__version__)
    for name in ("cuda", "hip", "xpu"):
        if getattr(torch.version, name, None):
            probe.figure(f"torch was built for {name}", str(getattr(torch.version, name)))
    probe.figure("devices", count_devices(kind))
    driver = read_driver()
    if not is_host(kind) and driver is not None:
        probe.figure("driver", driver)
    for index in range(count_devices(kind)):
        label = f"{kind} {index}"
        name = name_device(kind, index)
        probe.figure(label, name)
        properties = read_properties(kind, index)
        if hasattr(properties, "total_memory"):
            probe.figure(f"{label}: memory", properties.total_memory / 2**30, "GiB")
        device = torch.device(kind, index)
        capability = None if is_host(kind) else read_capability(device)
        if capability is not None:
            probe.figure(f"{label}: compute capability", ".".join(map(str, capability)))
        if not is_host(kind):
            probe.figure(f"{label}: bfloat16", "yes" if has_bfloat16(kind) else "no")
            peak = read_peak_flops(name, "bfloat16")
            probe.figure(
                f"{label}: dense peak in bfloat16",
                "not known" if peak is None else peak / 1e12,
                "" if peak is None else "TFLOP/s",
            )
        numbers = torch.arange(1000, device=device)
        probe.check(f"{label} computes", int((numbers * numbers).sum()) == 332_833_500)
    if kind == CPU:
        probe.figure("cores", len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        probe.figure("memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, "GiB")


def read_driver() -> str | None:
    """Returns the version of NVIDIA's or AMD's driver; None if it cannot be found."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found = run_program(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return next(iter(found.stdout.split()), None)
    amd = Path("/sys/module/amdgpu/version")
    return amd.read_text(encoding="utf-8").strip() if amd.exists() else None


# ---- copies


def measure_copies(probe: Probe) -> None:
    """Measures bandwidths between the host and each device, and between devices."""
    kind = probe.task.kind
    if is_host(kind):
        source = torch.ones(_SMALL_COPY_BYTES, dtype=torch.uint8)
        target = torch.empty_like(source)
        probe.figure("copy within memory", _time_copy(kind, source, target), "GB/s")
        return
    num_bytes = _COPY_BYTES if read_properties(kind) is not None else _SMALL_COPY_BYTES
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    pinned = _pin(probe, pageable)
    for index in range(count_devices(kind)):
        select_device(kind, index)  # `synchronize` waits for the current device
        there = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device(kind, index))
        for label, host in (("pinned", pinned), ("pageable", pageable)):
            if host is None:
                continue
            probe.figure(f"host to {kind} {index}, {label}", _time_copy(kind, host, there), "GB/s")
            host.zero_()
            probe.figure(f"{kind} {index} to host, {label}", _time_copy(kind, there, host), "GB/s")
            probe.check(f"bytes come back from {kind} {index}, {label}", bool((host == 1).all()))
        probe.figure(f"copy within {kind} {index}", _time_copy(kind, there, torch.empty_like(there)), "GB/s")
    _measure_peers(probe, num_bytes)


def _pin(probe: Probe, pageable: Tensor) -> Tensor | None:
    try:
        return pageable.pin_memory()
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:_MAX_REASON]
        probe.note(f"torch does not pin memory here ({reason}): copies are pageable and slower")
        return None


def _time_copy(kind: str, source: Tensor, target: Tensor) -> float:
    """Returns the speed in 10^9 bytes per second: the median of some copies after a first copy that is not counted."""
    rates = []
    for _ in range(_REPEATS + 1):
        synchronize(kind)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(kind)
        rates.append(source.numel() / max(time.perf_counter() - begin, 1e-9) / 1e9)
    return statistics.median(rates[1:])


def _measure_peers(probe: Probe, num_bytes: int) -> None:
    kind = probe.task.kind
    pairs = list(itertools.permutations(range(count_devices(kind)), 2))
    without = []
    for source, target in pairs:
        select_device(kind, source)  # the stream of this device makes the copy
        there = torch.ones(num_bytes, dtype=torch.uint8, device=torch.device(kind, source))
        copy = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device(kind, target))
        probe.figure(f"{kind} {source} to {kind} {target}", _time_copy(kind, there, copy), "GB/s")
        if can_access_peer(kind, source, target) is False:
            without.append((source, target))
    if pairs:
        probe.figure("pairs of devices with peer access", f"{len(pairs) - len(without)} of {len(pairs)}")
    if without:
        probe.note(
            "devices without peer access exchange gradients through the host: prefer the strategy replicated with "
            "optimizer_states: sharded, if the parameters fit, or keep parameters gathered between micro-batches"
        )


# ---- what a fit proves at its start


def run_proofs(probe: Probe, others: tuple[DeviceProof, ...]) -> None:
    """Runs the proofs from the start of a fit, and measures the time of each."""
    kind = probe.task.kind
    if is_host(kind):
        for proof in others:
            _time_proof(probe, proof, torch.device(kind))
        probe.note("digests and copies are proved on accelerators alone")
        return
    device = torch.device(kind, 0)
    begin = time.perf_counter()
    report = prove_device(device)
    probe.figure("proofs of digests and copies", time.perf_counter() - begin, "s")
    for key, value in report.environment.items():
        if key.startswith("device."):
            probe.figure(key.removeprefix("device."), value)
    probe.check(
        "digests on the device are those of the CPU", report.path.has_digests, _find(report.failures, "digests")
    )
    is_wrong = "copies" in report.wrong
    if report.path.has_pinning or is_wrong:
        probe.check("pinned copies return the same bytes", not is_wrong, _find(report.failures, "copies"))
    else:
        probe.note(f"saves copy to pageable memory: {_find(report.failures, 'copies')}")
    for proof in others:
        _time_proof(probe, proof, device)


def _find(failures: tuple[str, ...], name: str) -> str:
    return next((failure for failure in failures if f"proof of {name}" in failure), "")


def _time_proof(probe: Probe, proof: DeviceProof, device: torch.device) -> None:
    begin = time.perf_counter()
    try:
        proof.prove(device)
        failure = ""
    except Exception as error:  # at the start of a fit, any error makes training use the slow path
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:_MAX_REASON]}"
    probe.figure(f"proof of {proof.name}", time.perf_counter() - begin, "s")
    probe.figure(proof.name, proof.slow if failure else proof.fast)
    if failure:
        probe.note(f"{proof.slow} instead of {proof.fast}: {failure}")


# ---- products of matrices

_PRODUCTS: tuple[tuple[str, torch.dtype, PeakType, str], ...] = (
    ("bfloat16", torch.bfloat16, "bfloat16", "highest"),
    ("float16", torch.float16, "float16", "highest"),
    ("float32 as TF32", torch.float32, "tfloat32", "high"),
    ("float32", torch.float32, "float32", "highest"),
)


def measure_products(probe: Probe) -> None:
    """Measures the speed of products of large matrices, and compares it with the published peak."""
    kind = probe.task.kind
    size = _MATRIX_SIZE if read_properties(kind) is not None else _MATRIX_SIZES[CPU]
    name = name_device(kind)
    for label, dtype, peak_type, precision in _PRODUCTS:
        if is_host(kind) and (dtype == torch.float16 or precision == "high"):
            continue
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(size, size, device=kind).to(dtype) for _ in range(2))
        flops = _time_work(kind, partial(torch.mm, a, b)) * 2 * size**3
        probe.figure(f"products in {label}", flops / 1e12, "TFLOP/s")
        peak = None if is_host(kind) else read_peak_flops(name, peak_type)
        if peak is not None:
            probe.figure(f"share of the peak in {label}", flops / peak)
    left, right = (torch.randn(64, 64, generator=torch.Generator().manual_seed(number)) for number in range(2))
    torch.set_float32_matmul_precision("highest")
    found = (left.to(kind) @ right.to(kind)).cpu()
    error = float((found - left @ right).abs().max())
    probe.check("a product is that of the CPU", error < 1e-3, f"largest difference {error:.2g}")


def _time_work(kind: str, work: Callable[[], object], seconds: float = 0.5) -> float:
    """Returns how many times per second the device does `work`."""
    work()
    synchronize(kind)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(4):
            work()
        synchronize(kind)
        count += 4
    return count / (time.perf_counter() - begin)


# ---- the disk of the checkpoints


def measure_disk(probe: Probe) -> None:
    """Writes a file in the same way as a save, flushed to disk at the end, and reads it again."""
    directory = Path(probe.task.directory)
    free = shutil.disk_usage(directory).free
    probe.figure("free", free / 2**30, "GiB")
    if free < 2 * _DISK_BYTES:
        raise SkippedError(f"{free / 2**20:.0f} MiB are free, and the test writes {_DISK_BYTES >> 20} MiB")
    path, block = directory / "disk-test", os.urandom(1 << 20)
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(_DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    probe.figure("write, with fsync", _DISK_BYTES / (time.perf_counter() - begin) / 1e9, "GB/s")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, num_bytes = time.perf_counter(), 0
        while data := file.read(len(block)):
            num_bytes += len(data)
        probe.figure("read", num_bytes / (time.perf_counter() - begin) / 1e9, "GB/s")
    path.unlink()
    probe.check("the file was whole", num_bytes == _DISK_BYTES)
