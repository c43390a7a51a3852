"""The telemetry of `genesis fit`: which callbacks measure a run."""

from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback

from genesis_callbacks import MemoryWatch, StepTimer, Throughput


@dataclass(frozen=True)
class TelemetryOptions:
    """The measurements of a run; the documentation lists their metrics.

    Args:
        throughput: Tokens per second and MFU.
        step_timer: The time of a step by part, and a warning if steps become slower.
        memory: Memory, transfers and disk throughput, and a snapshot when memory runs out.
    """

    throughput: bool = True
    step_timer: bool = True
    memory: bool = True


def build_telemetry(options: TelemetryOptions, run_dir: Path) -> list[Callback]:
    """Returns the callbacks for the options of a run."""
    callbacks: list[Callback] = []
    if options.throughput:
        callbacks.append(Throughput())
    if options.step_timer:
        callbacks.append(StepTimer())
    if options.memory:
        callbacks.append(MemoryWatch(run_dir))
    return callbacks
