"""Checks of a recipe's run: the first checkpoint, a resume, memory, overfitting one batch.

Each compares what a fit has left, and is a function of it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl

from genesis.base.errors import numbered
from genesis.operations.doctor.checks import Check, judge
from genesis.operations.doctor.observe import Feed, LiveTensors, find_slope
from genesis.operations.doctor.planned import PlannedFit
from genesis.train.module import GenesisModule
from genesis_callbacks.base.manifest import TensorRecord
from genesis_callbacks.checkpoint import CheckpointError, read_manifest, verify
from genesis_callbacks.checkpoint.compare import compare_tensors

_MODEL, _OPTIMIZER = "model.", "optimizer."
_MIB: Final = 2**20
_SHOWN: Final = 3
_WARM_UP_STEPS: Final = 4
_MIN_STEPS: Final = 5
_MIN_PART: Final = 3
_MIN_SLOPE_BYTES: Final = 1 << 20
_MAX_TENSOR_SLOPE_BYTES: Final = 1024
_PEAK_SHARE: Final = 1.25
_PEAK_BYTES: Final = 16 << 20
_LARGE_REMEDY: Final = (
    "the recipe does not explain so much memory: look for callbacks and hooks that hold tensors, and compare with "
    "`genesis plan --config RECIPE`"
)
_LARGE_SHARE: Final = 1.05
_LARGE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class SavePlan:
    """What each checkpoint of a run must hold, from the module and its optimizers.

    Args:
        shapes: The shape of each parameter that a checkpoint holds itself, by its name there.
        num_parameters_bytes: Their bytes.
        num_states: The number of tensors in the optimizers' state that have a parameter's elements.
        num_states_bytes: Their bytes.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_parameters_bytes: int
    num_states: int
    num_states_bytes: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all these tensors."""
        return self.num_parameters_bytes + self.num_states_bytes


def plan_save(module: GenesisModule, optimizers: Sequence[Any], *, has_base: bool) -> SavePlan:
    """Returns what a checkpoint of a module must hold.

    Args:
        module: The module, after a step.
        optimizers: Its optimizers.
        has_base: Whether frozen tensors stay in a base.
    """
    held = {name: each for name, each in module.named_parameters() if each.requires_grad or not has_base}
    states = [
        value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if getattr(value, "ndim", 0) and value.numel() == parameter.numel()
    ]
    return SavePlan(
        {f"{_MODEL}{name}": tuple(each.shape) for name, each in held.items()},
        sum(each.numel() * each.element_size() for each in held.values()),
        len(states),
        sum(state.numel() * state.element_size() for state in states),
    )


def check_checkpoint(path: Path | None, live: SavePlan, planned: PlannedFit | None = None) -> Check:
    """Compares the first checkpoint with the live module and with the plan of the recipe, and verifies it.

    Args:
        path: The checkpoint; None if there is none.
        live: The names and shapes of the live module, and the bytes of the live optimizers.
        planned: The number and bytes of tensors that the plan computes; None if it does not know the recipe.
    """
    remedy = (
        "do not train on: a resume from such a checkpoint loses what is missing; check checkpoint.save_optimizer, "
        "checkpoint.scope and callbacks that change a checkpoint"
    )
    if path is None:
        return Check("checkpoint", "failed", "no checkpoint was committed", remedy)
    try:
        manifest = verify(path, "deep")
    except CheckpointError as error:
        return Check("checkpoint", "failed", str(error), remedy)
    own = manifest.own_tensors
    num_bytes = sum(file.num_bytes for file in manifest.files)
    num_tensors = sum(bool(each.shape) for name, each in own.items() if name.startswith((_MODEL, _OPTIMIZER)))
    due_bytes = max(live.num_bytes, planned.checkpoint_bytes if planned else 0)
    faults = _compare_with_live(own, live, has_optimizer=manifest.has_optimizer)
    if planned is not None and num_tensors < planned.num_tensors:
        faults.append(f"it has {numbered(num_tensors, 'weights')} and moments, and {planned.num_tensors} are planned")
    if num_bytes < due_bytes and not faults:
        faults.append(f"its files have {num_bytes / _MIB:.2f} MiB")
    due = "" if planned is None else f"{numbered(planned.num_tensors, 'weights')} and moments, "
    size = f"{numbered(len(own), 'tensors')}, {num_bytes / _MIB:.2f} MiB"
    found = f"{size}; planned are at least {due}{due_bytes / _MIB:.2f} MiB"
    if num_bytes > due_bytes * _LARGE_SHARE + _LARGE_BYTES:
        found += ", so that it holds more than weights and moments"
    if faults:
        found += ": " + "; ".join(faults[:_SHOWN])
    return judge("checkpoint", not faults, found, remedy)


def _compare_with_live(own: Mapping[str, TensorRecord], plan: SavePlan, *, has_optimizer: bool) -> list[str]:
    faults = []
    missing = [name for name in plan.shapes if name not in own]
    if missing:
        faults.append(
            f"{len(missing):,} of the model's {numbered(len(plan.shapes), 'tensors')} are missing, such as {missing[0]}"
        )
    for name, shape in plan.shapes.items():
        if name in own and own[name].shape != shape:
            faults.append(f"{name} has the shape {own[name].shape}, the model's is {shape}")
    states = [record for name, record in own.items() if name.startswith(_OPTIMIZER) and record.shape]
    found_bytes = sum(math.prod(record.shape) * record.torch_dtype.itemsize for record in states)
    if not has_optimizer:
        faults.append("it has no state of the optimizers")
    elif found_bytes < plan.num_states_bytes:
        faults.append(
            f"the optimizers' state has {found_bytes / _MIB:.2f} MiB in {numbered(len(states), 'tensors')}, and "
            f"{plan.num_states_bytes / _MIB:.2f} MiB in {numbered(plan.num_states, 'tensors')} were live"
        )
    return faults


# ---- resume


@dataclass(frozen=True)
class Course:
    """What a fit left.

    Args:
        windows: The hash of the window of each step, by the step before it.
        last: The last checkpoint.
        position: The data position at the end.
    """

    windows: Mapping[int, str]
    last: Path
    position: int


def check_resume(straight: Course, resumed: Course, step: int) -> Check:
    """Compares a run that was resumed at `step` with one that was not stopped: windows, position, tensors, counters."""
    num_steps = max(straight.windows) + 1
    faults = []
    due = range(step, num_steps)
    other = [number for number in due if straight.windows.get(number) != resumed.windows.get(number)]
    if other:
        place = next((k for k, window in straight.windows.items() if window == resumed.windows.get(other[0])), None)
        shown = "" if place is None else f": it is the window of step {place + 1}"
        faults.append(f"step {other[0] + 1} is trained on another window{shown}")
    if straight.position != resumed.position:
        faults.append(f"the data position is {resumed.position} instead of {straight.position}")
    one, two = read_manifest(straight.last), read_manifest(resumed.last)
    changed = [each for each in compare_tensors(straight.last, one, resumed.last, two) if each.verdict != "same"]
    if changed:
        faults.append(f"{len(changed):,} of {numbered(len(one.tensors), 'tensors')} differ, such as {changed[0].name}")
    if one.counters != two.counters:
        faults.append(f"the counters are {two.counters} instead of {one.counters}")
    found = (
        f"saved at step {step}, resumed, and compared at step {num_steps} with a run that was not stopped: "
        f"{numbered(len(one.tensors), 'tensors')}, {numbered(len(due), 'windows')} and the data position"
    )
    return judge(
        "resume",
        not faults,
        found + (": " + "; ".join(faults) if faults else " are equal, bit for bit"),
        "a run that is stopped would not continue as it was: find the state that is not saved, or what draws random "
        "numbers without a seed",
    )


# ---- memory


@dataclass(frozen=True)
class Peak:
    """The memory of one step at its highest point.

    Args:
        num_bytes: The bytes of all tensors, of the device where there is one.
        planned_bytes: What the plan has for them; None if it does not know the recipe.
    """

    num_bytes: int
    planned_bytes: int | None

    @property
    def is_above_plan(self) -> bool:
        """Whether it is so much more than planned that something else holds memory, too."""
        return self.planned_bytes is not None and self.num_bytes > _PEAK_SHARE * self.planned_bytes + _PEAK_BYTES

    def describe(self) -> str:
        """Returns the measured and the planned bytes."""
        planned = "" if self.planned_bytes is None else f", planned are {self.planned_bytes / _MIB:,.1f} MiB"
        return f"a step takes {self.num_bytes / _MIB:,.1f} MiB in tensors at its peak{planned}"


def check_memory(
    resident: Mapping[int, int],
    allocated: Mapping[int, int],
    tensors: Mapping[int, LiveTensors],
    saved_at: int,
    peak: Peak | None = None,
) -> Check:
    """Looks for memory that grows with each step, and for a step that takes more than its plan.

    Args:
        resident: Memory of the process after each step, without shared memory.
        allocated: Memory of the device's tensors after each step; empty on the CPU.
        tensors: All tensors that Python knows, after some steps of a fit that reads no window ahead.
        saved_at: The step that was saved, after which the process is larger by the buffers of saves.
        peak: The memory of a step; None if it was not measured.
    """
    large = peak is not None and peak.planned_bytes is not None and peak.is_above_plan
    of_step = "" if peak is None else f"; {peak.describe()}"
    steady = {step: value for step, value in resident.items() if step > _WARM_UP_STEPS}
    if len(steady) < _MIN_STEPS:
        few = f"too few for a slope: {numbered(len(resident), 'steps')}{of_step}"
        return Check("memory", "failed", few, _LARGE_REMEDY) if large else Check("memory", "does not apply", few)
    slope = _find_least_slope(steady, saved_at)
    of_device = _find_least_slope({step: allocated[step] for step in steady if step in allocated}, saved_at)
    num_tensors = [tensors[step].num_tensors for step in sorted(tensors)]
    of_tensors = _find_usual_growth([tensors[step].num_bytes for step in sorted(tensors)])
    # A tensor that is kept in each step adds one a step, whatever its size.
    grows = _find_usual_growth(num_tensors) >= 1
    limit = max(_MIN_SLOPE_BYTES, 0.002 * max(resident.values()))
    found = (
        f"over steps {min(steady)} to {max(steady)}, at {max(resident.values()) / _MIB:,.0f} MiB: "
        f"{slope / _MIB:+.2f} MiB a step in the process, {of_tensors / _MIB:+.3f} MiB a step in tensors, "
        f"of which there are {_describe_counts(num_tensors)}"
    )
    if allocated:
        found += f", {of_device / _MIB:+.3f} MiB a step on the device"
    is_leaking = grows or of_tensors > _MAX_TENSOR_SLOPE_BYTES or of_device > _MAX_TENSOR_SLOPE_BYTES or slope > limit
    if large and not is_leaking:
        return Check("memory", "failed", found + of_step, _LARGE_REMEDY)
    return judge(
        "memory",
        not is_leaking,
        found + of_step,
        "something keeps a tensor of each step: look for lists of losses that are not detached, and for callbacks "
        "that keep outputs",
    )


def _find_usual_growth(values: Sequence[int]) -> float:
    """Returns the median growth from each look to the next, which single jumps do not move at all."""
    return statistics.median([later - before for before, later in pairwise(values)] or [0])


def _describe_counts(counts: Sequence[int]) -> str:
    if not counts:
        return "no counts"
    return str(counts[0]) if len(set(counts)) == 1 else f"{counts[0]}, and {counts[-1]} at the end"


def _find_least_slope(values: Mapping[int, int], saved_at: int) -> float:
    """Returns the slope before or after a save, whichever is less: a leak grows in both."""
    before = {step: value for step, value in values.items() if step <= saved_at}
    after = {step: value for step, value in values.items() if step > saved_at + 1}
    return min((find_slope(part) for part in (before, after) if len(part) >= _MIN_PART), default=0.0)


# ---- data and saves


def check_loader(feeds: Mapping[int, Feed]) -> Check:
    """Judges whether the data keep up with training, at the speed and the batch of the examination.

    Args:
        feeds: What was measured of each step.
    """
    steady = [feed for step, feed in feeds.items() if step > _WARM_UP_STEPS]
    if len(steady) < _MIN_STEPS:
        return Check("loader", "does not apply", f"too few: {numbered(len(feeds), 'measured steps')}")
    headroom, wait_ms = (statistics.median(values) for values in zip(*steady, strict=True))
    found = f"the data can be {headroom:,.1f} times as fast as training is here; a step waits {wait_ms:.2f} ms for them"
    if headroom >= 1:
        return Check("loader", "passed", found)
    remedy = "training waits for its data: leave a core to the loader, raise data.prefetch_windows, or prepare a corpus"
    return Check("loader", "warning", found, remedy)


def describe_save(statistics_of_saves: Any) -> str:
    """Returns what the last save cost the training thread, and how fast it was written to the disk of the run."""
    seconds, num_bytes = statistics_of_saves.last_write_seconds, statistics_of_saves.last_staged_bytes
    rate = f", {num_bytes / seconds / 1e6:,.0f} MB/s" if seconds > 0 else ""
    return (
        f"a save stops training for {1e3 * statistics_of_saves.last_stall_seconds:,.1f} ms and is written in "
        f"{seconds:.2f} s{rate}"
    )


# ---- one batch


def check_overfit(losses: Sequence[float], limit: float, what: str) -> Check:
    """Judges the losses of a fit on one repeated window."""
    if not losses:
        return Check("overfit", "failed", "no step was trained", "see the error above")
    lowest = min(losses)
    return judge(
        "overfit",
        lowest < limit,
        f"{what}: loss {losses[0]:.3f} -> {lowest:.3f} in {numbered(len(losses), 'steps')}; it must fall below "
        f"{limit:g}",
        "the model cannot overfit one batch: check the learning rate, frozen weights, and that gradients reach "
        "the weights",
    )


def find_position(trainer: pl.Trainer) -> int:
    """Returns the data position at the end of a fit."""
    position: int = trainer.datamodule.training.cursor.position  # type: ignore[attr-defined]  # ours
    return position
