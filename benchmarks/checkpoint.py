"""Times training steps around a save: compares genesis' and torch's ways to save with a trainer that saves nothing.

Each mode is a process (or a process for each rank) with a real Trainer that trains the same decoder on the same random
tokens. The modes take turns in a rotating order. A turn is a few windows, the first of which ends with a save, and the
turn ends only when the save is complete. So no mode trains during another mode's write, and every overhead is computed
within a round. With adapters, all modes train them beside one base, and saves hold them alone.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Self

from benchmarks import harness
from benchmarks.checkpoint_results import (
    BASELINE,
    OVERLAPPED,
    ModeRun,
    Turn,
    describe_mode,
    format_record,
    list_findings,
    merge_ranks,
    plot_steps,
    summarise,
)
from benchmarks.processes import WORKERS, WorkerProcess
from benchmarks.step import MODELS as STEP_MODELS
from benchmarks.step import add_shape_options, build_recipe, plan_workload, read_recipe
from benchmarks.workers.checkpoint_task import Farewell, Mode, Task
from benchmarks.workers.protocol import Burst, Ready, Workload
from genesis.base.console import Console
from genesis.base.device import CPU, check_available, count_devices
from genesis.base.errors import UserError
from genesis.export.importing import save_weights
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.describe import describe
from genesis.model.recipe import read_adapter_config
from genesis.recipe.resolved import ResolvedRecipe

MODELS: Final = {
    # Parameters and AdamW's moments in float32 are half a gigabyte, and a step takes about 1.4 s on two cores.
    "43m": build_recipe(256, 3, vocab_size=10240, dim=768, num_layers=5, num_heads=12, ffn_dim=2048, is_tied=True),
    # 604 million parameters: 7.2 GB of state.
    "600m": build_recipe(1024, 8, "auto", vocab_size=49152, dim=1536, num_layers=16, num_heads=12, ffn_dim=4096),
    "tiny": STEP_MODELS["tiny"],
    "smollm2-135m": build_recipe(
        *(64, 1), vocab_size=49152, dim=576, num_layers=30, num_heads=9, num_kv_heads=3, ffn_dim=1536, is_tied=True
    ),
}

MODES: Final = (
    Mode(BASELINE, "saves nothing", "none"),
    Mode("sync", "the training thread digests, writes and commits", "genesis"),
    Mode("thread", "the state is copied at once; a thread writes the copy", "genesis", "thread"),
    Mode("process", "the state is copied at once; a writer process writes the copy", "genesis", "process"),
    Mode(
        OVERLAPPED,
        "the state is copied during the next forward and backward; a writer process writes the copy",
        "genesis",
        "process",
        "overlapped",
    ),
    Mode("torch-sync", "`dcp.save`", "torch"),
    Mode("torch-thread", "`dcp.async_save`, AsyncCheckpointerType.THREAD", "torch", "thread"),
    Mode("torch-process", "`dcp.async_save`, AsyncCheckpointerType.PROCESS", "torch", "process"),
)
_STATE_BYTES_PER_PARAMETER: Final = 12
_CHECKPOINTS_AT_ONCE: Final = 3  # the last checkpoint, the one being written, and one being deleted


def choose_modes(names: Sequence[str], *, has_adapter: bool) -> tuple[list[Mode], dict[str, str]]:
    """Returns the modes that can run, and for each other mode the reason why it cannot.

    Args:
        names: Names of modes in `MODES`.
        has_adapter: Whether adapters are trained, and saves hold them alone.

    Raises:
        UserError: A name is unknown or repeated, or the baseline is missing.
    """
    known = {mode.name: mode for mode in MODES}
    harness.check_choices("--modes", names, list(known))
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--modes has {name!r} more than once: name it once")
    if BASELINE not in names:
        raise UserError(f"--modes has no {BASELINE!r}, with which the others are compared: add it")
    left_out = {
        name: "saves the base beside the adapters" for name in names if has_adapter and known[name].saver == "torch"
    }
    return [known[name] for name in names if name not in left_out], left_out


class Team:
    """All ranks of one mode, which import and warm up at once. Leaving the context ends them.

    Args:
        tasks: A task for each rank.
        log_dir: Directory for the output of the ranks.
        worker: The program of a rank.
        environment: Environment variables in addition to this process's.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        log_dir: Path,
        worker: Path = WORKERS / "checkpoint_trainer.py",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._tasks, self._log_dir = tasks, log_dir
        self._worker, self._environment = worker, environment or {}
        self._stack = ExitStack()
        self.workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        """Starts the workers."""
        for task in self._tasks:
            numbers = {"RANK": task.rank, "LOCAL_RANK": task.rank, "WORLD_SIZE": task.num_ranks, "NODE_RANK": 0}
            worker = WorkerProcess(
                f"{task.mode.name} (rank {task.rank})",
                [sys.executable, str(self._worker), task.to_json()],
                self._log_dir / f"{task.mode.name}-{task.rank}.log",
                task.workload.num_threads,
                {**self._environment, **{name: str(number) for name, number in numbers.items()}},
            )
            self.workers.append(self._stack.enter_context(worker))
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the workers."""
        self._stack.close()

    def wait_until_ready(self) -> Ready:
        """Waits until all ranks are ready for their first turn, and returns rank 0's answer."""
        first, *_ = [Ready(**worker.receive()) for worker in self.workers]
        return first

    def take_turn(self) -> Turn:
        """Returns the measurements of all ranks over the windows of a turn and one save."""
        for worker in self.workers:
            worker.send(f"go {self._tasks[0].every_n_steps}")
        return merge_ranks([Burst(**worker.receive()) for worker in self.workers])

    def stop(self) -> Farewell:
        """Ends training, and returns rank 0's final message."""
        for worker in self.workers:
            worker.send("quit")
        first, *_ = [Farewell(**worker.receive()) for worker in self.workers]
        return first


