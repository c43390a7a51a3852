"""What metrics say about a run's bottleneck: symptom, bottleneck, what to try; one table for documentation and reports.

`SYMPTOMS` is data, and `find_symptoms` decides purely from metrics which of its rows apply. The metrics are those of
the telemetry callbacks, by their keys. A row whose metrics are missing does not apply. No torch is imported here.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["SYMPTOMS", "Condition", "Symptom", "find_symptoms", "render_table", "summarize_series"]

STEP_TIME_TREND: Final = "trend/step_ms"
"""The median of `time/step_ms` in the last quarter of a series over that of its first half."""
LOSS_TREND: Final = "trend/loss"
"""The median of `train/loss` in the last quarter of a series over the lowest one of its quarters before."""
_MIN_TREND_VALUES: Final = 16


@dataclass(frozen=True)
class Condition:
    """A bound on a metric, or on its share of another metric.

    Attributes:
        key: The metric.
        bound: The limit.
        of: The metric that `key` is divided by; None to compare the value itself.
        is_above: Whether the value must be above the bound, or below it.
    """

    key: str
    bound: float
    of: str | None = None
    is_above: bool = True

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the bound is crossed; False if a metric is missing or not finite."""
        value, whole = metrics.get(self.key, math.nan), 1.0 if self.of is None else metrics.get(self.of, math.nan)
        if not (math.isfinite(value) and math.isfinite(whole)) or whole == 0.0:
            return False
        return value / whole > self.bound if self.is_above else value / whole < self.bound

    @property
    def text(self) -> str:
        """The condition in words."""
        side = "above" if self.is_above else "below"
        return (
            f"{self.key} {side} {self.bound:g}"
            if self.of is None
            else f"{self.key} {side} {self.bound:.0%} of {self.of}"
        )


