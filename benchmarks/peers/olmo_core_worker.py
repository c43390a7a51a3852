"""OLMo-core's Trainer and TransformerTrainModule with a Llama-like model of the workload's shape."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.data import DataLoaderBase
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
from olmo_core.train.callbacks import Callback
from olmo_core.train.train_module import TransformerTrainModule

from benchmarks.workers.protocol import (
    ENDLESS,
    Gate,
    NoMoreStepsError,
    Workload,
    random_rows,
    workload_from_json,
)


@dataclass
class Gatekeeper(Callback):
    """Waits where the Trainer asks for the next batch, and keeps the last loss."""

    gate: Gate | None = None
    loss: float | None = None

    def pre_load_batch(self) -> None:
        """Waits."""
        assert self.gate is not None
        self.gate.before_step()

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Keeps the loss."""
        self.loss = metrics.get("train/CE loss", self.loss)


class RowsInMemory(DataLoaderBase):
    """The windows, again and again. The train module cuts them into micro-batches and shifts the labels."""

    def __init__(self, workload: Workload, work_dir: str) -> None:
        super().__init__(work_dir=work_dir, global_batch_size=workload.tokens_per_window)
        self.windows = random_rows(workload)[:, :-1].contiguous().split(workload.sequences_per_window)

    @property
    def total_batches(self) -> int:
        """Batches of an epoch."""
        return ENDLESS

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for index in range(ENDLESS):
            yield {"input_ids": self.windows[index % len(self.windows)]}

    def get_mock_batch(self) -> dict[str, Any]:
        """Returns a batch for the dry run."""
        return {"input_ids": self.windows[0]}

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """Returns the tokens of a batch."""
        return int(batch["input_ids"].numel())

    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None:
        """Begins an epoch, in the same order."""
        self._epoch = epoch or 1

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: nothing is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""


def build_train_module(workload: Workload) -> TransformerTrainModule:
    """Returns the model and its step."""
    shape, optimizer = workload.decoder, workload.optimizer
    if shape["has_tied_embeddings"]:
        raise ValueError("OLMo-core has no tied embeddings: compare with has_tied_embeddings false")
    config = TransformerConfig.llama_like(
        d_model=shape["dim"],
        vocab_size=shape["vocab_size"],
        n_layers=shape["num_layers"],
        n_heads=shape["num_heads"],
        n_kv_heads=shape["num_kv_heads"],
        layer_norm_eps=shape["norm_eps"],
        rope_theta=int(shape["rope_theta"]),
        feed_forward=FeedForwardConfig(hidden_size=shape["ffn_dim"], bias=False),
    )
    device = torch.device(workload.device)
    return TransformerTrainModule(
        model=config.build(init_device="meta"),
        optim=AdamWConfig(
            lr=optimizer["lr"],
            betas=tuple(optimizer["betas"]),
            eps=optimizer["eps"],
            weight_decay=optimizer["weight_decay"],
            fused=True,
        ),
        rank_microbatch_size=workload.micro_batch_size * workload.seq_len,
        max_sequence_length=workload.seq_len,
        compile_model=workload.is_compiled,
        autocast_precision=torch.bfloat16 if workload.precision == "bf16-mixed" else None,
        max_grad_norm=1.0,
        scheduler=CosWithWarmup(warmup_steps=100),
        device=device,
    )


def main(arguments: list[str]) -> None:
    """Trains until the parent has had enough."""
    workload = workload_from_json(arguments[0])
    gatekeeper = Gatekeeper()
    gatekeeper.gate = Gate(workload, ["torch", "ai2-olmo-core"], lambda: gatekeeper.loss)
    prepare_training_environment(seed=0, backend=None)
    with tempfile.TemporaryDirectory() as directory:
        trainer = TrainerConfig(
            save_folder=directory,
            device=workload.device,
            max_duration=Duration.steps(ENDLESS),
            metrics_collect_interval=10,
            callbacks={"gatekeeper": gatekeeper},
            no_checkpoints=True,
            no_evals=True,
        ).build(build_train_module(workload), RowsInMemory(workload, directory))
        with suppress(NoMoreStepsError):
            trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1:])
