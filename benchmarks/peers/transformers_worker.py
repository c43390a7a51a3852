"""transformers' Trainer with a Llama of the workload's shape."""

import sys
import tempfile
from contextlib import suppress
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.workers.protocol import (
    ENDLESS,
    Gate,
    NoMoreStepsError,
    Workload,
    random_rows,
    workload_from_json,
)


class Gatekeeper(TrainerCallback):
    """Waits before a step."""

    def __init__(self, workload: Workload) -> None:
        self.gate = Gate(workload, ["torch", "transformers", "accelerate"], lambda: self.loss)
        self.loss: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits."""
        self.gate.before_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Keeps the loss."""
        self.loss = float((logs or {}).get("loss", "nan"))


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of all windows, again and again. The model itself shifts the labels."""

    def __init__(self, workload: Workload) -> None:
        self.rows = random_rows(workload)[:, :-1].contiguous()
        self.length = ENDLESS * workload.sequences_per_window

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row, "labels": row}


def build_model(workload: Workload) -> LlamaForCausalLM:
    """Returns a model of the workload's shape, its weights random."""
    shape = workload.decoder
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["dim"],
        intermediate_size=shape["ffn_dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        max_position_embeddings=shape["max_seq_len"],
        rms_norm_eps=shape["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=shape["has_tied_embeddings"],
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build_arguments(workload: Workload, directory: str) -> TrainingArguments:
    """Returns the Trainer's settings: logging as ours, no saves."""
    optimizer = workload.optimizer
    return TrainingArguments(
        output_dir=directory,
        max_steps=ENDLESS,
        per_device_train_batch_size=workload.micro_batch_size,
        gradient_accumulation_steps=workload.num_micro_batches,
        optim="adamw_torch_fused",
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        use_cpu=workload.device == "cpu",
        bf16=workload.precision == "bf16-mixed",
        torch_compile=workload.is_compiled,
        dataloader_pin_memory=workload.device == "cuda",
    )


def main(arguments: list[str]) -> None:
    """Trains until the parent has had enough."""
    workload = workload_from_json(arguments[0])
    gatekeeper = Gatekeeper(workload)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=build_model(workload),
            args=build_arguments(workload, directory),
            train_dataset=Rows(workload),
            callbacks=[gatekeeper],
        )
        with suppress(NoMoreStepsError):
            trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
