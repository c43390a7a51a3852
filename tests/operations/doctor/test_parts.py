"""The doctor's parts on the CPU and, as a whole, on the simulated device."""

import json
import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from genesis.base import device
from genesis.model.key_blocks import ENOUGH_BLOCKS
from genesis.operations.doctor import machine, training
from genesis.operations.doctor.attention import run_all_proofs
from genesis.operations.doctor.machine import inspect_devices, measure_copies, measure_disk, measure_products
from genesis.operations.doctor.parts import PARTS, find_part
from genesis.operations.doctor.probe import Probe, SkippedError, Task
from genesis.operations.doctor.training import counting_waits, measure_training, train_on_all, watch_waits
from genesis_callbacks.checkpoint.device import DevicePath
from genesis_callbacks.checkpoint.device_proof import DeviceReport
from tests.commands import MODULES, run_genesis
from tests.killed_run import kill_alone

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(Task("cpu", "tiny", str(tmp_path)))


def values(probe: Probe) -> dict[str, object]:
    return {figure["name"]: figure["value"] for figure in probe.findings.figures}


def check(probe: Probe) -> None:
    assert [check for check in probe.findings.checks if not check["passed"]] == []


@pytest.mark.parametrize(
    ("report", "is_passed"),
    [
        (DeviceReport(), True),
        (DeviceReport(path=DevicePath(has_pinning=False), wrong=frozenset({"copies"})), False),
        (DeviceReport(path=DevicePath(has_pinning=False)), None),
    ],
    ids=["good", "other bytes", "no pinned memory"],
)
def test_pinned_copies_fail_if_their_bytes_differ_and_not_if_there_is_no_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: DeviceReport, is_passed: bool | None
) -> None:
    probe = Probe(Task("cuda", "tiny", str(tmp_path)))
    monkeypatch.setattr(machine, "prove_device", lambda device: report)
    machine.run_proofs(probe, ())
    found = [check["passed"] for check in probe.findings.checks if "pinned" in check["name"]]
    assert found == ([] if is_passed is None else [is_passed])
    assert bool(probe.findings.notes) == (is_passed is None)


def test_every_part_has_a_function_and_a_limit() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert callable(find_part(part.name).load())
        assert part.limit_seconds > 0


def test_the_machine_is_described(probe: Probe) -> None:
    inspect_devices(probe)
    check(probe)
    assert values(probe)["torch"] == torch.__version__


def test_the_cpu_copies_multiplies_and_proves_its_attention(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MATRIX_SIZES", {"cpu": 64})
    measure_copies(probe)
    measure_products(probe)
    run_all_proofs(probe)
    check(probe)
    assert values(probe)["attention by flash"] == "flash"
    assert float(str(values(probe)["products in float32"])) > 0


def test_the_disk_is_measured_and_left_empty(probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DISK_BYTES", 4 << 20)
    measure_disk(probe)
    check(probe)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full_is_left_alone(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(SkippedError, match="1 MiB are free"):
        measure_disk(probe)


def test_waits_are_counted_by_the_line_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(set_sync_debug_mode=lambda mode: None)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake)
    with counting_waits("cuda") as waits:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another matter", stacklevel=1)
    assert waits is not None
    assert waits.total() == 3


def test_devices_without_collectives_skip_the_strategies(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_has_collectives", lambda kind: False)
    other = Probe(Task("simulated", "tiny", probe.task.directory))
    with pytest.raises(SkippedError, match="no backend for simulated"):
        train_on_all(other, "ddp")
    assert device.name_collectives("nosuchkind") == "none"


# ---- parts that train


@pytest.mark.slow
def test_steps_are_watched_and_measured(probe: Probe) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch_waits(probe)
        measure_training(probe, is_compiled=False)
    check(probe)
    assert float(str(values(probe)["speed"])) > 0
    assert any("no MFU" in note for note in probe.findings.notes)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("variant", ["ddp", "fsdp2"])
def test_two_gloo_ranks_train_alike(probe: Probe, variant: str) -> None:
    train_on_all(probe, variant)
    check(probe)
    assert values(probe)["backend"] == "gloo"


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_run_resumes_bit_for_bit(probe: Probe) -> None:
    kill_alone(probe, "process")
    check(probe)
    assert len(probe.findings.checks) == 2
    found = values(probe)
    assert int(str(found["longest document"])) >= 512
    assert int(str(found["blocks of keys in it"])) >= ENOUGH_BLOCKS
    assert int(str(found["bytes of a save"])) < 32 << 20  # a save takes milliseconds


@pytest.mark.slow
@pytest.mark.process
def test_a_resumed_run_that_ends_with_other_bits_fails(probe: Probe) -> None:
    kill_alone(probe, "thread", "ddp", 1, "planted")
    assert [found["passed"] for found in probe.findings.checks] == [True, False]


@pytest.mark.slow
@pytest.mark.early
@pytest.mark.process
def test_the_doctor_examines_the_simulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        if os.environ.get("GENESIS_REQUIRE_COMPILER") == "1":
            pytest.fail("there is no C++ compiler, and GENESIS_REQUIRE_COMPILER is 1")
        pytest.skip("there is no C++ compiler to build the simulated device with")
    paths = [REPOSITORY, REPOSITORY / "callbacks/src", REPOSITORY / "callbacks/tests/simulated/backend"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    out = tmp_path / "report.json"
    words = ("doctor", "--device", "--parts", "devices,proof,copies,waits,ddp", "--out", out, "--dir", tmp_path)
    # Of a server of its own: torch loads the device at the end of its import.
    done = run_genesis(*words, "--patience", "4", timeout=280, preloaded=(*MODULES, "genesis_simulated_backend"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["device"] == "simulated"
    statuses = {part["name"]: part["status"] for part in report["parts"]}
    assert statuses == {"devices": "passed", "proof": "passed", "copies": "passed", "waits": "passed", "ddp": "skipped"}
