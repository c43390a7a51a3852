"""Times training steps around a save: compares genesis' and torch's ways to save with a trainer that saves nothing.

Each mode is a process (or a process for each rank) with a real Trainer that trains the same decoder on the same random
tokens. The modes take turns in a rotating order. A turn is a few windows, the first of which ends with a save, and the
turn ends only when the save is complete. So no mode trains during another mode's write, and every overhead is computed
within a round (`genesis.bench.pairs`). With adapters, all modes train them beside one base, and saves hold them alone.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, Self

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.device import CPU, check_available, count_devices
from genesis.base.errors import UserError
from genesis.bench.checkpoint_modes import MODES, choose_modes, name_default_modes
from genesis.bench.checkpoint_plot import plot_steps
from genesis.bench.checkpoint_report import build_record, build_tables, format_page, list_findings
from genesis.bench.checkpoint_results import ModeRun, merge_ranks, summarise
from genesis.bench.contenders import WorkerProcess
from genesis.bench.pairs import rotate_order
from genesis.bench.record import anonymise, describe_hardware
from genesis.bench.step import MODELS as STEP_MODELS
from genesis.bench.step import Recipe, plan_workload, read_recipe
from genesis.bench.workers.checkpoint_protocol import Farewell, Mode, Task, TrainerReady, Turn
from genesis.bench.workers.protocol import Workload
from genesis.export.importing import save_weights
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.describe import describe
from genesis.model.recipe import read_recipe_adapter
from genesis.optim import OptimizerOptions

MODELS = {
    # Parameters and AdamW's moments in float32 are half a gigabyte, and a step takes about 1.4 s on two cores.
    "43m": Recipe(
        DecoderConfig(
            vocab_size=10240, dim=768, num_layers=5, num_heads=12, num_kv_heads=12, ffn_dim=2048, max_seq_len=256
        ),
        OptimizerOptions(),
        seq_len=256,
        micro_batch_size=3,
        precision="32-true",
    ),
    "600m": Recipe(  # 604 million parameters: 7.2 GB of state
        DecoderConfig(
            vocab_size=49152,
            dim=1536,
            num_layers=16,
            num_heads=12,
            num_kv_heads=12,
            ffn_dim=4096,
            max_seq_len=1024,
            has_tied_embeddings=False,
        ),
        OptimizerOptions(),
        seq_len=1024,
        micro_batch_size=8,
        precision="auto",
    ),
    "tiny": STEP_MODELS["tiny"],
    "smollm2-135m": Recipe(
        DecoderConfig(
            vocab_size=49152,
            dim=576,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            ffn_dim=1536,
            max_seq_len=256,
            has_tied_embeddings=True,
        ),
        OptimizerOptions(),
        seq_len=64,
        micro_batch_size=1,
        precision="32-true",
    ),
}

_WORKER = "genesis.bench.workers.checkpoint_trainer"
_PAUSE_SECONDS = 0.1  # a contender's threads spin for a moment after their last work
_PLAIN_WIDTH = 200  # columns of the output if it is not a terminal
_STATE_BYTES_PER_PARAMETER = 12
_CHECKPOINTS_AT_ONCE = 3  # the last checkpoint, the one being written, and one being deleted


class Team:
    """All ranks of one mode. Leaving the context ends them.

    Args:
        tasks: A task for each rank.
        log_dir: Directory for the output of the ranks.
        environment: Environment variables in addition to this process's.
    """

    def __init__(self, tasks: Sequence[Task], log_dir: Path, environment: Mapping[str, str] | None = None) -> None:
        self.mode = tasks[0].mode
        self._tasks = tasks
        self._log_dir = log_dir
        self._environment = environment or {}
        self._stack = ExitStack()
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        """Starts the workers, which import and warm up without further messages."""
        for task in self._tasks:
            numbers = {"RANK": task.rank, "LOCAL_RANK": task.rank, "WORLD_SIZE": task.num_ranks, "NODE_RANK": 0}
            worker = WorkerProcess(
                f"{self.mode.name} (rank {task.rank})",
                [sys.executable, "-m", _WORKER, task.to_json()],
                self._log_dir / f"{self.mode.name}-{task.rank}.log",
                task.workload.num_threads,
                {**self._environment, **{name: str(number) for name, number in numbers.items()}},
            )
            self._workers.append(self._stack.enter_context(worker))
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the workers."""
        self._stack.close()

    def wait_until_ready(self) -> TrainerReady:
        """Waits until all ranks are ready for their first turn, and returns rank 0's answer."""
        answers = [TrainerReady(**worker.receive()) for worker in self._workers]
        return answers[0]

    def take_turn(self, num_windows: int) -> Turn:
        """Returns the measurements of all ranks over `num_windows` windows and one save."""
        for worker in self._workers:
            worker.send(f"go {num_windows}")
        return merge_ranks([Turn(**worker.receive()) for worker in self._workers])

    def stop(self) -> Farewell:
        """Ends training, and returns rank 0's final message."""
        for worker in self._workers:
            worker.send("quit")
        farewells = [Farewell(**worker.receive()) for worker in self._workers]
        for worker in self._workers:
            worker.wait()
        return farewells[0]