def main(argv: list[str]) -> int:
    """Measures, prints the page and writes the record to the path of `--out`."""
    options = _parse(argv)
    recipe = read_recipe(options.config) if options.config else MODELS[options.model]
    adapter = _choose_adapter(options)
    modes, left_out = choose_modes(options.modes, has_adapter=adapter is not None)
    for name, reason in left_out.items():
        Console(stderr=True).print(f"{name} is left out: it {reason}", highlight=False)
    workload = plan_workload(recipe, options, num_warmup_steps=options.every_n_steps - 1)
    _prepare_directory(options.dir, len(modes), describe(recipe.decoder).num_parameters)
    ready, runs = _run(modes, workload, adapter, options)
    results = summarise(runs, workload.tokens_per_window * options.ranks)
    what = "training steps around a save, in turns of contenders; ratios are medians of pairs within a round"
    title = _title(workload, options, runs[0].farewell.num_parameters, adapter)
    record = harness.begin_record("checkpoint", what, argv, device_name=ready.device_name)
    record["versions"] |= ready.versions
    record |= {
        "work": title,
        "workload": asdict(workload),
        **{name: getattr(options, name) for name in ("strategy", "ranks", "pairs", "every_n_steps")},
        "num_parameters": runs[0].farewell.num_parameters,
        "left_out": left_out,
        "findings": list_findings(runs, results, options.device),
        "modes": {run.mode.name: describe_mode(run, results[run.mode.name]) for run in runs},
    }
    picture = None if options.out is None else options.out.with_suffix(".png")
    harness.finish(record, lambda whole: format_record(whole, results, picture and picture.name), options.out)
    if picture is not None:
        plot_steps(runs, title, picture)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.build_parser("checkpoint", __doc__)
    add_shape_options(parser, MODELS, "43m")
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", type=harness.read_list, default=names, help=f"of {', '.join(names)} (default: all)")
    harness.add_counts(
        parser,
        adapter_rank=(None, "train LoRA adapters of this rank beside frozen weights, and save them alone (default: "
        "the recipe's adapters, if it has some)"),
        pairs=(6, "number of rounds"),
        every_n_steps=(5, "windows per turn; the first ends with a save"),
        ranks=(1, "ranks per mode"),
        threads=(None, "CPU threads per rank (default: all cores, divided among the ranks)"),
    )  # fmt: skip
    parser.add_argument("--strategy", choices=("replicated", "sharded"), default="replicated", help="of several ranks")
    parser.add_argument("--dir", type=Path, default=Path("runs/bench"), help="for checkpoints (default %(default)s)")
    options = parser.parse_args(argv)
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // max(1, options.ranks))
    harness.check_counts(options, "pairs", "ranks", "micro_batches", "threads", "adapter_rank")
    harness.check_counts(options, "every_n_steps", least=2)
    check_available(options.device)
    if options.device != CPU and count_devices(options.device) < options.ranks:
        raise UserError(f"--ranks is {options.ranks} and torch finds {count_devices(options.device)} GPUs: lower it")
    return options


def _choose_adapter(options: argparse.Namespace) -> AdapterConfig | None:
    """Returns the adapters to train; None to train all weights."""
    if options.adapter_rank is not None:
        return AdapterConfig(rank=options.adapter_rank, alpha=2.0 * options.adapter_rank)
    if options.config is None:
        return None
    recipe = ResolvedRecipe.read([options.config])
    return read_adapter_config(recipe.content, recipe.where)


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
    modes: Sequence[Mode], workload: Workload, adapter: AdapterConfig | None, options: argparse.Namespace
) -> tuple[Ready, list[ModeRun]]:
    """Returns a description of the trainers, and the measurements of each mode."""
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True))
        ).resolve()
        beside = None if adapter is None else asdict(_write_base(adapter, workload, directory / "base"))
        teams = {
            mode.name: stack.enter_context(Team(_plan_tasks(mode, workload, options, directory, beside), directory))
            for mode in modes
        }
        readies = [team.wait_until_ready() for team in teams.values()]
        firsts = {name: team.take_turn() for name, team in teams.items()}
        turns = harness.take_rounds(
            teams, options.pairs, Team.take_turn, lambda turn: turn.step_seconds[0], "s of the save's step"
        )
        farewells = {name: team.stop() for name, team in teams.items()}
    return readies[0], [ModeRun(one, firsts[one.name], turns[one.name], farewells[one.name]) for one in modes]


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
    return [
        Task(mode, workload, options.strategy, options.every_n_steps, str(run_dir), rank, options.ranks, adapter)
        for rank in range(options.ranks)
    ]


def _title(workload: Workload, options: argparse.Namespace, num_parameters: int, adapter: AdapterConfig | None) -> str:
    beside = "" if adapter is None else f" with adapters of rank {adapter.rank}, which are saved alone"
    ranks = "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"
    return (
        f"{num_parameters:,} parameters{beside}, {workload.num_micro_batches} x {workload.micro_batch_size} sequences "
        f"of {workload.seq_len} on {ranks} ({options.strategy}), {workload.precision}, {workload.device}, "
        f"a save every {options.every_n_steps} steps"
    )
