"""The telemetry of `genesis fit`: which callbacks measure a run."""

from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from genesis.strategies import Replicated, Sharded
from genesis_callbacks import (
    DeviceWatch,
    GradientHealth,
    HangWatch,
    LossWatch,
    MemoryWatch,
    StepTimer,
    Throughput,
    TraceSteps,
)


@dataclass(frozen=True)
class TelemetryOptions:
    """The measurements of a run; the documentation lists their metrics.

    Args:
        throughput: Tokens per second and MFU.
        step_timer: The time of a step by part, and a warning if steps become slower.
        memory: Memory, transfers and disk throughput, and a snapshot when memory runs out.
        loss: A warning of a loss that does not fall, or has risen again; not for rewards (GSPO).
        gradient: Spikes of the gradient's norm, skips, and the origin of values that are not finite.
        device: Utilisation, power and traffic of an NVIDIA device; needs the package nvidia-ml-py.
        trace_steps: The steps to trace with torch's profiler, counted from 0.
        hang_seconds: A run whose ranks make no progress for this time ends with their stacks and the name of the rank
            that is missing; None never ends it. Collectives may take longer, by the strategy's `timeout_seconds`.
    """

    throughput: bool = True
    step_timer: bool = True
    memory: bool = True
    loss: bool = True
    gradient: bool = True
    device: bool = False
    trace_steps: tuple[int, ...] = ()
    hang_seconds: float | None = 1800.0


def build_telemetry(options: TelemetryOptions, run_dir: Path, *, has_loss: bool = True) -> list[Callback]:
    """Returns the callbacks for the options of a run.

    Args:
        options: The recipe's.
        run_dir: The run's directory.
        has_loss: Whether the objective's loss falls in training that works.
    """
    callbacks: list[Callback] = []
    if options.throughput:
        callbacks.append(Throughput())
    if options.step_timer:
        callbacks.append(StepTimer())
    if options.memory:
        callbacks.append(MemoryWatch(run_dir))
    if options.gradient:
        callbacks.append(GradientHealth(run_dir))
    if options.loss and has_loss:
        callbacks.append(LossWatch())
    if options.device:
        callbacks.append(DeviceWatch())
    if options.trace_steps:
        callbacks.append(TraceSteps(options.trace_steps, run_dir))
    if options.hang_seconds is not None:
        callbacks.append(HangWatch(timeout_seconds=options.hang_seconds))
    return callbacks


def outlast_hang_watch(trainer: Trainer) -> None:
    """Lets the collectives of a run take longer than its `HangWatch` waits, so that the run ends with a rank's name.

    A limit that the recipe gives stays, with a warning if it is too short for that.
    """
    strategy = trainer.strategy
    callbacks = vars(trainer)["callbacks"]  # a public attribute without an annotation in Lightning
    watch = next((each for each in callbacks if isinstance(each, HangWatch)), None)
    if watch is None or not isinstance(strategy, Replicated | Sharded):
        return
    strategy.hang_seconds = watch.longest_seconds
    given = strategy.timeout_seconds
    if given is not None and given <= watch.timeout_seconds and trainer.num_devices * trainer.num_nodes > 1:
        rank_zero_warn(
            f"trainer.strategy.timeout_seconds is {given:g}, and telemetry.hang_seconds {watch.timeout_seconds:g}: a "
            "run that hangs ends without the name of the rank that is missing. Leave timeout_seconds out, or lower "
            "hang_seconds"
        )
