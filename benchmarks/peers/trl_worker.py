"""TRL's SFTTrainer or DPOTrainer on the rows of the benchmark `finetune`; adapters are PEFT's."""

import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from benchmarks.workers.finetune_protocol import (
    BETA,
    FinetuneWorkload,
    Row,
    append_loss,
    count_prompt,
    finetune_from_json,
    read_rows,
)
from benchmarks.workers.protocol import Gate, NoMoreStepsError


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


class RecordingPairsTrainer(DPOTrainer):
    """Writes the loss of each step, and takes pairs that are tokens already."""

    workload: FinetuneWorkload

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trains a step, and writes its loss."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        append_loss(self.workload, float(loss))
        return loss

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset


def build_model(workload: FinetuneWorkload) -> Any:
    """Returns the model in float32, with adapters if there are any."""
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    if workload.adapter is None:
        return model
    return PeftModel.from_pretrained(model, workload.adapter, is_trainable=True)


def build_options(workload: FinetuneWorkload, directory: str) -> dict[str, Any]:
    """Returns the settings of either trainer: no saves, nothing recomputed, and rows in their order."""
    optimizer = workload.optimizer
    return {
        "output_dir": directory,
        "max_steps": workload.num_steps,
        "optim": "adamw_torch_fused",
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "adam_epsilon": optimizer["eps"],
        "weight_decay": optimizer["weight_decay"],
        "max_grad_norm": workload.max_grad_norm,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "max_length": None,
    }


def build_trainer(workload: FinetuneWorkload, directory: str) -> RecordingTrainer:
    """Returns the trainer of packed rows."""
    config = SFTConfig(
        **build_options(workload, directory),
        per_device_train_batch_size=workload.batch_size,
        # The rows have their documents: what `packing=True` would make of conversations, in its own order.
        padding_free=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    return RecordingTrainer(
        model=build_model(workload),
        args=config,
        train_dataset=Dataset.from_list([asdict(row) for row in read_rows(workload.rows)]),
        processing_class=AutoTokenizer.from_pretrained(workload.model),
        callbacks=[Gatekeeper(workload)],
    )


def build_trainer_of_pairs(workload: FinetuneWorkload, directory: str) -> RecordingPairsTrainer:
    """Returns the trainer of pairs, whose reference is the base without adapters."""
    assert workload.adapter is not None
    config = DPOConfig(
        **build_options(workload, directory), per_device_train_batch_size=workload.batch_size // 2, beta=BETA
    )
    # A model with adapters would get a copy of them as its reference. New adapters are nothing at the start.
    adapter = PeftConfig.from_pretrained(workload.adapter)
    adapter.inference_mode = False
    trainer = RecordingPairsTrainer(
        model=AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(read_pairs(read_rows(workload.rows))),
        processing_class=AutoTokenizer.from_pretrained(workload.model),
        peft_config=adapter,
        callbacks=[Gatekeeper(workload)],
    )
    set_peft_model_state_dict(trainer.model, load_peft_weights(workload.adapter, device="cpu"))
    return trainer


def read_pairs(rows: list[Row]) -> list[dict[str, list[int]]]:
    """Returns the pairs of rows as TRL tokenizes them."""
    pairs = []
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        start = count_prompt(chosen)
        pairs.append(
            {
                "prompt_ids": chosen.input_ids[:start],
                "chosen_ids": chosen.input_ids[start:],
                "rejected_ids": rejected.input_ids[start:],
            }
        )
    return pairs


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = finetune_from_json(arguments[0])
    with tempfile.TemporaryDirectory() as directory:
        build = build_trainer_of_pairs if workload.kind == "dpo" else build_trainer
        trainer = build(workload, directory)
        trainer.workload = workload
        with suppress(NoMoreStepsError):
            trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
