"""Our trainer as `genesis fit` sets it up for fine-tuning: an imported model, with adapters or without.

Only checkpoints are left out, because the benchmark `checkpoint` measures them.
"""

import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from benchmarks.workers.finetune_protocol import (
    BETA,
    GROUP_SIZE,
    PAIR_KINDS,
    FinetuneWorkload,
    Kind,
    Row,
    append_loss,
    finetune_from_json,
    read_batches,
)
from benchmarks.workers.genesis_trainer import show_as_fit
from benchmarks.workers.protocol import Gate, NoMoreStepsError
from genesis.data.loader import SequenceFormat
from genesis.data.pair_windows import PAIRS, build_pair_window
from genesis.data.pairs import Answer, Pair
from genesis.data.prompts import PromptOptions
from genesis.data.sources import SourceOptions
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.huggingface.directory import read_json
from genesis.huggingface.family import Family
from genesis.huggingface.peft import CONFIG_NAME, read_adapters
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_weights
from genesis.model.adapter import AdapterConfig, attach_adapters, fill_trained
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives import DPO, GRPO, KTO, RewardModel
from genesis.objectives.objective import Objective
from genesis.operations.doctor.fits import Windows, build_trainer
from genesis.operations.doctor.probe import Task
from genesis.optim import AdamW
from genesis.strategies import Replicated
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis.train.progress import GenesisProgressBar
from genesis_callbacks import SkipAwareLR


class _FillAndTell(pl.Callback):
    """Fills the weights, and writes each step's loss."""

    def __init__(self, workload: FinetuneWorkload) -> None:
        self._workload = workload

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GenesisModule)
        assert pl_module.decoder is not None
        family, config = read_shape(Path(self._workload.model))
        fill_trained(pl_module.decoder, read_weights(Path(self._workload.model), config, family))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        append_loss(self._workload, float(outputs["loss_sum"]) / batch.num_units.get(PAIRS, batch.num_valid_tokens))


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


def build_window_of_pairs(rows: list[Row], kind: Kind = "dpo") -> AccumulationWindow:
    """Returns the window of a step's pairs, whose answers are joined into one row without padding."""
    answers = [Answer(np.array(row.input_ids), np.array(row.labels) != IGNORE_INDEX) for row in rows]
    if kind == "kto":
        pairs = [Pair(one, answers[one], answers[one ^ 1], value=1 - one % 2) for one in range(len(answers))]
    else:
        pairs = [Pair(start // 2, answers[start], answers[start + 1]) for start in range(0, len(answers), 2)]
    highest = max(int(answer.tokens.max()) for answer in answers)
    # The tokens' bytes do not matter here: nothing is logged per byte.
    form = SequenceFormat(max(len(row.input_ids) for row in rows), 0, np.ones(highest + 1, np.int64), np.dtype("<i4"))
    return build_pair_window(
        pairs, form, len(pairs), 0, is_padded=False, is_valued=kind == "kto", has_ends=kind == "reward"
    )


class GatedPrompts(CorpusDataModule):
    """Prompts whose answers are written when the next step may begin, and do not end before their longest length."""

    def __init__(self, workload: FinetuneWorkload, gate: Gate) -> None:
        prompts = PromptOptions(
            sources=(SourceOptions("prompts", (workload.rows,)),),
            tokenizer=workload.model,
            reward=f"{Path(__file__).parent / 'vowels.py'}:reward",
            group_size=GROUP_SIZE,
            steps_per_rollout=1,
            max_new_tokens=workload.answer_tokens,
            num_rows=workload.batch_size,
        )
        super().__init__(
            seq_len=workload.tokens_per_window // workload.batch_size,
            micro_batch_size=workload.batch_size,
            global_batch_size=workload.batch_size // GROUP_SIZE,
            prompts=prompts,
        )
        self.allows_reward_code, self._gate = True, gate
        vars(self.training)["stop_ids"] = frozenset()

    def transfer_batch_to_device(
        self, batch: AccumulationWindow, device: torch.device, dataloader_idx: int
    ) -> AccumulationWindow:
        """Waits, then lets the model answer."""
        self._gate.before_step()
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def read_start(directory: Path, family: Family, decoder: DecoderConfig) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Returns the options and the tensors of adapters in PEFT's format."""
    content = read_json(directory / CONFIG_NAME)
    also_train: tuple[Literal["head"], ...] = ("head",) if content.get("modules_to_save") else ()
    config = AdapterConfig(rank=content["r"], alpha=float(content["lora_alpha"]), also_train=also_train)
    with torch.device("meta"):
        built = Decoder(decoder)
        attach_adapters(built, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in built.named_parameters() if tensor.requires_grad}
    return config, read_adapters(directory, config, family, shapes=shapes, base_fingerprint="")


def build_data(workload: FinetuneWorkload, gate: Gate) -> pl.LightningDataModule:
    """Returns the data of the kind, which waits before each step."""
    if workload.kind == "grpo":
        return GatedPrompts(workload, gate)
    build = partial(build_window_of_pairs, kind=workload.kind) if workload.kind in PAIR_KINDS else build_window
    windows = [build(rows) for rows in read_batches(workload)]
    return Windows(windows.__getitem__, len(windows), gate.may_begin)


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = finetune_from_json(arguments[0])
    gate = Gate(workload, ["torch", "lightning"])
    family, decoder = read_shape(Path(workload.model))
    config, start = (None, {}) if workload.adapter is None else read_start(Path(workload.adapter), family, decoder)
    objectives: dict[Kind, Objective] = {"dpo": DPO(BETA), "kto": KTO(BETA), "reward": RewardModel(), "grpo": GRPO()}
    objective = objectives.get(workload.kind)
    module = GenesisModule(decoder, AdamW(**workload.optimizer), adapter=config, objective=objective)
    module.is_restored, module.start = True, start
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = build_trainer(
            Task(workload.device, "", run_dir),
            Replicated(),
            workload.num_steps,
            [_FillAndTell(workload), GenesisProgressBar()],
            SkipAwareLR(shape="constant", warmup_updates=0),
            precision="32-true",
            deterministic=None,
            gradient_clip_val=workload.max_grad_norm,
            **show_as_fit(run_dir),
        )
        with suppress(NoMoreStepsError):
            trainer.fit(module, datamodule=build_data(workload, gate))


if __name__ == "__main__":
    main(sys.argv[1:])
