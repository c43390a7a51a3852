"""Our trainer as `genesis fit` sets it up: Lightning's Trainer, our module, loader, clocks, schedule, log and bar.

Only checkpoints are left out, because the benchmark `checkpoint` measures them. The second argument is the strategy:
`replicated`, the default of `genesis fit`, or `auto`, Lightning's own strategy for one device. Further arguments are
options of `genesis fit`, such as `model.attention=flex` or `trainer.deterministic=false`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.workers.options import read_fit_options
from benchmarks.workers.protocol import ENDLESS, Gate, workload_from_json
from benchmarks.workers.windows import build_windows
from genesis.base.run_directory import RunDirectory
from genesis.model.adapter import is_adapter_tensor
from genesis.model.recipe import build_decoder_config
from genesis.operations.doctor.fits import KeepLosses, Windows, build_trainer
from genesis.operations.doctor.probe import Task
from genesis.optim import AdamW
from genesis.strategies import Replicated
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis.train.progress import GenesisProgressBar
from genesis_callbacks import SkipAwareLR

_LOG_EVERY_N_STEPS = 10
_STD = 0.02
_NF4_SCALE = 0.03


def show_as_fit(run_dir: str) -> dict[str, Any]:
    """Returns the options of a Trainer that logs and shows what a fit does, and ends with its windows."""
    return {
        "max_epochs": 1,
        "log_every_n_steps": _LOG_EVERY_N_STEPS,
        "logger": CSVLog(RunDirectory(Path(run_dir)).metrics),
        "enable_progress_bar": True,
        "enable_model_summary": True,
    }


class _FillBase(pl.Callback):
    """Fills the frozen weights under adapters with random values, in the place of a base's checkpoint."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GenesisModule)
        assert pl_module.decoder is not None
        for name, parameter in pl_module.decoder.named_parameters():
            if is_adapter_tensor(name):
                continue
            values = parameter.detach()
            if name.endswith((".scale_max", ".offset")):  # float32 as bytes
                values.view(torch.float32).fill_(_NF4_SCALE)
            elif values.dtype == torch.uint8:
                values.random_(0, 256)
            elif values.ndim == 1:
                values.fill_(1.0)
            else:
                values.normal_(0.0, _STD)


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = workload_from_json(arguments[0])
    options = read_fit_options(arguments[2:], workload.device)
    losses = KeepLosses(num_kept=1)
    gate = Gate(workload, ["torch", "lightning"], lambda: losses.read()[-1])
    windows = build_windows(workload)
    replicated = Replicated(
        activation_checkpointing=options.activation_checkpointing, compile_blocks=workload.is_compiled
    )
    strategy = replicated if arguments[1] == "replicated" else arguments[1]
    decoder = build_decoder_config(workload.decoder, "the workload")
    module = GenesisModule(decoder, AdamW(**workload.optimizer), **options.model)
    module.base_format, module.is_restored = options.base, module.adapter_config is not None
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = build_trainer(
            Task(workload.device, "", run_dir),
            strategy,
            ENDLESS,
            [losses, GenesisProgressBar(), *([_FillBase()] if module.is_restored else [])],
            SkipAwareLR(warmup_updates=100),
            precision=workload.precision,
            deterministic=options.deterministic,
            **show_as_fit(run_dir),
        )
        data = Windows(lambda index: windows[index % len(windows)], ENDLESS, gate.may_begin)
        trainer.fit(module, datamodule=data)


if __name__ == "__main__":
    main(sys.argv[1:])
