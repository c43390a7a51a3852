"""Facts of a machine -> checks and advice. Pure: each setting comes with the reason why this machine wants it."""

from typing import Final

from genesis.base.errors import numbered
from genesis.operations.doctor.checks import Check, judge
from genesis.operations.doctor.facts import MachineFacts, PlannedSaves

_GIB: Final = 2**30
_EXPANDABLE: Final = "expandable_segments:True"
_BLACKWELL: Final = 10
"""The first major compute capability of Blackwell: 10.x on servers, 12.x on desktops."""
_MIN_SHARED_BYTES: Final = 1 << 30
_TINY_SHARED_BYTES: Final = 256 << 20
_MIN_OPEN_FILES: Final = 1024
_HELD_BYTES: Final = 256 << 20
_LIMITED_SHARE: Final = 0.9
_SPARED_DISK: Final = 0.05


def examine_machine(facts: MachineFacts, saves: PlannedSaves | None = None) -> list[Check]:
    """Returns the checks of a machine, in the order of the table.

    Args:
        facts: The machine.
        saves: The checkpoints that a recipe plans; None without a recipe.
    """
    return [
        _check_software(facts),
        _check_gpus(facts),
        _check_held_memory(facts),
        _check_links(facts),
        _advise_allocator(facts),
        _advise_peers(facts),
        _advise_tma(facts),
        _check_cores(facts),
        _check_memory(facts),
        _check_shared_memory(facts),
        _check_open_files(facts),
        _check_disk(facts, saves),
        _check_port(facts),
    ]


def _check_software(facts: MachineFacts) -> Check:
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    driver = f", driver {facts.driver}" if facts.driver else ""
    found = f"Python {facts.python}, {packages}; torch is built for {facts.build}{driver}"
    if facts.gpus and facts.build == "cpu":
        return Check(
            "software",
            "failed",
            found,
            "there are GPUs, and this torch cannot use them: install the build for CUDA (see pytorch.org)",
        )
    return Check("software", "passed", found)


