"""Our trainer as `genesis fit` sets it up for fine-tuning: an imported model, with adapters or without.

Only checkpoints are left out, because `genesis bench checkpoint` measures them.
"""

import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from genesis.base.run_directory import RunDirectory
from genesis.bench.workers.finetune_protocol import (
    BETA,
    FinetuneWorkload,
    Row,
    append_loss,
    finetune_from_json,
    read_batches,
)
from genesis.bench.workers.protocol import Gate, NoMoreStepsError
from genesis.data.loader import SequenceFormat, WindowLoader
from genesis.data.pair_windows import PAIRS, build_pair_window
from genesis.data.pairs import Answer, Pair
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.huggingface.directory import read_json
from genesis.huggingface.family import Family
from genesis.huggingface.peft import CONFIG_NAME, read_adapters
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_weights
from genesis.model.adapter import AdapterConfig, attach_adapters, fill_trained
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives import DPO
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated
from genesis.train.accelerators import build_accelerator
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis.train.progress import GenesisProgressBar
from genesis_callbacks import SkipAwareLR, TokenCounters

_LOG_EVERY_N_STEPS = 10


class _Gatekeeper(pl.Callback):
    """Fills the weights, waits before each step, and writes each step's loss."""

    def __init__(self, workload: FinetuneWorkload) -> None:
        self._workload = workload
        self._gate = Gate(workload, ["torch", "lightning"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GenesisModule)
        assert pl_module.decoder is not None
        family, config = read_shape(Path(self._workload.model))
        fill_trained(pl_module.decoder, read_weights(Path(self._workload.model), config, family))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, batch_idx: int
    ) -> None:
        self._gate.before_step()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        append_loss(self._workload, float(outputs["loss_sum"]) / batch.num_units.get(PAIRS, batch.num_valid_tokens))


class _Windows(pl.LightningDataModule):
    """The workload's windows through the loader of `CorpusDataModule`."""

    def __init__(self, workload: FinetuneWorkload) -> None:
        super().__init__()
        build = build_window_of_pairs if workload.kind == "dpo" else build_window
        self._windows = [build(rows) for rows in read_batches(workload)]

    def train_dataloader(self) -> WindowLoader:
        num_windows = len(self._windows)
        return WindowLoader(
            self._windows.__getitem__, lambda: range(num_windows), num_windows, prefetch_windows=2, pin_memory=False
        )

    def transfer_batch_to_device(
        self, batch: AccumulationWindow, device: torch.device, dataloader_idx: int
    ) -> AccumulationWindow:
        return batch.to(device, non_blocking=True)


def build_window(rows: list[Row]) -> AccumulationWindow:
    """Returns the window of a step's rows: the label of a token is the next one of its conversation."""
    input_ids = torch.tensor([row.input_ids for row in rows])
    lengths = [torch.tensor(row.seq_lengths) for row in rows]
    document_ids = torch.stack([torch.repeat_interleave(torch.arange(len(of_row)), of_row) for of_row in lengths]).to(
        torch.int32
    )
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, :-1] = torch.tensor([row.labels for row in rows])[:, 1:]
    labels[:, :-1].masked_fill_(document_ids[:, 1:] != document_ids[:, :-1], IGNORE_INDEX)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)]).to(torch.int32)
    num_valid = int((labels != IGNORE_INDEX).sum())
    return AccumulationWindow((MicroBatch(input_ids, labels, document_ids, offsets),), num_valid, num_valid, 0)


def build_window_of_pairs(rows: list[Row]) -> AccumulationWindow:
    """Returns the window of a step's pairs, whose answers are joined into one row without padding."""
    answers = [Answer(np.array(row.input_ids), np.array(row.labels) != IGNORE_INDEX) for row in rows]
    pairs = [Pair(start // 2, answers[start], answers[start + 1]) for start in range(0, len(answers), 2)]
    highest = max(int(answer.tokens.max()) for answer in answers)
    # The tokens' bytes do not matter here: nothing is logged per byte.
    form = SequenceFormat(max(len(row.input_ids) for row in rows), 0, np.ones(highest + 1, np.int64), np.dtype("<i4"))
    return build_pair_window(pairs, form, len(pairs), 0, is_padded=False)


def read_start(directory: Path, family: Family, decoder: DecoderConfig) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Returns the options and the tensors of adapters in PEFT's format."""
    content = read_json(directory / CONFIG_NAME)
    config = AdapterConfig(rank=content["r"], alpha=float(content["lora_alpha"]))
    with torch.device("meta"):
        built = Decoder(decoder)
        attach_adapters(built, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in built.named_parameters() if tensor.requires_grad}
    return config, read_adapters(directory, config, family, shapes=shapes, base_fingerprint="")


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = finetune_from_json(arguments[0])
    gatekeeper = _Gatekeeper(workload)
    family, decoder = read_shape(Path(workload.model))
    config, start = (None, {}) if workload.adapter is None else read_start(Path(workload.adapter), family, decoder)
    objective = DPO(BETA) if workload.kind == "dpo" else None
    module = GenesisModule(decoder, OptimizerOptions(**workload.optimizer), adapter=config, objective=objective)
    module.is_restored, module.start = True, start
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = pl.Trainer(
            accelerator=build_accelerator(workload.device),
            devices=1,
            strategy=Replicated(),
            precision="32-true",
            max_steps=workload.num_steps,
            max_epochs=-1,
            gradient_clip_val=workload.max_grad_norm,
            log_every_n_steps=_LOG_EVERY_N_STEPS,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            inference_mode=False,
            enable_checkpointing=False,
            default_root_dir=run_dir,
            logger=CSVLog(RunDirectory(Path(run_dir)).metrics),
            callbacks=[
                gatekeeper,
                TokenCounters(),
                SkipAwareLR(shape="constant", warmup_updates=0),
                GenesisProgressBar(),
            ],
        )
        with suppress(NoMoreStepsError):
            trainer.fit(module, datamodule=_Windows(workload))


if __name__ == "__main__":
    main(sys.argv[1:])