@dataclass(frozen=True)
class Symptom:
    """A row of the table.

    Attributes:
        name: Its name in reports.
        text: What one sees.
        bottleneck: What limits the run.
        remedies: What to try, most promising first.
        conditions: All of them hold if the row applies.
    """

    name: str
    text: str
    bottleneck: str
    remedies: tuple[str, ...]
    conditions: tuple[Condition, ...]

    def applies(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether all conditions hold."""
        return all(condition.holds(metrics) for condition in self.conditions)


def _share(part: str, bound: float) -> Condition:
    return Condition(f"time/{part}_ms", bound, of="time/step_ms")


SYMPTOMS: Final = (
    Symptom(
        "data_wait",
        "steps wait for data",
        "the data loader: tokenizing, decompressing, or the disk",
        ("more workers or a deeper prefetch", "prepare the corpus in advance", "a local disk for the data"),
        (_share("data_wait", 0.05),),
    ),
    Symptom(
        "transfer",
        "copies of batches to the device take long",
        "the bus between host and device, or memory that is not page-locked",
        ("pinned memory in the loader", "fewer and larger tensors in a batch", "smaller types for ids and masks"),
        (_share("transfer", 0.03),),
    ),
    Symptom(
        "communication",
        "steps wait for other ranks",
        "the network between ranks, or a rank that is slower than the others",
        (
            "more micro-batches for each step, so that gradients are reduced less often",
            "the device and data metrics of each rank: one may be throttled or wait for data",
            "a sharding that stays within a machine",
        ),
        (_share("communication", 0.15),),
    ),
    Symptom(
        "bubble",
        "the ranks of a pipeline wait for each other",
        "too few micro-batches for the number of ranks, or a stage that takes longer than the others",
        ("more micro-batches for each step", "several stages on each rank", "fewer layers on the slowest stage"),
        (Condition("parallel/bubble_share", 0.2),),
    ),
    Symptom(
        "optimizer",
        "the optimizer takes a large share of a step",
        "the update of all parameters, which does not depend on the batch",
        ("a fused optimizer", "more tokens for each step", "a sharded optimizer state"),
        (_share("optimizer", 0.25),),
    ),
    Symptom(
        "save_stall",
        "saves stop training",
        "staging into memory, or a writer that is slower than the interval of saves",
        ("less frequent saves", "a faster disk", "checkpoint mode process, with overlapped staging"),
        (_share("save_stall", 0.02),),
    ),
    Symptom(
        "generation",
        "rollouts take more time than training",
        "generation of answers, which is bound by memory bandwidth",
        ("more rows in a batch of generation", "shorter answers", "several updates for each rollout"),
        (_share("generation", 0.5),),
    ),
    Symptom(
        "other",
        "much of a step is none of its known parts",
        "callbacks, loggers, Python code between the hooks",
        ("a trace of a few steps (TraceSteps)", "a larger log interval", "fewer callbacks that run in each batch"),
        (_share("other", 0.15),),
    ),
    Symptom(
        "device_idle",
        "the device often does nothing",
        "the host: it launches kernels too slowly, or waits for the device in each step",
        ("larger micro-batches", "compiled blocks", "a trace of a few steps (TraceSteps) to find waits"),
        (Condition("device/utilisation", 0.8, is_above=False),),
    ),
    Symptom(
        "low_mfu",
        "the device is busy but MFU is low",
        "memory bandwidth, small matrix products, or float32 arithmetic",
        ("bf16-mixed precision", "larger micro-batches", "compiled blocks", "no recomputation if memory allows"),
        (Condition("device/utilisation", 0.9), Condition("train/mfu", 0.25, is_above=False)),
    ),
    Symptom(
        "throttled",
        "the device lowers its clocks",
        "heat or a power limit",
        ("better cooling", "the power limit of the device (nvidia-smi -q -d POWER)", "other work on the same machine"),
        (Condition("device/throttled", 0.05),),
    ),
    Symptom(
        "fragmentation",
        "the allocator holds much memory that no tensor uses",
        "tensors of changing sizes",
        ("PYTORCH_ALLOC_CONF=expandable_segments:True", "rows of one length", "a smaller micro-batch"),
        (Condition("memory/fragmentation", 0.2),),
    ),
    Symptom(
        "memory_grows",
        "the process needs more memory with every step",
        "references that are kept: lists of losses with their graphs, caches, worker processes",
        ("detach what a callback keeps", "fewer loader workers", "memory/resident_bytes beside the steps of saves"),
        (Condition("memory/resident_slope", 262144.0),),
    ),
    Symptom(
        "page_faults",
        "the process reads memory back from disk",
        "too little host memory: swapped pages, or mapped files that do not stay in the page cache",
        ("more host memory", "fewer processes on the machine", "smaller shards or a smaller corpus per machine"),
        (Condition("memory/major_page_faults", 10.0),),
    ),
    Symptom(
        "step_time_rises",
        "steps get slower during the run",
        "a part that grows (compare time/*), throttling, growing memory, or another process",
        ("the part of time/* that rose most", "device/throttled", "memory/resident_slope"),
        (Condition(STEP_TIME_TREND, 1.25),),
    ),
    Symptom(
        "loss_rises",
        "the loss has risen again",
        "training diverges",
        ("a lower learning rate", "a longer warm-up", "the steps of gradient/spikes, and their data"),
        (Condition(LOSS_TREND, 1.05),),
    ),
    Symptom(
        "spikes",
        "the gradient norm has spikes",
        "single batches, or a learning rate at the limit",
        ("a lower learning rate", "clipping of the norm (trainer.gradient_clip_val)", "a look at the data of the step"),
        (Condition("gradient/spikes", 3.0),),
    ),
    Symptom(
        "nonfinite",
        "gradients are infinite or not a number",
        "an overflow in the module that the event nonfinite_gradient names",
        ("bf16-mixed instead of 16-mixed", "a lower learning rate", "a look at that module's inputs"),
        (Condition("gradient/nonfinite", 0.0),),
    ),
)


def find_symptoms(metrics: Mapping[str, float]) -> list[Symptom]:
    """Returns the rows that apply, in the order of the table.

    Args:
        metrics: Values by key, such as those of a log line, or the result of `summarize_series`.

    Example:
        >>> [row.name for row in find_symptoms({"time/step_ms": 100.0, "time/data_wait_ms": 30.0})]
        ['data_wait']
    """
    return [symptom for symptom in SYMPTOMS if symptom.applies(metrics)]


def summarize_series(series: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns one value for each key of a run's log: medians, last values of counts, and the two trends.

    Args:
        series: All logged values by key, in order; values that are not finite are left out.

    Example:
        >>> summarize_series({"time/step_ms": [1.0, 2.0, 9.0]})
        {'time/step_ms': 2.0}
    """
    finite = {key: [value for value in values if math.isfinite(value)] for key, values in series.items()}
    summary = {key: statistics.median(values) for key, values in finite.items() if values}
    summary |= {key: finite[key][-1] for key in _COUNTS if finite.get(key)}
    steps, losses = finite.get("time/step_ms", ()), finite.get("train/loss", ())
    trends = {STEP_TIME_TREND: _compute_trend(steps, "first"), LOSS_TREND: _compute_trend(losses, "lowest")}
    return summary | {key: trend for key, trend in trends.items() if trend is not None}


_COUNTS: Final = ("gradient/spikes", "gradient/skips", "gradient/nonfinite")


def _compute_trend(values: Sequence[float], reference: Literal["first", "lowest"]) -> float | None:
    """Returns the last quarter's median over that of the first half, or over the lowest quarter's before; or None."""
    if len(values) < _MIN_TREND_VALUES:
        return None
    size = len(values) // 4
    last = statistics.median(values[-size:])
    if reference == "first":
        before = statistics.median(values[: 2 * size])
    else:
        before = min(statistics.median(values[start : start + size]) for start in (0, size, 2 * size))
    return last / before if before > 0 else None


def render_table() -> str:
    """Returns the table in Markdown."""
    lines = ["| Symptom | Metrics | Bottleneck | What to try |", "|---|---|---|---|"]
    for row in SYMPTOMS:
        metrics = "; ".join(f"`{condition.text}`" for condition in row.conditions)
        lines.append(f"| {row.text} | {metrics} | {row.bottleneck} | {'; '.join(row.remedies)} |")
    return "\n".join(lines)
