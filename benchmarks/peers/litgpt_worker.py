"""litgpt's pretraining loop, `litgpt.pretrain.fit`, with its GPT of the workload's shape, set up as in its `main`."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.pretrain import fit, initialize_weights
from litgpt.utils import instantiate_torch_optimizer
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.workers.protocol import (
    ENDLESS,
    Gate,
    NoMoreStepsError,
    Workload,
    random_rows,
    workload_from_json,
)


class LossLogger(CSVLogger):
    """litgpt's default logger, which keeps the last loss."""

    loss: float | None = None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keeps the loss, and logs."""
        self.loss = metrics["loss"]
        super().log_metrics(metrics, step)


class GatedRows(IterableDataset[torch.Tensor]):
    """The micro-batches of all windows, again and again; waits where litgpt asks for the first one of a window."""

    def __init__(self, workload: Workload, gate: Gate) -> None:
        self.micro_batches = random_rows(workload).split(workload.micro_batch_size)
        self.num_micro_batches = workload.num_micro_batches
        self.gate = gate

    def __iter__(self) -> Iterator[torch.Tensor]:
        index = 0
        while True:
            if index % self.num_micro_batches == 0:
                self.gate.before_step()
            yield self.micro_batches[index % len(self.micro_batches)]
            index += 1


def build_config(workload: Workload) -> Config:
    """Returns the workload's shape in litgpt's words."""
    shape = workload.decoder
    return Config(
        name="bench",
        block_size=shape["max_seq_len"],
        n_layer=shape["num_layers"],
        n_embd=shape["dim"],
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        n_head=shape["num_heads"],
        n_query_groups=shape["num_kv_heads"],
        intermediate_size=shape["ffn_dim"],
        norm_class_name="RMSNorm",
        norm_eps=shape["norm_eps"],
        mlp_class_name="LLaMAMLP",
        bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
        rope_base=int(shape["rope_theta"]),
    )


def build_train_arguments(workload: Workload) -> TrainArgs:
    """Returns the arguments of `fit`."""
    return TrainArgs(
        save_interval=None,
        log_interval=10,
        global_batch_size=workload.sequences_per_window,
        micro_batch_size=workload.micro_batch_size,
        lr_warmup_steps=100,
        max_tokens=ENDLESS * workload.tokens_per_window,
        max_norm=1.0,
        max_seq_length=workload.seq_len,
        tie_embeddings=workload.decoder["has_tied_embeddings"],
    )


def build_state(workload: Workload, fabric: Fabric, train: TrainArgs) -> dict[str, Any]:
    """Returns model and optimizer, built in the order of `litgpt.pretrain.main`."""
    config = build_config(workload)
    with fabric.init_module(empty_init=True):
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    if train.tie_embeddings:
        model.transformer.wte.weight = model.lm_head.weight
    model.max_seq_length = train.max_seq_length
    if workload.is_compiled:
        model = torch.compile(model)
    model = fabric.setup(model)
    options = {name: workload.optimizer[name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = instantiate_torch_optimizer(
        {"class_path": "torch.optim.AdamW", "init_args": options}, model.parameters(), fused=True
    )
    optimizer = fabric.setup_optimizers(optimizer)
    return {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}


def main(arguments: list[str]) -> None:
    """Trains until the parent has had enough."""
    workload = workload_from_json(arguments[0])
    train = build_train_arguments(workload)
    with tempfile.TemporaryDirectory() as directory:
        logger = LossLogger(directory, flush_logs_every_n_steps=10)
        gate = Gate(workload, ["torch", "litgpt", "lightning"], lambda: logger.loss)
        fabric = Fabric(accelerator=workload.device, devices=1, precision=workload.precision, loggers=[logger])
        fabric.launch()
        state = build_state(workload, fabric, train)
        train_loader, validation_loader = fabric.setup_dataloaders(
            DataLoader(GatedRows(workload, gate), batch_size=None),
            DataLoader(random_rows(workload)[: workload.micro_batch_size], batch_size=workload.micro_batch_size),
        )
        with suppress(NoMoreStepsError):
            fit(
                fabric=fabric,
                devices=1,
                state={**state, "train_dataloader": train_loader},
                train_dataloader=train_loader,
                val_dataloader=validation_loader,
                out_dir=Path(directory),
                tokenizer_dir=None,
                train=train,
                eval=EvalArgs(interval=ENDLESS, final_validation=False),
            )


if __name__ == "__main__":
    main(sys.argv[1:])
