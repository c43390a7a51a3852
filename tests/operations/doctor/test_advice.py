"""Advice for machines, from recorded facts: nothing here looks at the machine of the test."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from rich.console import Console

from genesis.operations.doctor import facts as facts_module
from genesis.operations.doctor import nvml
from genesis.operations.doctor.advice import examine_machine
from genesis.operations.doctor.checks import Check, has_failed, print_checks
from genesis.operations.doctor.facts import Disk, MachineFacts, PlannedSaves, read_facts
from genesis.operations.doctor.nvml import Gpu, Link, LinkKind

GIB = 2**30
NO_GPU = MachineFacts(
    python="3.11.7",
    packages={"torch": "2.13.0", "lightning": "2.6.6"},
    build="cpu",
    num_cores=2,
    num_usable_cores=2.0,
    memory_bytes=24 * GIB,
    available_bytes=20 * GIB,
    max_open_files=20_000,
    nvml_fault="nvidia-ml-py is not installed",
    shared_bytes=12 * GIB,
    disk=Disk(60 * GIB, 250 * GIB, 1e9),
)


def with_gpus(
    name: str, count: int, memory: int, capability: tuple[int, int], kind: LinkKind, peers: bool
) -> MachineFacts:
    return replace(
        NO_GPU,
        build="cuda 12.8",
        driver="570.86",
        nvml_fault="",
        num_cores=64,
        num_usable_cores=64.0,
        memory_bytes=512 * GIB,
        gpus=(Gpu(name, memory * GIB, memory * GIB, capability, "PCIe 4.0 x16 (at most 4.0 x16)"),) * count,
        links=tuple(Link(one, other, kind, peers) for one, other in combinations(range(count), 2)),
        settings={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )


TWO_4090 = with_gpus("NVIDIA GeForce RTX 4090", 2, 24, (8, 9), "pcie host", peers=False)
EIGHT_H200 = with_gpus("NVIDIA H200", 8, 141, (9, 0), "nvlink", peers=True)
TWO_BLACKWELL = with_gpus("NVIDIA RTX PRO 6000 Blackwell", 2, 96, (12, 0), "pcie host", peers=True)


def examine(facts: MachineFacts, saves: PlannedSaves | None = None) -> dict[str, Check]:
    return {check.name: check for check in examine_machine(facts, saves)}


def named(facts: MachineFacts, status: str, saves: PlannedSaves | None = None) -> set[str]:
    return {name for name, check in examine(facts, saves).items() if check.status == status}


def test_a_machine_without_gpus_passes_and_says_what_does_not_apply() -> None:
    assert named(NO_GPU, "warning") == named(NO_GPU, "failed") == set()
    assert "GPUs" in named(NO_GPU, "does not apply")
    assert "nvidia-ml-py is not installed" in examine(NO_GPU)["GPUs"].found


def test_two_4090s_want_no_peer_access_and_few_gathers() -> None:
    found = examine(TWO_4090)
    assert found["NCCL_P2P_DISABLE"].status == "warning"
    assert "export NCCL_P2P_DISABLE=1" in found["NCCL_P2P_DISABLE"].remedy
    assert "replicated" in found["links"].remedy
    assert examine(replace(TWO_4090, settings={"NCCL_P2P_DISABLE": "1"}))["NCCL_P2P_DISABLE"].status == "passed"


def test_nvlink_wants_its_peer_access() -> None:
    assert named(EIGHT_H200, "warning") == set()
    disabled = replace(EIGHT_H200, settings={**EIGHT_H200.settings, "NCCL_P2P_DISABLE": "1"})
    assert named(disabled, "warning") == {"NCCL_P2P_DISABLE"}
    assert "unset" in examine(disabled)["NCCL_P2P_DISABLE"].remedy


def test_blackwell_with_flash_linear_attention_wants_no_tma() -> None:
    assert examine(TWO_BLACKWELL)["FLA_USE_TMA"].status == "does not apply"
    assert "FLA_USE_TMA=0" in examine(replace(TWO_BLACKWELL, has_fla=True))["FLA_USE_TMA"].remedy
    is_set = replace(TWO_BLACKWELL, has_fla=True, settings={"FLA_USE_TMA": "0"})
    assert examine(is_set)["FLA_USE_TMA"].status == "passed"
    assert examine(replace(EIGHT_H200, has_fla=True))["FLA_USE_TMA"].status == "does not apply"


def test_gpus_want_segments_that_grow() -> None:
    unset = replace(EIGHT_H200, settings={})
    assert "expandable_segments:True" in examine(unset)["PYTORCH_ALLOC_CONF"].remedy
    old = replace(EIGHT_H200, settings={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert examine(old)["PYTORCH_ALLOC_CONF"].status == "passed"


@pytest.mark.parametrize(
    ("name", "status", "facts"),
    [
        ("software", "failed", replace(EIGHT_H200, build="cpu")),
        ("GPUs", "warning", replace(TWO_4090, gpus=(TWO_4090.gpus[0], replace(TWO_4090.gpus[0], name="RTX 3090")))),
        ("GPU memory", "warning", replace(TWO_4090, gpus=(replace(TWO_4090.gpus[0], processes=((71, 9 * GIB),)),) * 2)),
        ("cores", "warning", replace(EIGHT_H200, num_usable_cores=4.0)),
        ("cores", "warning", replace(NO_GPU, settings={"OMP_NUM_THREADS": "64"})),
        ("memory", "warning", replace(EIGHT_H200, memory_limit_bytes=16 * GIB)),
        ("shared memory", "failed", replace(TWO_4090, shared_bytes=64 << 20)),
        ("shared memory", "warning", replace(NO_GPU, shared_bytes=64 << 20)),
        ("open files", "warning", replace(NO_GPU, max_open_files=256)),
        ("disk", "warning", replace(NO_GPU, disk=Disk(1 * GIB, 250 * GIB))),
        ("port", "warning", replace(NO_GPU, is_port_free=False)),
    ],
)
def test_each_fault_of_a_machine_is_named_with_its_remedy(name: str, status: str, facts: MachineFacts) -> None:
    check = examine(facts)[name]
    assert check.status == status
    assert check.remedy


def test_a_process_that_holds_gpu_memory_is_named() -> None:
    facts = replace(TWO_4090, gpus=(replace(TWO_4090.gpus[0], processes=((71, 9 * GIB),)), TWO_4090.gpus[1]))
    assert "process 71 holds 9.0 GiB of GPU 0" in examine(facts)["GPU memory"].found


def test_the_disk_must_hold_the_planned_checkpoints() -> None:
    saves = PlannedSaves(12 * GIB, num_kept=4)
    assert examine(NO_GPU, saves)["disk"].status == "passed"
    small = replace(NO_GPU, disk=Disk(40 * GIB, 250 * GIB, 1e9))
    assert named(small, "failed", saves) == {"disk"}
    assert "48.00 GiB are needed" in examine(small, saves)["disk"].remedy
    with_base = replace(saves, disk_bytes=30 * GIB)
    found = examine(small, with_base)["disk"]
    assert (found.status, "checkpoints of 12.00 GiB, 4 at a time, 30.00 GiB in all" in found.found) == ("passed", True)


def test_this_machine_is_read_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_WRITTEN_BYTES", 1 << 20)
    facts = read_facts(tmp_path)
    checks = examine_machine(facts)
    assert list(tmp_path.iterdir()) == []
    assert facts.num_usable_cores >= 1
    assert facts.disk is not None
    console = Console(record=True, width=120)
    print_checks("machine", checks, console)
    text = console.export_text()
    assert all(check.name in text for check in checks)
    assert not has_failed(checks) or facts.gpus


def test_without_a_driver_nvml_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver:
        class NVMLError(Exception):
            pass

        @classmethod
        def nvmlInit(cls) -> None:  # noqa: N802  # NVML's name
            raise cls.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "pynvml", NoDriver)
    monkeypatch.setattr(nvml, "_read_by_torch", lambda: ((), ()))
    assert nvml.read_gpus() == (None, (), (), "NVML: Driver Not Loaded")