def _check_gpus(facts: MachineFacts) -> Check:
    if not facts.gpus:
        reason = f" ({facts.nvml_fault})" if facts.nvml_fault else ""
        return Check("GPUs", "does not apply", f"no GPU was found: training runs on the CPU{reason}")
    found = "; ".join(
        f"{index}: {gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB"
        + (f", capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else "")
        + (f", {gpu.pcie}" if gpu.pcie else "")
        for index, gpu in enumerate(facts.gpus)
    )
    if len({(gpu.name, gpu.memory_bytes) for gpu in facts.gpus}) > 1:
        return Check(
            "GPUs",
            "warning",
            found,
            "the GPUs differ: each step takes as long as the slowest needs, and the smallest memory bounds the batch; "
            "choose equal ones by CUDA_VISIBLE_DEVICES",
        )
    if facts.nvml_fault:
        found += f"; links and processes are unknown: {facts.nvml_fault}"
    return Check("GPUs", "passed", found)


def _check_held_memory(facts: MachineFacts) -> Check:
    if not facts.gpus:
        return Check("GPU memory", "does not apply", "no GPU was found")
    holders = [
        f"process {pid} holds {'memory' if size is None else f'{size / _GIB:.1f} GiB'} of GPU {index}"
        for index, gpu in enumerate(facts.gpus)
        for pid, size in gpu.processes
        if size is None or size >= _HELD_BYTES
    ]
    if holders:
        remedy = "end what is left of an earlier run (kill PID), or choose other GPUs by CUDA_VISIBLE_DEVICES"
        return Check("GPU memory", "warning", "; ".join(holders), remedy)
    free = min(gpu.free_bytes for gpu in facts.gpus)
    return Check("GPU memory", "passed", f"at least {free / _GIB:.1f} GiB are free on each GPU")


def _check_links(facts: MachineFacts) -> Check:
    if len(facts.gpus) < 2:
        return Check("links", "does not apply", "links matter between two GPUs or more")
    kinds = sorted({link.kind for link in facts.links})
    without = [link for link in facts.links if link.has_peer_access is False]
    found = (
        f"{numbered(len(facts.links), 'pairs')} of GPUs: {', '.join(kinds)}; without peer access: "
        f"{numbered(len(without), 'pairs')}"
    )
    if kinds == ["nvlink"]:
        return Check("links", "passed", found)
    return Check(
        "links",
        "warning",
        found,
        "without NVLink between all GPUs, sharding gathers parameters over PCIe: prefer `replicated` with "
        "optimizer_states: sharded where the model fits, or keep_gathered, and few, large micro-batches",
    )


# ---- settings


def _advise_allocator(facts: MachineFacts) -> Check:
    name = "PYTORCH_ALLOC_CONF"
    if not facts.gpus:
        return Check(name, "does not apply", "no GPU was found")
    old, now = facts.settings.get("PYTORCH_CUDA_ALLOC_CONF"), facts.settings.get(name)
    if now is not None and _EXPANDABLE in now:
        return Check(name, "passed", f"is {now}")
    if now is None and old is not None and _EXPANDABLE in old:
        return Check(name, "passed", f"is set by its older name PYTORCH_CUDA_ALLOC_CONF: {old}")
    return Check(
        name,
        "warning",
        "is not set" if now is None else f"is {now}",
        f"export {name}={_EXPANDABLE}: batches of different documents ask for blocks of different sizes, and without "
        "it gigabytes of free memory may be in pieces that no request fits",
    )


def _advise_peers(facts: MachineFacts) -> Check:
    name = "NCCL_P2P_DISABLE"
    if len(facts.gpus) < 2:
        return Check(name, "does not apply", "matters between two GPUs or more")
    value = facts.settings.get(name)
    is_disabled = value not in (None, "", "0")
    has_nvlink = any(link.kind == "nvlink" for link in facts.links)
    without = any(link.has_peer_access is False for link in facts.links)
    if without and not has_nvlink:
        found = f"is {'not set' if value is None else value}, and pairs of GPUs have no peer access"
        return judge_setting(
            name,
            is_disabled,
            found,
            "export NCCL_P2P_DISABLE=1: these GPUs cannot read each other's memory, and drivers that claim it make "
            "NCCL hang at the first collective; copies then go through /dev/shm",
        )
    reach = "have NVLink" if has_nvlink else "reach each other's memory"
    return judge_setting(
        name,
        not is_disabled,
        f"is {'not set' if value is None else value}, and pairs of GPUs {reach}",
        "unset NCCL_P2P_DISABLE: it sends through the host what the link between the GPUs carries many times as fast",
    )


def _advise_tma(facts: MachineFacts) -> Check:
    name = "FLA_USE_TMA"
    is_blackwell = any(gpu.capability is not None and gpu.capability[0] >= _BLACKWELL for gpu in facts.gpus)
    if not is_blackwell or not facts.has_fla:
        return Check(name, "does not apply", "matters on Blackwell with flash-linear-attention")
    value = facts.settings.get(name)
    return judge_setting(
        name,
        value == "0",
        f"is {'not set' if value is None else value} on Blackwell",
        "export FLA_USE_TMA=0: kernels of flash-linear-attention that use the tensor memory accelerator fail there",
    )


def judge_setting(name: str, is_right: bool, found: str, remedy: str) -> Check:
    """Returns a check that passed, or a warning: the machine trains without the setting, worse."""
    return Check(name, "passed", found) if is_right else Check(name, "warning", found, remedy)


# ---- host


def _check_cores(facts: MachineFacts) -> Check:
    found = f"{facts.num_usable_cores:g} of {numbered(facts.num_cores, 'cores')} are usable"
    threads = facts.settings.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > facts.num_usable_cores:
        return Check(
            "cores",
            "warning",
            f"{found}, and OMP_NUM_THREADS is {threads}",
            f"export OMP_NUM_THREADS={max(1, int(facts.num_usable_cores))}: threads beyond the cores wait for others",
        )
    if facts.gpus and facts.num_usable_cores < 2 * len(facts.gpus):
        return Check(
            "cores",
            "warning",
            f"{found}, for {len(facts.gpus)} GPUs",
            "each rank needs a core for itself and about one for its data and saves: rent more cores, or lower "
            "data.prefetch_windows and save less often",
        )
    return Check("cores", "passed", found)


def _check_memory(facts: MachineFacts) -> Check:
    found = f"{facts.available_bytes / _GIB:.1f} of {facts.memory_bytes / _GIB:.1f} GiB are available"
    limit = facts.memory_limit_bytes
    if limit is not None and limit < _LIMITED_SHARE * facts.memory_bytes:
        found += f"; the control group's limit is {limit / _GIB:.1f} GiB"
        if limit < sum(gpu.memory_bytes for gpu in facts.gpus) // 2:
            remedy = "the kernel kills what exceeds it, and saves stage their state there: raise the container's limit"
            return Check("memory", "warning", found, remedy)
    return Check("memory", "passed", found)


def _check_shared_memory(facts: MachineFacts) -> Check:
    size = facts.shared_bytes
    if size is None:
        return Check("shared memory", "does not apply", "there is no /dev/shm")
    found = f"/dev/shm has {size / _GIB:.2f} GiB"
    remedy = "start the container with --shm-size=8g (or --ipc=host): NCCL exchanges data between ranks there"
    if size < _TINY_SHARED_BYTES and len(facts.gpus) > 1:
        return Check("shared memory", "failed", found, remedy)
    if size < _MIN_SHARED_BYTES:
        return Check("shared memory", "warning", found, remedy)
    return Check("shared memory", "passed", found)


def _check_open_files(facts: MachineFacts) -> Check:
    found = f"a process may open {numbered(facts.max_open_files, 'files')}"
    if 0 <= facts.max_open_files < _MIN_OPEN_FILES:
        remedy = "ulimit -n 65536: shards of a corpus, sockets of ranks and checkpoints are open at the same time"
        return Check("open files", "warning", found, remedy)
    return Check(
        "open files", "passed", found if facts.max_open_files > 0 else "a process may open any number of files"
    )


def _check_disk(facts: MachineFacts, saves: PlannedSaves | None) -> Check:
    disk = facts.disk
    if disk is None:
        return Check("disk", "does not apply", "no disk was named")
    found = f"{disk.free_bytes / _GIB:.1f} of {disk.total_bytes / _GIB:.1f} GiB are free"
    if disk.write_bytes_per_second is not None:
        found += f", written at {disk.write_bytes_per_second / 1e6:,.0f} MB/s"
    if saves is None:
        if disk.free_bytes < _SPARED_DISK * disk.total_bytes:
            return Check("disk", "warning", found, "the disk is nearly full: remove files, or name another run_dir")
        return Check("disk", "passed", found)
    needed = saves.disk_bytes or saves.num_bytes * (saves.num_kept or 2)
    kept = "all checkpoints of a run without an end stay" if saves.num_kept is None else f"{saves.num_kept} at a time"
    found += f"; planned are checkpoints of {_describe_size(saves.num_bytes)}, {kept}, {_describe_size(needed)} in all"
    if disk.write_bytes_per_second:
        found += f", each written in {saves.num_bytes / disk.write_bytes_per_second:.1f} s"
    return judge(
        "disk",
        disk.free_bytes > needed,
        found,
        f"{_describe_size(needed)} are needed: lower checkpoint.keep_last, or give a run_dir on a larger disk",
    )


def _describe_size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"


def _check_port(facts: MachineFacts) -> Check:
    if facts.is_port_free:
        return Check("port", "passed", f"port {facts.port}, at which ranks meet, is free")
    return Check(
        "port",
        "warning",
        f"port {facts.port}, at which ranks meet, is in use",
        "end the earlier run, wait a minute if it has just ended, or export MASTER_PORT=29501",
    )
