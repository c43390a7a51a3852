"""Measures what each telemetry callback costs a training step, in one fit whose bursts have different callbacks.

    genesis bench telemetry --out benchmarks/records/telemetry-demo-cpu

The model, the batch and the interval of the log are those of the demo's recipe. In each round every contender trains
one burst: without telemetry, with one callback, with all that `genesis fit` has by default. A ratio compares two
bursts of the same round, so that the machine's speed matters little; the first step of a burst is left out. The CPU
time of the training thread within the callbacks' own code is recorded, too: it hardly varies where other processes run.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np

from genesis.base.arguments import Parser
from genesis.base.device import CPU, check_available, is_host, name_device
from genesis.base.run_directory import RunDirectory
from genesis.bench.pairs import compare_pairs, rotate_order
from genesis.bench.record import anonymise, describe_hardware, write_record
from genesis.data.loader import SequenceFormat, WindowLoader, build_window
from genesis.data.window import AccumulationWindow
from genesis.model.decoder import DecoderConfig
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated
from genesis.train.accelerators import build_accelerator
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis.train.telemetry import TelemetryOptions, build_telemetry
from genesis.train.training_log import TrainingLog
from genesis_callbacks import SkipAwareLR, TokenCounters

_DECODER: Final = DecoderConfig(
    vocab_size=2048, dim=192, num_layers=4, num_heads=6, num_kv_heads=2, ffn_dim=512, max_seq_len=256
)
_SMALL: Final = DecoderConfig(
    vocab_size=64, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, max_seq_len=16
)
_BATCH_SIZE: Final = 8
_LOG_EVERY_N_STEPS: Final = 5
_NUM_WINDOWS: Final = 16
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
        orders = [rotate_order(list(contenders), index) for index in range(num_rounds)]
        self._turns = [name for order in orders for name in order]
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


class _Windows(pl.LightningDataModule):
    """Random windows of packed documents, made before training."""

    def __init__(self, decoder: DecoderConfig, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps
        seq_len = decoder.max_seq_len
        form = SequenceFormat(seq_len, 0, np.ones(decoder.vocab_size, np.uint8), np.dtype(np.uint16))
        generator = np.random.default_rng(0)
        self._windows: list[AccumulationWindow] = []
        for index in range(_NUM_WINDOWS):
            rows = generator.integers(decoder.vocab_size, size=(_BATCH_SIZE, seq_len + 1), dtype=np.uint16)
            ends = generator.random((_BATCH_SIZE, seq_len)) < 4 / seq_len
            self._windows.append(build_window(rows, form, _BATCH_SIZE, _BATCH_SIZE * (index + 1), ends))

    def train_dataloader(self) -> WindowLoader:
        """Returns more windows than the fit takes."""
        return self._build_loader(self._num_steps + 8)

    def val_dataloader(self) -> WindowLoader:
        """Returns a window, which no validation reads: without a loader, Lightning warns."""
        return self._build_loader(1)

    def _build_loader(self, count: int) -> WindowLoader:
        pins = self.trainer is not None and not is_host(self.trainer.strategy.root_device.type)
        return WindowLoader(lambda index: self._windows[index % _NUM_WINDOWS], lambda: range(count), count, 2, pins)


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
    decoder = _SMALL if is_small else _DECODER
    num_all = bursts.total_steps
    trainer = pl.Trainer(
        accelerator=build_accelerator(device),
        devices=1,
        strategy=Replicated(),
        max_steps=num_all,
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=_LOG_EVERY_N_STEPS,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(out),
        logger=CSVLog(RunDirectory(out).metrics),
        callbacks=[TokenCounters(), SkipAwareLR(warmup_updates=1), bursts],
    )
    module = GenesisModule(decoder, OptimizerOptions(name="adamw" if is_small else "muon"))
    trainer.fit(module, datamodule=_Windows(decoder, num_all))
    return bursts


def build_record(bursts: _Bursts, device: str, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Returns the record: for each contender, the overheads in wall and in CPU time."""
    found: dict[str, Any] = {}
    idle = statistics.median(bursts.wall_ms[_NOTHING])
    for name in (*_OPTIONS, _EVERYTHING):
        ratio = compare_pairs(bursts.wall_ms[name], bursts.wall_ms[_NOTHING])
        own_ms = statistics.median(bursts.own_ms[name])
        found[name] = {
            "wall_overhead": round(ratio.median - 1, 5),
            "interval": None if ratio.low is None or ratio.high is None else [ratio.low - 1, ratio.high - 1],
            "own_overhead": round(own_ms / idle, 6),
            "own_microseconds_per_step": round(1e3 * own_ms, 1),
        }
    return {
        "what": "overhead of the telemetry callbacks on the demo's training step, bursts in turn within one fit",
        "command": " ".join(["genesis", "bench", "telemetry", *anonymise(sys.argv[3:])]),
        "hardware": describe_hardware(CPU if device == CPU else name_device(device)),
        "versions": {name: version(name) for name in ("torch", "lightning")},
        "rounds": num_rounds,
        "steps_per_burst": num_steps,
        "log_every_n_steps": _LOG_EVERY_N_STEPS,
        "step_ms_without": round(idle, 3),
        "limits": {"one": _LIMIT_ONE, "all": _LIMIT_ALL},
        "overheads": found,
    }


def render_page(record: dict[str, Any]) -> str:
    """Returns the record as a page of Markdown."""
    lines = [
        "# Overhead of the telemetry callbacks",
        "",
        f"`{record['command']}` on {record['hardware']}: {record['rounds']} rounds of bursts of "
        f"{record['steps_per_burst']} steps; a step without telemetry takes {record['step_ms_without']} ms, with a log "
        f"line every {record['log_every_n_steps']} steps.",
        "",
        "Own time is the CPU time of the training thread within the callback's own code, over the step. Wall time is",
        "the median of paired ratios of bursts, with its 95% interval.",
        "",
        "| callbacks | own time | per step | wall time | interval |",
        "|---|---|---|---|---|",
    ]
    for name, row in record["overheads"].items():
        interval = "-" if row["interval"] is None else " to ".join(f"{value:+.2%}" for value in row["interval"])
        lines.append(
            f"| {name} | {row['own_overhead']:.3%} | {row['own_microseconds_per_step']:.0f} µs |"
            f" {row['wall_overhead']:+.2%} | {interval} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit status is 1 if an own time is above its limit."""
    parser = Parser(prog="genesis bench telemetry", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default=CPU, help="what trains: cpu, cuda ... (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=14, help="rounds of bursts (default %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of a burst (default %(default)s)")
    parser.add_argument("--small", action="store_true", help="train a tiny model, to try the benchmark out")
    parser.add_argument("--out", type=Path, help="file for the record without suffix: .json and .md are added")
    arguments = parser.parse_args(argv)
    check_available(arguments.device)
    with tempfile.TemporaryDirectory() as directory:
        bursts = measure(
            arguments.device, arguments.rounds, arguments.steps, is_small=arguments.small, out=Path(directory)
        )
    record = build_record(bursts, arguments.device, arguments.rounds, arguments.steps)
    page = render_page(record)
    print(page)
    if arguments.out is not None:
        write_record(record, page, arguments.out)
    limits = {name: _LIMIT_ALL if name == _EVERYTHING else _LIMIT_ONE for name in record["overheads"]}
    too_much = [name for name, row in record["overheads"].items() if row["own_overhead"] > limits[name]]
    return int(bool(too_much) and not arguments.small)
