"""Logs what the driver of an NVIDIA device says of it: utilisation, temperature, power, throttling, traffic.

    logged                                    unit and meaning
    device/utilisation                        share of the time in which a kernel ran, a fraction 0..1
    device/idle_share                         share of the samples in which none had run, a fraction 0..1
    device/temperature                        degrees Celsius
    device/power_watts                        watts
    device/throttled                          share of the samples in which heat or power lowered the clocks, 0..1
    device/pcie_to_device_bytes_per_second    traffic on PCIe from the host
    device/pcie_to_host_bytes_per_second      traffic on PCIe to the host
    device/nvlink_bytes_per_second            traffic on all NVLinks, both directions

All values are means since the last log line, of rank 0's device. A thread of rank 0 asks the driver by NVML once a
second; training does not wait for it. A figure that the device does not have is absent. Does it communicate? No.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from ._argument_types import checking
from ._log_lines import is_log_step, log_exact
from .base.errors import UserError
from .checkpoint.device import is_host, read_device_uuid

try:
    import pynvml
except ImportError:  # the package is optional
    pynvml = None

__all__ = ["DeviceWatch"]

_KIB: Final = 1024.0
_ALL_LINKS: Final = 0xFFFFFFFF
_STOP_SECONDS: Final = 5.0


class DeviceWatch(pl.Callback):
    """Samples the device of rank 0 and logs means every `log_every_n_steps`.

    Without the package `nvidia-ml-py`, without an NVIDIA device or without its driver, one line gives the reason when
    training starts, and nothing is logged. There is no state to save.

    Args:
        every_seconds: The interval of samples.
    """

    @checking
    def __init__(self, *, every_seconds: float = 1.0) -> None:
        super().__init__()
        if not every_seconds > 0:
            raise UserError(f"every_seconds is {every_seconds}: it must be above 0")
        self._every_seconds = every_seconds
        self._sampler: _Sampler | None = None
        self._has_explained = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the thread."""
        self._stop()
        if not trainer.is_global_zero:
            return
        try:
            self._sampler = _Sampler(open_device(trainer), self._every_seconds)
        except NoDeviceError as error:
            if not self._has_explained:
                self._has_explained = True
                rank_zero_info(f"DeviceWatch logs nothing: {error}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs at the steps of the log."""
        if self._sampler is not None and is_log_step(trainer):
            values = self._sampler.take()
            if values:
                log_exact(pl_module, values)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the thread."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends the thread."""
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ends the thread."""
        self._stop()

    def _stop(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()


class NoDeviceError(Exception):
    """There is nothing to sample; the text is the reason."""


def open_device(trainer: pl.Trainer) -> Any:
    """Returns NVML's handle of the device that this rank trains on. NVML is then initialised.

    Raises:
        NoDeviceError: There is no such device, or no way to ask it.
    """
    device = trainer.strategy.root_device
    uuid = None if is_host(device) else read_device_uuid(device)
    if uuid is None:
        raise NoDeviceError(f"training runs on {device.type}, not on an NVIDIA device")
    if pynvml is None:
        raise NoDeviceError("the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        try:
            # By its identity, because CUDA_VISIBLE_DEVICES renumbers devices for CUDA and not for NVML.
            return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise
    except pynvml.NVMLError as error:
        raise NoDeviceError(f"the driver's library answers: {error}") from error


class _Sampler:
    """A thread that samples a device, and the sums of its samples."""

    def __init__(self, handle: Any, every_seconds: float) -> None:
        self._handle, self._every_seconds = handle, every_seconds
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}
        self._links: tuple[float, float] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Returns the means since the last call."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {f"device/{name}": total / count for name, (total, count) in sums.items()}

    def stop(self) -> None:
        """Ends the thread, and NVML with it."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)  # a driver that hangs must not hang the end of training

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._add(self._sample())
                self._stopped.wait(self._every_seconds)
        finally:
            pynvml.nvmlShutdown()

    def _add(self, sample: dict[str, float]) -> None:
        with self._lock:
            for name, value in sample.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)

    def _sample(self) -> dict[str, float]:
        handle = self._handle
        readers: dict[str, Callable[[], float]] = {
            "utilisation": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
            "temperature": lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            "power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "throttled": lambda: float(bool(read_reasons(handle) & _throttling_reasons())),
            # From the device's view: it receives what comes from the host.
            "pcie_to_device_bytes_per_second": lambda: (
                _KIB * pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
            ),
            "pcie_to_host_bytes_per_second": lambda: (
                _KIB * pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
            ),
            "nvlink_bytes_per_second": self._read_links,
        }
        sample: dict[str, float] = {}
        for name, read in readers.items():
            try:
                sample[name] = read()
            except (pynvml.NVMLError, LookupError):
                continue  # this device or driver does not have the figure
        if "utilisation" in sample:
            sample["idle_share"] = float(sample["utilisation"] == 0.0)
        return sample

    def _read_links(self) -> float:
        """Returns the traffic since the last sample.

        Raises:
            LookupError: The device has no links, or there is no earlier sample.
        """
        fields = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        found = pynvml.nvmlDeviceGetFieldValues(self._handle, [(field, _ALL_LINKS) for field in fields])
        if any(value.nvmlReturn != pynvml.NVML_SUCCESS for value in found):
            raise LookupError("no links")
        now = (time.monotonic(), _KIB * float(sum(value.value.ullVal for value in found)))
        before, self._links = self._links, now
        if before is None or now[0] <= before[0] or now[1] < before[1]:
            raise LookupError("no earlier sample")
        return (now[1] - before[1]) / (now[0] - before[0])


def read_reasons(handle: Any) -> int:
    """Returns the bits of the reasons for the device's clocks."""
    return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # the name that all drivers know


def _throttling_reasons() -> int:
    """Returns the bits of heat and power; other reasons are idleness and settings."""
    return int(
        pynvml.nvmlClocksThrottleReasonSwPowerCap
        | pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
