"""TRL's trainers on the rows of the benchmark `finetune`; adapters are PEFT's."""

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from benchmarks.workers.finetune_protocol import (
    BETA,
    GROUP_SIZE,
    FinetuneWorkload,
    Row,
    append_loss,
    count_prompt,
    finetune_from_json,
    read_rows,
    score_text,
)
from benchmarks.workers.protocol import Gate, NoMoreStepsError

NEVER = -1
"""An id that no token has."""


class Gatekeeper(TrainerCallback):
    """Waits before a step."""

    def __init__(self, workload: FinetuneWorkload) -> None:
        self.gate = Gate(workload, ["torch", "transformers", "accelerate", "peft", "trl"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits."""
        self.gate.before_step()


class Recording:
    """Writes the loss of each step; the log of the Trainer rounds it."""

    workload: FinetuneWorkload

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trains a step, and writes its loss."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]  # of the trainer after it
        append_loss(self.workload, float(loss))
        return loss


class TakesTokens(Recording):
    """Takes answers that are tokens already."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset


class RecordingTrainer(Recording, SFTTrainer):
    """The trainer of packed rows."""


class RecordingPairsTrainer(TakesTokens, DPOTrainer):
    """The trainer of pairs by DPO."""


class RecordingAnswersTrainer(TakesTokens, KTOTrainer):
    """The trainer of single answers by KTO."""


class RecordingScoresTrainer(TakesTokens, RewardTrainer):
    """The trainer of a reward model."""


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


def build_trainer_of_pairs(workload: FinetuneWorkload, directory: str) -> Any:
    """Returns the trainer of pairs, whose reference is the base without adapters."""
    assert workload.adapter is not None
    # A model with adapters would get a copy of them as its reference. New adapters are nothing at the start.
    adapter = PeftConfig.from_pretrained(workload.adapter)
    adapter.inference_mode = False
    pairs = read_pairs(read_rows(workload.rows))
    options = build_options(workload, directory) | {"per_device_train_batch_size": workload.batch_size // 2}
    if workload.kind == "dpo":
        kind, config, rows = RecordingPairsTrainer, DPOConfig(**options, beta=BETA), pairs
    elif workload.kind == "kto":
        options |= {"per_device_train_batch_size": workload.batch_size}
        kind, config, rows = RecordingAnswersTrainer, KTOConfig(**options, beta=BETA), split_pairs(pairs)
    else:
        kind, config = RecordingScoresTrainer, RewardConfig(**options)
        rows = [{name: one["prompt_ids"] + one[name] for name in ("chosen_ids", "rejected_ids")} for one in pairs]
    auto = AutoModelForSequenceClassification if workload.kind == "reward" else AutoModelForCausalLM
    trainer = kind(
        model=auto.from_pretrained(workload.model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(workload.model),
        peft_config=adapter,
        callbacks=[Gatekeeper(workload)],
    )
    set_peft_model_state_dict(trainer.model, load_peft_weights(workload.adapter, device="cpu"))
    if workload.kind == "reward":
        trainer.model.config.pad_token_id = NEVER  # the score of a row is that of its last token, whatever it is
    return trainer


def build_trainer_of_prompts(workload: FinetuneWorkload, directory: str) -> GRPOTrainer:
    """Returns the trainer of prompts that the model answers, each answer as long as it may be."""
    assert workload.adapter is not None
    options = build_options(workload, directory)
    del options["max_length"]
    config = GRPOConfig(
        **options,
        per_device_train_batch_size=workload.batch_size,
        num_generations=GROUP_SIZE,
        steps_per_generation=1,
        max_completion_length=workload.answer_tokens,
        generation_kwargs={"min_new_tokens": workload.answer_tokens},
        shuffle_dataset=False,
        beta=0.0,
        loss_type="grpo",
    )
    lines = Path(workload.rows).read_text(encoding="utf-8").splitlines()
    adapter = PeftConfig.from_pretrained(workload.adapter)
    adapter.inference_mode = False
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["messages"]} for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(workload.model),
        peft_config=adapter,
        callbacks=[Gatekeeper(workload)],
    )
    set_peft_model_state_dict(trainer.model, load_peft_weights(workload.adapter, device="cpu"))
    return trainer


def score(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Returns the reward of each answer."""
    return [score_text(message["content"]) for (message,) in completions]


def split_pairs(pairs: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """Returns the answers of pairs as TRL tokenizes single ones; each is the other's mismatched one."""
    names = ("chosen_ids", "rejected_ids")
    return [
        {
            "prompt_ids": pair["prompt_ids"],
            "completion_ids": pair[own],
            "KL_completion_ids": pair[other],
            "label": own == "chosen_ids",
        }
        for pair in pairs
        for own, other in (names, names[::-1])
    ]


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


BUILD: dict[str, Callable[[FinetuneWorkload, str], Any]] = {
    "lora": build_trainer,
    "full": build_trainer,
    "grpo": build_trainer_of_prompts,
}


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = finetune_from_json(arguments[0])
    with tempfile.TemporaryDirectory() as directory:
        build = BUILD.get(workload.kind, build_trainer_of_pairs)
        trainer = build(workload, directory)
        trainer.workload = workload
        with suppress(NoMoreStepsError):
            trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
