"""Measures what each telemetry callback costs a training step, in one fit whose bursts have different callbacks.

The model, the batch and the interval of the log are those of the demo's recipe. In each round every contender trains
one burst: without telemetry, with one callback, with all that `genesis fit` has by default. A ratio compares two
bursts of the same round, so that the machine's speed matters little; the first step of a burst is left out. The CPU
time of the training thread within the callbacks' own code is recorded, too: it hardly varies where other processes run.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl

from benchmarks import harness
from genesis.base.device import CPU, check_available, name_device
from genesis.base.run_directory import RunDirectory
from genesis.model.decoder import DecoderConfig
from genesis.operations.doctor.fits import Size, build_trainer, random_windows
from genesis.operations.doctor.probe import Task
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis.train.telemetry import TelemetryOptions, build_telemetry
from genesis.train.training_log import TrainingLog

_SIZE: Final = Size(
    DecoderConfig(vocab_size=2048, dim=192, num_layers=4, num_heads=6, num_kv_heads=2, ffn_dim=512, max_seq_len=256), 4
)
_SMALL: Final = Size(
    DecoderConfig(vocab_size=64, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, max_seq_len=16), 1
)
_LOG_EVERY_N_STEPS: Final = 5
_NOTHING, _EVERYTHING = "nothing", "everything"
_OPTIONS: Final = ("throughput", "step_timer", "memory", "loss", "gradient")
_COUNTED: Final = (
    *("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"),
    *("begin_part", "end_part", "_begin_action", "_end_action", "observe"),
)
_LIMIT_ONE, _LIMIT_ALL = 0.005, 0.01


class OwnTime:
    """The CPU time of the training thread within callbacks, counted at the outermost call.

    Args:
        callbacks: Callbacks whose hooks and parts of a step are counted from now on.
    """

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self._seconds = 0.0
        self._depth = 0
        for callback in callbacks:
            for name in _COUNTED:
                own = getattr(callback, name, None)
                if own is not None and getattr(type(callback), name) is not getattr(pl.Callback, name, None):
                    setattr(callback, name, self._count(own))

    def take_seconds(self) -> float:
        """Returns the time since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._depth:
                return function(*arguments, **options)
            self._depth += 1
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self._depth -= 1
                self._seconds += time.thread_time() - begin

        return counted


