"""Our trainer as `genesis fit` sets it up: Lightning's Trainer, our module, loader, clocks, schedule, log and bar.

Only checkpoints are left out, because the benchmark `checkpoint` measures them. The second argument is the strategy:
`replicated`, the default of `genesis fit`, or `auto`, Lightning's own strategy for one device. Further arguments are
options of `genesis fit`, such as `model.attention=flex` or `trainer.deterministic=false`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.workers.options import read_fit_options
from benchmarks.workers.protocol import ENDLESS, Gate, workload_from_json
from benchmarks.workers.windows import build_windows
from genesis.base.run_directory import RunDirectory
from genesis.model.decoder import DecoderConfig
from genesis.operations.doctor.fits import KeepLosses, Windows, build_trainer
from genesis.operations.doctor.probe import Task
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis.train.progress import GenesisProgressBar
from genesis_callbacks import SkipAwareLR

_LOG_EVERY_N_STEPS = 10


def show_as_fit(run_dir: str) -> dict[str, Any]:
    """Returns the options of a Trainer that logs and shows what a fit does, and ends with its windows."""
    return {
        "max_epochs": 1,
        "log_every_n_steps": _LOG_EVERY_N_STEPS,
        "logger": CSVLog(RunDirectory(Path(run_dir)).metrics),
        "enable_progress_bar": True,
        "enable_model_summary": True,
    }


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = workload_from_json(arguments[0])
    options = read_fit_options(arguments[2:], workload.device)
    losses = KeepLosses(num_kept=1)
    gate = Gate(workload, ["torch", "lightning"], lambda: losses.read()[-1])
    windows = build_windows(workload)
    strategy = Replicated(compile_blocks=workload.is_compiled) if arguments[1] == "replicated" else arguments[1]
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = build_trainer(
            Task(workload.device, "", run_dir),
            strategy,
            ENDLESS,
            [losses, GenesisProgressBar()],
            SkipAwareLR(warmup_updates=100),
            precision=workload.precision,
            deterministic=options.deterministic,
            **show_as_fit(run_dir),
        )
        module = GenesisModule(
            DecoderConfig(**workload.decoder), OptimizerOptions(**workload.optimizer), **options.model
        )
        data = Windows(lambda index: windows[index % len(windows)], ENDLESS, gate.may_begin)
        trainer.fit(module, datamodule=data)


if __name__ == "__main__":
    main(sys.argv[1:])
