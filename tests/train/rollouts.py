"""A tiny run on prompts: random weights answer short questions, and a file's function scores the answers."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from genesis.data.prompts import PromptOptions
from genesis.data.sources import SourceOptions
from genesis.model.decoder import DecoderConfig
from genesis.objectives.gspo import GSPO
from genesis.optim import AdamW
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from tests.chat.support import write_tokenizer
from tests.mixtures import mix
from tests.train.support import build_strategy, build_trainer, counters_of, whole

STEPS = 6
NUM_PROMPTS = 7
REWARD = """
def reward(messages, text, columns):
    return sum(character in "aeiou" for character in text) / (len(text) + 1) + columns["bonus"]
"""
GROUP_SIZE = 4
SEQ_LEN = 48


class Record(pl.Callback):
    """Keeps what each step trained on, on this rank."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.extras: list[dict[str, list[float]]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append([micro_batch.labels.tolist() for micro_batch in batch.micro_batches])
        names = batch.micro_batches[0].extra
        self.extras.append({name: [v for m in batch.micro_batches for v in m.extra[name].tolist()] for name in names})


def write_case(directory: Path, reward: str = REWARD) -> Path:
    """Returns a directory with a tokenizer, prompts and a reward function."""
    write_tokenizer(directory / "tokenizer")
    records = [{"prompt": f"Question {number}?", "bonus": number / 10} for number in range(NUM_PROMPTS)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "reward.py").write_text(reward)
    return directory


def build_data(case: Path, seq_len: int = SEQ_LEN, **changes: Any) -> CorpusDataModule:
    options: dict[str, Any] = {"group_size": GROUP_SIZE, "steps_per_rollout": 3, "max_new_tokens": 12, "num_rows": 5}
    prompts = PromptOptions(
        (SourceOptions("questions", (str(case / "prompts.jsonl"),)),),
        str(case / "tokenizer"),
        **({"reward": f"{case / 'reward.py'}:reward"} | options | changes),
    )
    data = CorpusDataModule(seq_len=seq_len, micro_batch_size=2, global_batch_size=2, prompts=prompts)
    data.allows_reward_code = True
    return data


def build_module(data: CorpusDataModule, mixture: str | None = None, **changes: Any) -> GenesisModule:
    """Returns a module on prompts; `mixture` names one of `tests.mixtures`."""
    decoder = DecoderConfig(
        **{
            "vocab_size": data.training.vocab_size,
            "dim": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_dim": 48,
            "max_seq_len": data.training.options.seq_len,
        }
    )
    if mixture is not None:
        decoder = mix(decoder, mixture)
    options = {"objective": GSPO(clip_low=0.01, clip_high=0.01)} | changes
    return GenesisModule(decoder, AdamW(lr=3e-3), **options)


def answer(
    directory: str,
    case: str,
    strategy: str = "replicated",
    max_steps: int = STEPS,
    *callbacks: pl.Callback,
    **options: Any,
) -> dict[str, Any]:
    """Fits on prompts from the latest checkpoint in `directory`, and returns what that came to."""
    data = build_data(Path(case), **options.pop("prompts", {}))
    module = build_module(data, **options.pop("module", {}))
    checkpoint = AsyncProcessCheckpoint(
        run_dir=directory, every_n_steps=1, keep_last=3, mode=options.pop("mode", "sync")
    )
    record = Record()
    trainer = build_trainer(
        build_strategy(strategy),
        int(os.environ.get("WORLD_SIZE", "1")),
        max_steps,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), checkpoint, CheckpointVerification(), record, *callbacks],
        gradient_clip_val=1.0,
        logger=CSVLog(Path(directory) / "metrics.csv"),
        **options,
    )
    trainer.fit(module, data, ckpt_path=checkpoint.latest())
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "batches": record.batches,
        "extras": record.extras,
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.cursor.position,
        "restored": None if checkpoint.restore_report is None else checkpoint.restore_report.step,
    }


def read_log(directory: Path) -> list[dict[str, float]]:
    """Returns the training metrics of each step."""
    return read_rows(directory, "train/reward")


def read_rows(directory: Path, name: str) -> list[dict[str, float]]:
    """Returns the lines that have a metric."""
    with (directory / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    return [{name: float(value) for name, value in row.items() if value} for row in rows]
