"""The telemetry of `genesis fit`: which callbacks measure a run."""

from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback

from genesis_callbacks import GradientHealth, MemoryWatch, StepTimer, Throughput, TraceSteps


@dataclass(frozen=True)
class TelemetryOptions:
    """The measurements of a run; the documentation lists their metrics.

    Args:
        throughput: Tokens per second and MFU.
        step_timer: The time of a step by part, and a warning if steps become slower.
        gradient: Spikes of the gradient's norm, skips, and the origin of values that are not finite.
        trace_steps: The steps to trace with torch's profiler, counted from 0.
        memory: Memory, transfers and disk throughput, and a snapshot when memory runs out.
    """

    throughput: bool = True
    step_timer: bool = True
    memory: bool = True
    gradient: bool = True
    trace_steps: tuple[int, ...] = ()


def build_telemetry(options: TelemetryOptions, run_dir: Path) -> list[Callback]:
    """Returns the callbacks for the options of a run."""
    callbacks: list[Callback] = []
    if options.throughput:
        callbacks.append(Throughput())
    if options.step_timer:
        callbacks.append(StepTimer())
    if options.memory:
        callbacks.append(MemoryWatch(run_dir))
    if options.gradient:
        callbacks.append(GradientHealth(run_dir))
    if options.trace_steps:
        callbacks.append(TraceSteps(options.trace_steps, run_dir))
    return callbacks