def main(argv: list[str]) -> int:
    """Measures, prints tables and writes the record to the path of `--out`."""
    options = _parse(argv)
    recipe = read_recipe(options.config) if options.config else MODELS[options.model]
    adapter = _choose_adapter(options)
    modes, left_out = choose_modes(options.modes, options.device, options.ranks, has_adapter=adapter is not None)
    console = Console(stderr=True)
    for name, reason in left_out.items():
        console.print(f"{name} is left out: it {reason}", highlight=False)
    workload = plan_workload(recipe, options, num_warmup_steps=options.every_n_steps - 1)
    _prepare_directory(options.dir, len(modes), describe(recipe.decoder).num_parameters)
    ready, runs = _run(modes, workload, adapter, options, console)
    results = summarise(runs, ready.num_parameters, workload.tokens_per_window * options.ranks)
    title = _title(workload, options, ready.num_parameters, adapter)
    findings = list_findings(runs, results, options.device)
    out = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    for table in build_tables(title, results):
        out.print(table)
    for finding in findings:
        out.print(finding, highlight=False)
    if options.out is not None:
        settings = _describe_settings(argv, options, workload, ready, left_out)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = build_record(settings, runs, results, findings)
        options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        picture = options.out.with_suffix(".png")
        plot_steps({run.mode.name: [turn.step_seconds for turn in run.turns] for run in runs}, title, picture)
        page = format_page(title, settings, results, runs, findings, picture.name)
        options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="genesis bench checkpoint", description=(__doc__ or "").split("\n", 1)[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=MODELS, default="43m", help="name of a model shape (default %(default)s)")
    what.add_argument("--config", type=Path, help="recipe file, such as configs/genesis-1b.yaml")
    parser.add_argument(
        "--adapter_rank",
        type=int,
        metavar="RANK",
        help="train LoRA adapters of this rank beside frozen weights, and save the adapters alone (default: the "
        "recipe's adapters, if it has some)",
    )
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        help=f"modes to compare, from {', '.join(mode.name for mode in MODES)}; default on one rank: every way to "
        f"save; on several ranks: {', '.join(name_default_modes(2))}",
    )
    parser.add_argument("--pairs", type=int, default=6, help="number of rounds (default %(default)s)")
    parser.add_argument(
        "--every_n_steps",
        type=int,
        default=5,
        help="windows per turn; the first ends with a save (default %(default)s)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks per mode (default %(default)s)")
    parser.add_argument("--strategy", choices=("replicated", "sharded"), default="replicated")
    parser.add_argument("--micro_batch_size", type=int, help="sequences per micro-batch (default: the recipe's)")
    parser.add_argument("--micro_batches", type=int, default=1, help="micro-batches per window (default %(default)s)")
    parser.add_argument(
        "--threads", type=int, help="CPU threads per rank (default: all cores, divided among the ranks)"
    )
    parser.add_argument(
        "--device", default=CPU, help="cpu, cuda or another kind that torch finds (default %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=("32-true", "bf16-mixed"), help="training precision (default: the recipe's)"
    )
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/bench"), help="directory for temporary checkpoints (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, help="file for the record, such as benchmarks/records/checkpoint-43m-cpu.json"
    )
    options = parser.parse_args(argv)
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // max(1, options.ranks))
    options.modes = options.modes or name_default_modes(options.ranks)
    for name, least in (("pairs", 1), ("every_n_steps", 2), ("ranks", 1), ("micro_batches", 1), ("threads", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} is {getattr(options, name)}: it must be at least {least}")
    if options.adapter_rank is not None and options.adapter_rank < 1:
        raise UserError(f"--adapter_rank is {options.adapter_rank}: it must be at least 1")
    _check_device(options)
    return options


def _choose_adapter(options: argparse.Namespace) -> AdapterConfig | None:
    """Returns the adapters to train; None to train all weights."""
    if options.adapter_rank is not None:
        return AdapterConfig(rank=options.adapter_rank, alpha=2.0 * options.adapter_rank)
    return None if options.config is None else read_recipe_adapter(options.config)


def _check_device(options: argparse.Namespace) -> None:
    check_available(options.device)
    if options.device != CPU and count_devices(options.device) < options.ranks:
        raise UserError(f"--ranks is {options.ranks} and torch finds {count_devices(options.device)} GPUs: lower it")


# ---- the measurement


def _prepare_directory(directory: Path, num_modes: int, num_parameters: int) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"--dir is {directory}, which is not a directory: give another") from error
    needed_bytes = num_modes * _CHECKPOINTS_AT_ONCE * _STATE_BYTES_PER_PARAMETER * num_parameters
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{directory} has {free_bytes / 1e9:.1f} GB free and the checkpoints of {num_modes} modes take up to "
            f"{needed_bytes / 1e9:.1f}: give another disk by --dir, or fewer modes by --modes"
        )


