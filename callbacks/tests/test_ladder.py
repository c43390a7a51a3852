"""The ladder: save, be killed, resume, save over the retention limit, fit again; in a plain project, every strategy."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from plain_project import build_strategy, full
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks._start_notices import describe_bucket_order
from genesis_callbacks.checkpoint import find_latest, list_committed, verify
from genesis_callbacks.testing import run_ranks

WORLD_SIZES = {"single": 1, "ddp": 2, "fsdp2": 2}
SLOW_EACH = [pytest.mark.slow, pytest.mark.each]


class Boring(BoringModel):
    """Lightning's own, with data that are a function of the step, and an optimizer with state."""

    def __init__(self, *, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.layer.weight, torch.distributed.tensor.DTensor):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(10 * self.global_step + self.trainer.global_rank)
        loss = self.layer(torch.randn(4, 32, generator=generator)).square().mean()
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(range(100))


class KillAll(Callback):
    """Kills its rank, by SIGKILL, before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def climb(
    root: Path, strategy: str, is_manual: bool, mode: str, max_steps: tuple[int, ...], *callbacks: Callback
) -> dict[str, object]:
    """Fits from the latest checkpoint, with two checkpoint callbacks, and returns what that came to.

    It fits once for each of `max_steps`; Lightning makes new optimizers for the second.
    """
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*|.*no `val_dataloader`.*")
    warnings.filterwarnings("ignore", message=".*`training_step` returned `None`.*")
    torch.manual_seed(1)
    model = Boring(is_manual=is_manual)
    often = AsyncProcessCheckpoint(run_dir=root / "often", every_n_steps=1, keep_last=2, mode=mode)
    rarely = AsyncProcessCheckpoint(run_dir=root / "rarely", every_n_steps=3, save_at_end=False, mode=mode)
    counters = TokenCounters(count_fn=torch.numel)
    world_size = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=build_strategy(strategy, world_size),
        max_steps=max_steps[0],
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[often, rarely, counters, SkipAwareLR(total_updates=20), *callbacks],
        default_root_dir=root,
    )
    trainer.fit(model, ckpt_path=often.latest())
    run = {
        "losses": list(model.losses),
        "weights": {name: full(tensor) for name, tensor in model.state_dict().items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "counters": counters.checkpoint_counters(),
    }
    for steps in max_steps[1:]:
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(model)
    return {
        **run,
        "failed": often.statistics.num_failed + rarely.statistics.num_failed,
        "num_losses": len(model.losses),
    }


def names_in(run_dir: Path) -> list[str]:
    return [path.name for path, _ in list_committed(run_dir)]


@pytest.mark.parametrize(
    ("strategy", "is_manual"),
    [
        ("single", False),
        *(pytest.param(*case, marks=SLOW_EACH) for case in (("ddp", True), ("fsdp2", False))),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("single", True), ("ddp", False), ("fsdp2", True))),
    ],
)
def test_a_plain_project_climbs_the_ladder(tmp_path, strategy, is_manual):
    """Saves, is killed, resumes, saves over the retention limit, fits twice; two callbacks at once, with the clocks."""
    world_size = WORLD_SIZES[strategy]
    straight = run_ranks(climb, world_size, tmp_path / "straight", strategy, is_manual, "sync", (8,))
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, tmp_path / "run", strategy, is_manual, "process", (8,), KillAll(5))
    resumed = run_ranks(climb, world_size, tmp_path / "run", strategy, is_manual, "thread", (8, 9))
    for run, other in zip(straight, resumed, strict=True):
        assert 4 <= len(other["losses"]) <= 5  # the orphaned writers may or may not have finished step 4
        assert run["losses"][-len(other["losses"]) :] == other["losses"]
        assert run["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in run["weights"].items())
        assert (run["lr"], run["counters"]) == (other["lr"], other["counters"])
        assert run["failed"] == other["failed"] == 0
        assert other["num_losses"] == len(other["losses"]) + 1
    assert names_in(tmp_path / "run/often") == ["step-00000008", "step-00000009"]
    assert names_in(tmp_path / "run/rarely")[-1] == "step-00000009"
    manifest = verify(find_latest(tmp_path / "run/often"), "deep")
    assert (manifest.counters["updates"], manifest.sequence) == (9, 9)
    assert manifest.previous.name == "step-00000008"


@pytest.mark.slow
def test_ddp_on_four_ranks_goes_on_bit_for_bit_if_its_buckets_stay(tmp_path):
    strategy = "ddp_with_fixed_buckets"
    straight = run_ranks(climb, 4, tmp_path / "straight", strategy, False, "sync", (8,))
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, 4, tmp_path / "run", strategy, False, "process", (8,), KillAll(5))
    resumed = run_ranks(climb, 4, tmp_path / "run", strategy, False, "thread", (8,))
    for run, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in run["weights"].items())


def test_who_trains_by_ddp_on_three_ranks_is_told_how_a_resume_becomes_exact():
    exact, usual = (build_strategy(name, 3) for name in ("ddp_with_fixed_buckets", "ddp"))
    assert describe_bucket_order(exact, 3) is None
    assert describe_bucket_order(usual, 2) is None
    assert "find_unused_parameters=True" in describe_bucket_order(usual, 3)
