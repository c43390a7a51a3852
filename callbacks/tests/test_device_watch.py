"""The driver's figures, by pynvml's own code and a small library in the place of the driver's."""

import ctypes
import subprocess
import time
from pathlib import Path

import pytest
import torch
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer
from simulated import COMPILER, require_compiler

from genesis_callbacks import DeviceWatch, device_watch
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.testing import run_ranks

pytestmark = LIGHTNING_WARNINGS


class Slow(Module):
    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)


def build_driver(directory: Path) -> Path:
    library = directory / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    command = [
        COMPILER,
        "-x",
        "c",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnvidia-ml.so.1",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, timeout=60)
    return library


def watch(library: str, directory: str, uuid: str) -> tuple[dict[str, float], int, list[str]]:
    """Returns what a fit has logged, how often NVML is still open, and the lines that it printed."""
    driver = ctypes.CDLL(library)  # pynvml finds it by its name
    device_watch.is_host = lambda device: False
    device_watch.read_device_uuid = lambda device: uuid
    lines: list[str] = []
    device_watch.rank_zero_info = lines.append
    callback = DeviceWatch(every_seconds=0.02)
    run = trainer(directory, [callback], log_every_n_steps=6)
    run.fit(Slow(), loader([1] * 6))
    run.fit_loop.max_epochs = 2
    run.fit(Slow(), loader([1] * 6))
    return {key: float(value) for key, value in run.callback_metrics.items()}, driver.fake_num_open(), lines


@pytest.mark.process
def test_means_of_the_drivers_answers_are_logged(tmp_path: Path) -> None:
    require_compiler()
    library = build_driver(tmp_path)
    ((logged, num_open, lines),) = run_ranks(watch, 1, str(library), str(tmp_path), "0123")
    traffic = logged.pop("device/nvlink_bytes_per_second")
    assert 2000 * 1024 < traffic < 2000 * 1024 / 0.002  # 2,000 KiB with each sample, at most every 20 ms
    assert logged == {
        "device/utilisation": pytest.approx(0.4, abs=0.1),
        "device/idle_share": pytest.approx(0.5, abs=0.13),
        "device/temperature": 61.0,
        "device/power_watts": 350.5,
        "device/throttled": pytest.approx(0.5, abs=0.13),
        "device/pcie_to_device_bytes_per_second": 2048.0 * 1024,
    }
    assert (num_open, lines) == (0, [])


@pytest.mark.process
def test_a_device_that_the_driver_does_not_know_is_reported_once(tmp_path: Path) -> None:
    require_compiler()
    library = build_driver(tmp_path)
    ((logged, num_open, lines),) = run_ranks(watch, 1, str(library), str(tmp_path), "4567")
    assert (logged, num_open) == ({}, 0)
    assert lines == ["DeviceWatch logs nothing: the driver's library answers: Not Found"]


def test_without_a_device_a_driver_or_the_package_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(device_watch, "rank_zero_info", lines.append)
    trainer(tmp_path, [DeviceWatch()]).fit(Module(), loader([1]))
    monkeypatch.setattr(device_watch, "is_host", lambda device: False)
    monkeypatch.setattr(device_watch, "read_device_uuid", lambda device: "0123")
    trainer(tmp_path, [DeviceWatch()]).fit(Module(), loader([1]))
    monkeypatch.setattr(device_watch, "pynvml", None)
    trainer(tmp_path, [DeviceWatch()]).fit(Module(), loader([1]))
    assert lines[0] == "DeviceWatch logs nothing: training runs on cpu, not on an NVIDIA device"
    if not torch.cuda.is_available():
        assert lines[1] == "DeviceWatch logs nothing: the driver's library answers: NVML Shared Library Not Found"
    assert lines[-1] == "DeviceWatch logs nothing: the package nvidia-ml-py is not installed"


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="every_seconds is 0"):
        DeviceWatch(every_seconds=0)