def _run(
    modes: Sequence[Mode],
    workload: Workload,
    adapter: AdapterConfig | None,
    options: argparse.Namespace,
    console: Console,
) -> tuple[TrainerReady, list[ModeRun]]:
    """Returns a description of the trainers, and the measurements of each mode."""
    turns: dict[str, list[Turn]] = {mode.name: [] for mode in modes}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True))
        beside = None if adapter is None else asdict(_write_base(adapter, workload, Path(directory).resolve() / "base"))
        teams = [
            stack.enter_context(Team(_plan_tasks(mode, workload, options, Path(directory), beside), Path(directory)))
            for mode in modes
        ]
        console.print(f"{len(teams)} trainers start", highlight=False)
        answers = [team.wait_until_ready() for team in teams]
        firsts = {}
        for team in teams:
            firsts[team.mode.name] = first = _take_turn(team, options.every_n_steps)
            found = "" if first.save_seconds is None else f", first save complete after {first.save_seconds:.1f} s"
            console.print(f"warmed up {team.mode.name}{found}", highlight=False)
        for round_index in range(options.pairs):
            for team in rotate_order(teams, round_index):
                turns[team.mode.name].append(_take_turn(team, options.every_n_steps))
            means = [f"{name} {sum(of[-1].step_seconds) / options.every_n_steps:.3f}" for name, of in turns.items()]
            console.print(f"round {round_index + 1}/{options.pairs}, s per step: {', '.join(means)}", highlight=False)
        farewells = {team.mode.name: team.stop() for team in teams}
    return answers[0], [ModeRun(mode, firsts[mode.name], turns[mode.name], farewells[mode.name]) for mode in modes]


def _write_base(adapter: AdapterConfig, workload: Workload, directory: Path) -> AdapterConfig:
    """Commits random weights as the base of the adapters, and returns the adapters with this base."""
    config = DecoderConfig(**workload.decoder)
    decoder = Decoder(config)
    decoder.init_weights(seed=0)  # that of the trainers
    directory.mkdir()
    base = save_weights(decoder.state_dict(), config, None, directory / "checkpoints")
    return replace(adapter, base=str(base), start=None)


def _plan_tasks(
    mode: Mode, workload: Workload, options: argparse.Namespace, directory: Path, adapter: dict[str, Any] | None
) -> list[Task]:
    run_dir = directory / mode.name
    run_dir.mkdir()
    strategy: Literal["replicated", "sharded"] = options.strategy
    if mode.has_own_cores:
        workload = replace(workload, num_threads=min(workload.num_threads, len(os.sched_getaffinity(0)) - 1))
    return [
        Task(mode, workload, strategy, options.every_n_steps, str(run_dir.resolve()), rank, options.ranks, adapter)
        for rank in range(options.ranks)
    ]


def _take_turn(team: Team, num_windows: int) -> Turn:
    time.sleep(_PAUSE_SECONDS)
    return team.take_turn(num_windows)


# ---- the description of the run


def _title(workload: Workload, options: argparse.Namespace, num_parameters: int, adapter: AdapterConfig | None) -> str:
    beside = "" if adapter is None else f" with adapters of rank {adapter.rank}, which are saved alone"
    ranks = "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"
    return (
        f"{num_parameters:,} parameters{beside}, {workload.num_micro_batches} x {workload.micro_batch_size} sequences "
        f"of {workload.seq_len} on {ranks} ({options.strategy}), {workload.precision}, {workload.device}, "
        f"a save every {options.every_n_steps} steps"
    )


def _describe_settings(
    argv: Sequence[str], options: argparse.Namespace, workload: Workload, ready: TrainerReady, left_out: dict[str, str]
) -> dict[str, Any]:
    return {
        "command": shlex.join(["genesis", "bench", "checkpoint", *anonymise(argv)]),
        "date": date.today().isoformat(),
        "hardware": describe_hardware(ready.device_name),
        "versions": ready.versions,
        "workload": asdict(workload),
        "strategy": options.strategy,
        "ranks": options.ranks,
        "num_threads": workload.num_threads,
        "num_parameters": ready.num_parameters,
        "pairs": options.pairs,
        "every_n_steps": options.every_n_steps,
        "left_out": left_out,
    }
