"""TRL's SFTTrainer on the rows of `genesis bench finetune`; adapters are PEFT's."""

import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from genesis.bench.workers.finetune_protocol import FinetuneWorkload, append_loss, finetune_from_json, read_rows
from genesis.bench.workers.protocol import Gate, NoMoreStepsError


class Gatekeeper(TrainerCallback):
    """Waits before a step."""

    def __init__(self, workload: FinetuneWorkload) -> None:
        self.gate = Gate(workload, ["torch", "transformers", "accelerate", "peft", "trl"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits."""
        self.gate.before_step()


class RecordingTrainer(SFTTrainer):
    """Writes the loss of each step; the log of the Trainer rounds it."""

    workload: FinetuneWorkload

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trains a step, and writes its loss."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        append_loss(self.workload, float(loss))
        return loss


def build_model(workload: FinetuneWorkload) -> Any:
    """Returns the model in float32, with adapters if there are any."""
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    if workload.adapter is None:
        return model
    return PeftModel.from_pretrained(model, workload.adapter, is_trainable=True)


def build_config(workload: FinetuneWorkload, directory: str) -> SFTConfig:
    """Returns the trainer's settings: no saves, nothing recomputed, and rows that are packed already."""
    optimizer = workload.optimizer
    return SFTConfig(
        output_dir=directory,
        max_steps=workload.num_steps,
        per_device_train_batch_size=workload.batch_size,
        optim="adamw_torch_fused",
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=workload.max_grad_norm,
        lr_scheduler_type="constant",
        warmup_steps=0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        # The rows have their documents: what `packing=True` would make of conversations, in its own order.
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = finetune_from_json(arguments[0])
    gatekeeper = Gatekeeper(workload)
    with tempfile.TemporaryDirectory() as directory:
        trainer = RecordingTrainer(
            model=build_model(workload),
            args=build_config(workload, directory),
            train_dataset=Dataset.from_list([asdict(row) for row in read_rows(workload.rows)]),
            processing_class=AutoTokenizer.from_pretrained(workload.model),
            callbacks=[gatekeeper],
        )
        trainer.workload = workload
        with suppress(NoMoreStepsError):
            trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
