"""A model that is whole on one rank, or cut into two stages on two as a pipeline cuts it, without its schedule.

Every part learns from an input and a target of its own, which follow from the step and the part's name. So a part takes
the same steps, bit for bit, wherever it lies.
"""

import os
import signal
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification
from genesis_callbacks.testing import run_ranks

DIM = 5
NUM_BLOCKS = 4
LAST_STEP = 8


class Block(nn.Module):
    """Parameters of one and of two dimensions, a buffer, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("total", torch.zeros(()))
        self.num_windows = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.total += inputs.sum()
        self.num_windows += 1
        return self.norm(self.linear(inputs)).tanh()

    def get_extra_state(self):
        return {"num_windows": self.num_windows}

    def set_extra_state(self, state) -> None:
        self.num_windows = state["num_windows"]


class StagedModel(LightningModule):
    """The parts of one stage under the names that they have in the whole model.

    Args:
        stage: Which half of the blocks; None for the whole model.
        num_blocks: Of the whole model.
        forgets: Name of a tensor that the model's hook takes out of each checkpoint.
        has_embedding_group: Whether the embedding has an optimizer group of its own.
    """

    def __init__(
        self,
        stage: int | None,
        *,
        num_blocks: int = NUM_BLOCKS,
        forgets: str | None = None,
        has_embedding_group: bool = True,
    ) -> None:
        super().__init__()
        numbers = {None: range(num_blocks), 0: range(2), 1: range(2, num_blocks)}[stage]
        self.forgets, self.has_embedding_group = forgets, has_embedding_group
        if stage in (None, 0):
            self.embedding = nn.Embedding(DIM, DIM)
        self.blocks = nn.ModuleDict({str(number): Block() for number in numbers})
        if stage in (None, 1):
            self.head = nn.Linear(DIM, DIM, bias=False)
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))

    def configure_model(self) -> None:
        """Nothing is sharded."""

    def training_step(self, batch, batch_idx):
        parts = {name: part for name, part in self.named_children() if name != "blocks"}
        parts |= {f"blocks.{number}": block for number, block in self.blocks.items()}
        losses = []
        for name, part in parts.items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {self.global_step}".encode()))
            inputs, target = torch.randn(2, 3, DIM, generator=generator)
            outputs = part(torch.arange(3) if name == "embedding" else inputs)
            losses.append((outputs - target).square().mean())
        return sum(losses)

    def configure_optimizers(self):
        groups: dict[str, list[nn.Parameter]] = {"matrices": [], "embeddings": [], "vectors": []}
        for name, parameter in self.named_parameters():
            is_table = name.startswith("embedding") and self.has_embedding_group
            groups["embeddings" if is_table else "matrices" if parameter.dim() > 1 else "vectors"].append(parameter)
        decay = {"matrices": 0.1, "embeddings": 0.05, "vectors": 0.0}
        optimizer = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay[name]} for name, params in groups.items() if params], lr=1e-2
        )
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 6], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint) -> None:
        checkpoint["state_dict"].pop(self.forgets, None)


class StagesInPlace(ModelParallelStrategy):
    """Two stages; a restore fills the live tensors."""

    def __init__(self, stage: int) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=2)
        self.pipeline_stage = stage


class StagesByDict(DDPStrategy):
    """Two stages; a restore goes through Lightning's dict."""

    def __init__(self, stage: int) -> None:
        super().__init__(process_group_backend="gloo")
        self.pipeline_stage = stage

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": 1, "rank": 0}

    def configure_ddp(self) -> None:
        """The stages are not replicas."""


STRATEGIES = {"in place": StagesInPlace, "by dict": StagesByDict}


class KillRank(Callback):
    """SIGKILL at the end of a step, before anything is saved there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class NoteStage(Callback):
    """Its state differs by stage: which stage saved what this rank has restored."""

    def __init__(self, stage: int | None) -> None:
        self.stage, self.restored_stage = stage, None

    def state_dict(self):
        return {"stage": self.stage}

    def load_state_dict(self, state_dict) -> None:
        self.restored_stage = state_dict["stage"]


@dataclass(frozen=True)
class Ended:
    """What a rank says after training.

    Attributes:
        report: Of the restore.
        restored_stage: Whose state its callback was given.
        groups: Learning rate and weight decay of each parameter.
        num_windows: State of each block that is no tensor.
        num_verified: Checkpoints.
    """

    report: str | None
    restored_stage: int | None
    groups: dict[str, tuple[float, float]]
    num_windows: dict[str, int]
    num_verified: int


def train(
    run_dir: Path,
    strategy: str | None,
    max_steps: int,
    *,
    mode: str = "sync",
    kill_at: int | None = None,
    verifies: bool = False,
    stages: tuple[int, ...] = (0, 1),
    **options: object,
) -> Ended:
    """Trains one stage on this rank, or the whole model where `strategy` is None; goes on from the latest save."""
    for message in (".*is not resumable.*", ".*Model has been.*", ".*does not have many workers.*"):
        warnings.filterwarnings("ignore", message=message)
    torch.manual_seed(1)
    stage = None if strategy is None else stages[int(os.environ["RANK"])]
    model = StagedModel(stage, **options)
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, mode=mode, every_n_steps=2, keep_last=None)
    verification, note = CheckpointVerification(), NoteStage(stage)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="auto" if strategy is None else STRATEGIES[strategy](stage),
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, note, *([verification] if verifies else []), *([KillRank(kill_at)] if kill_at else [])],
        default_root_dir=run_dir,
    )
    trainer.fit(model, DataLoader(range(100)), ckpt_path="latest")
    names = {parameter: name for name, parameter in model.named_parameters()}
    return Ended(
        checkpoint.restore_report and checkpoint.restore_report.text,
        note.restored_stage,
        {
            names[parameter]: (group["lr"], group["weight_decay"])
            for group in trainer.optimizers[0].param_groups
            for parameter in group["params"]
        },
        {number: block.num_windows for number, block in model.blocks.items()},
        verification.num_verified,
    )


def _train_keywords(arguments: tuple, keywords: dict) -> Ended:
    return train(*arguments, **keywords)


def run_staged(run_dir: Path, strategy: str | None, max_steps: int = LAST_STEP, **keywords: object) -> list[Ended]:
    """Returns what `train` returns on each of two fresh processes, or of one for the whole model."""
    world_size = 1 if strategy is None else 2
    return run_ranks(_train_keywords, world_size, (run_dir, strategy, max_steps), keywords)