class _Bursts(pl.Callback):
    """Gives the Trainer the callbacks of one contender after another, and measures the steps between.

    Args:
        contenders: The callbacks by the name of the contender.
        num_rounds: How often each of them trains.
        num_steps: The measured steps of a burst.
    """

    def __init__(self, contenders: dict[str, list[pl.Callback]], num_rounds: int, num_steps: int) -> None:
        self._contenders, self._num_steps = contenders, num_steps
        self._turns = list(chain(*(harness.rotate_order(list(contenders), index) for index in range(num_rounds))))
        self._own: list[pl.Callback] = []
        self._others: list[pl.Callback] | None = None
        self._num_done = 0
        self._from: float | None = None
        self.wall_ms: dict[str, list[float]] = {name: [] for name in contenders}
        self.own_ms: dict[str, list[float]] = {name: [] for name in contenders}
        self._meters = {name: OwnTime(callbacks) for name, callbacks in contenders.items()}

    @property
    def total_steps(self) -> int:
        """The steps of all bursts, and one to warm up."""
        return 1 + len(self._turns) * (self._num_steps + 1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a burst after its last step and begins the next one."""
        if self._from is None:  # the first step of the fit, or of a burst
            self._from = time.perf_counter()
            self._meters[self._turns[0]].take_seconds()
            if self._others is None:
                self._begin(trainer, pl_module)
                self._from = None
            return
        self._num_done += 1
        if self._num_done < self._num_steps:
            return
        wall, name = time.perf_counter() - self._from, self._turns.pop(0)
        self.wall_ms[name].append(1e3 * wall / self._num_steps)
        self.own_ms[name].append(1e3 * self._meters[name].take_seconds() / self._num_steps)
        for callback in self._own:
            callback.on_train_end(trainer, pl_module)
        self._num_done, self._from = 0, None
        if self._turns:
            self._begin(trainer, pl_module)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
        if self._others is None:
            self._others = list(callbacks)
        self._own = self._contenders[self._turns[0]]
        # A new list: Lightning goes through the old one at this moment.
        vars(trainer)["callbacks"] = [*self._own, *self._others]
        for callback in (*self._own, *(each for each in self._others if isinstance(each, TrainingLog))):
            callback.on_train_start(trainer, pl_module)


def measure(device: str, num_rounds: int, num_steps: int, *, is_small: bool, out: Path) -> _Bursts:
    """Returns the times of all contenders, measured in one fit.

    Args:
        device: What trains.
        num_rounds: Rounds of bursts.
        num_steps: Steps of a burst.
        is_small: Whether to train a tiny model, to try the benchmark out.
        out: A directory for the fit's log.
    """
    off: dict[str, Any] = {**dict.fromkeys(_OPTIONS, False), "hang_seconds": None}
    contenders: dict[str, Callable[[], list[pl.Callback]]] = {
        _NOTHING: list,
        **{
            name: lambda name=name: build_telemetry(TelemetryOptions(**{**off, name: True}), out)  # type: ignore[misc]
            for name in _OPTIONS
        },
        _EVERYTHING: lambda: build_telemetry(TelemetryOptions(hang_seconds=None), out),
    }
    bursts = _Bursts({name: build() for name, build in contenders.items()}, num_rounds, num_steps)
    size = _SMALL if is_small else _SIZE
    trainer = build_trainer(
        Task(device, "", str(out)),
        Replicated(),
        bursts.total_steps,
        [bursts],
        log_every_n_steps=_LOG_EVERY_N_STEPS,
        limit_val_batches=0,
        logger=CSVLog(RunDirectory(out).metrics),
    )
    module = GenesisModule(size.decoder, OptimizerOptions(name="adamw" if is_small else "muon"))
    trainer.fit(module, datamodule=random_windows(size))
    return bursts


def summarise(bursts: _Bursts) -> dict[str, Any]:
    """Returns for each contender the overheads in wall and in CPU time."""
    found: dict[str, Any] = {}
    idle = statistics.median(bursts.wall_ms[_NOTHING])
    for name in (*_OPTIONS, _EVERYTHING):
        ratio = harness.compare_pairs(bursts.wall_ms[name], bursts.wall_ms[_NOTHING])
        own_ms = statistics.median(bursts.own_ms[name])
        found[name] = {
            "wall_overhead": round(ratio.median - 1, 5),
            "interval": None if ratio.low is None or ratio.high is None else [ratio.low - 1, ratio.high - 1],
            "own_overhead": round(own_ms / idle, 6),
            "own_microseconds_per_step": round(1e3 * own_ms, 1),
        }
    return {"step_ms_without": round(idle, 3), "overheads": found}


def format_record(record: dict[str, Any]) -> str:
    """Returns the record as a page of Markdown."""
    notes = [
        f"{record['rounds']} rounds of bursts of {record['steps_per_burst']} steps; a step without telemetry takes "
        f"{record['step_ms_without']} ms, with a log line every {record['log_every_n_steps']} steps",
        "own time is the CPU time of the training thread within the callback's own code, over the step; wall time is "
        "the median of paired ratios of bursts, with its 95% interval",
    ]
    rows = [
        [
            name,
            f"{row['own_overhead']:.3%}",
            f"{row['own_microseconds_per_step']:.0f} µs",
            f"{row['wall_overhead']:+.2%}",
            "-" if row["interval"] is None else " to ".join(f"{value:+.2%}" for value in row["interval"]),
        ]
        for name, row in record["overheads"].items()
    ]
    table = harness.format_table(("callbacks", "own time", "per step", "wall time", "interval"), rows)
    return harness.format_page("Overhead of the telemetry callbacks", record, notes, table)


def main(argv: list[str]) -> int:
    """Measures and prints; the exit status is 1 if an own time is above its limit."""
    parser = harness.build_parser("telemetry", __doc__)
    parser.add_argument("--device", default=CPU, help="what trains: cpu, cuda ... (default %(default)s)")
    harness.add_counts(parser, rounds=(14, "rounds of bursts"), steps=(30, "measured steps of a burst"))
    parser.add_argument("--small", action="store_true", help="train a tiny model, to try the benchmark out")
    options = parser.parse_args(argv)
    check_available(options.device)
    harness.check_counts(options, "rounds", "steps")
    with tempfile.TemporaryDirectory() as directory:
        bursts = measure(options.device, options.rounds, options.steps, is_small=options.small, out=Path(directory))
    what = "overhead of the telemetry callbacks on the demo's training step, bursts in turn within one fit"
    record = harness.begin_record("telemetry", what, argv, ("torch", "lightning"), name_device(options.device))
    record |= {
        "rounds": options.rounds,
        "steps_per_burst": options.steps,
        "log_every_n_steps": _LOG_EVERY_N_STEPS,
        "limits": {"one": _LIMIT_ONE, "all": _LIMIT_ALL},
        **summarise(bursts),
    }
    harness.finish(record, format_record, options.out)
    limits = {name: _LIMIT_ALL if name == _EVERYTHING else _LIMIT_ONE for name in record["overheads"]}
    too_much = [name for name, row in record["overheads"].items() if row["own_overhead"] > limits[name]]
    return int(bool(too_much) and not options.small)
