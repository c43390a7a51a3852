"""What anybody's project may do with the callback: manual optimization, two fits, two callbacks, stock checkpoints."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, XLAStrategy
from torch import nn
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification
from genesis_callbacks._refused_strategies import refuse_to_save
from genesis_callbacks.checkpoint import CheckpointError, find_latest, list_committed
from genesis_callbacks.testing import run_ranks

MODES = ("sync", "thread", "process")


class TwoNets(LightningModule):
    """Manual or automatic, with BatchNorm, extra state, hyperparameters and a validation loop."""

    def __init__(self, *, is_manual: bool = False, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not is_manual
        self.first = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.second = nn.Linear(3, 1)
        self.seen_loads: list[int] = []

    def loss(self, net, step):
        data = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        return net(data).square().mean()

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.loss(self.first, self.global_step) + self.loss(self.second, self.global_step)
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss(net, self.global_step))
            optimizer.step()
        return None

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self.second, 0))

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.05)  # without momentum: it never has state
        return [
            torch.optim.AdamW(self.first.parameters(), lr=1e-2),
            torch.optim.SGD(self.second.parameters(), lr=1e-2, momentum=0.9),
        ]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {1: torch.arange(3), "tuple": (1, 2)}

    def on_load_checkpoint(self, checkpoint):
        assert torch.equal(checkpoint["mine"][1], torch.arange(3))
        assert checkpoint["mine"]["tuple"] == (1, 2)
        self.seen_loads.append(checkpoint["global_step"])


class PositionData(LightningDataModule):
    """Its position travels with the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def train_dataloader(self):
        return DataLoader(range(10))

    def val_dataloader(self):
        return DataLoader(range(2))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state_dict):
        self.position = state_dict["position"]


class Advance(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        trainer.datamodule.position += 1


def build_trainer(run_dir, max_steps, *callbacks, **options) -> Trainer:
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=run_dir,
        **options,
    )


def fit(run_dir, max_steps, *, is_manual=False, ckpt_path=None, **options):
    torch.manual_seed(0)
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, **options)
    model, data = TwoNets(is_manual=is_manual), PositionData()
    trainer = build_trainer(run_dir, max_steps, checkpoint, Advance())
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model, data, checkpoint


def resume_manually(root, is_manual, mode):
    # Lightning counts each optimizer's step, so a window of two optimizers counts two.
    total = 12 if is_manual else 6
    straight, _, _ = fit(root / "straight", total, is_manual=is_manual, save_at_end=False)
    options = {"is_manual": is_manual, "mode": mode, "every_n_steps": 2}
    fit(root / "run", total // 2, **options)
    resumed, data, checkpoint = fit(root / "run", total, ckpt_path="latest", **options)
    assert resumed.seen_loads == [total // 2]
    assert data.position == 6
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    return checkpoint.restore_report.text


@pytest.mark.parametrize(
    "mode", ["process", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync", "thread"))]
)
@pytest.mark.parametrize("is_manual", [pytest.param(False, marks=pytest.mark.slow), True])
def test_automatic_and_manual_optimization_resume_bit_equal(tmp_path, is_manual, mode):
    (report,) = run_ranks(resume_manually, 1, tmp_path, is_manual, mode)
    assert ("there was none yet" in report) == (not is_manual)


def several_fits(root, mode):
    checkpoint = AsyncProcessCheckpoint(run_dir=root / "one", every_n_steps=2, keep_last=None, mode=mode)
    other = AsyncProcessCheckpoint(run_dir=root / "two", every_n_minutes=1e-9, save_at_end=False, mode=mode)
    model, data = TwoNets(), PositionData()
    trainer = build_trainer(root, 3, checkpoint, other, Advance())
    trainer.fit(model, data)
    original = type(trainer.strategy).load_checkpoint
    assert trainer.strategy.load_checkpoint.__func__ is original
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(model, data)
    path = find_latest(root / "one")
    trainer.validate(model, data, ckpt_path=path)
    stock = root / "stock.ckpt"
    trainer.save_checkpoint(stock)
    fresh = build_trainer(root, 7, AsyncProcessCheckpoint(run_dir=root / "three"), Advance())
    fresh.fit(TwoNets(), PositionData(), ckpt_path=stock)
    return {
        name: [(path.name, manifest.sequence) for path, manifest in list_committed(root / name)]
        for name in ("one", "two", "three")
    }


@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("thread", "process"))]
)
def test_two_fits_two_callbacks_validate_and_stock_checkpoints(tmp_path, mode):
    (committed,) = run_ranks(several_fits, 1, tmp_path, mode)
    assert committed == {
        "one": [("step-00000002", 1), ("step-00000003", 2), ("step-00000004", 3), ("step-00000006", 4)],
        "two": [("step-00000004", 4), ("step-00000005", 5), ("step-00000006", 6)],
        "three": [("step-00000007", 1)],
    }


def verified_fits(root, is_manual):
    verification = CheckpointVerification(finite=True)
    savers = [
        AsyncProcessCheckpoint(run_dir=root / "ours", every_n_steps=2),
        ModelCheckpoint(dirpath=root / "stock", every_n_train_steps=2, save_top_k=-1),
    ]
    model, data = TwoNets(is_manual=is_manual), PositionData()
    step = 4 if is_manual else 2  # Lightning counts each optimizer's step
    trainer = build_trainer(root, step, *savers, Advance(), verification)
    trainer.fit(model, data)
    counts = [verification.num_verified]
    assert verification.state_dict() == {}
    trainer.fit_loop.epoch_loop.max_steps = 2 * step
    trainer.fit(model, data)
    trainer.validate(model, data, verbose=False)
    assert verification.num_bad == 0
    resumed = build_trainer(root, 3 * step, *savers, Advance(), verification)
    resumed.fit(TwoNets(is_manual=is_manual), PositionData(), ckpt_path="latest")
    return [*counts, verification.num_verified, verification.num_bad]


@pytest.mark.parametrize("is_manual", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verification_survives_several_fits_and_a_resume(tmp_path, is_manual):
    ((first, third, num_bad),) = run_ranks(verified_fits, 1, tmp_path, is_manual)
    assert (first, third, num_bad) == ((4, 4, 0) if is_manual else (2, 2, 0))


def resume_with_two(root):
    def callbacks():
        return [
            AsyncProcessCheckpoint(run_dir=root / "often", every_n_steps=1),
            AsyncProcessCheckpoint(run_dir=root / "rarely", every_n_steps=3, save_at_end=False),
            Advance(),
        ]

    build_trainer(root, 5, *callbacks()).fit(TwoNets(), PositionData())
    build_trainer(root, 7, *callbacks()).fit(TwoNets(), PositionData(), ckpt_path=find_latest(root / "often"))
    return [[path.name for path, _ in list_committed(root / name)] for name in ("often", "rarely")]


def test_a_second_callback_goes_on_with_what_the_first_restored(tmp_path):
    ((often, rarely),) = run_ranks(resume_with_two, 1, tmp_path)
    assert often == ["step-00000005", "step-00000006", "step-00000007"]
    assert rarely == ["step-00000003", "step-00000006"]


def early_stop(root):
    checkpoint = AsyncProcessCheckpoint(run_dir=root)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    trainer = build_trainer(root, 50, checkpoint, stopping, Advance(), val_check_interval=3)
    trainer.fit(TwoNets(), PositionData())
    return trainer.global_step, str(find_latest(root).name)


def test_a_stop_that_a_hook_decides_is_saved_at_the_end(tmp_path):
    ((step, name),) = run_ranks(early_stop, 1, tmp_path)
    assert step < 50
    assert name == f"step-{step:08d}"


class Stateful(Callback):
    def state_dict(self):
        return {"handle": object()}


def fit_with_unknown_state(root):
    trainer = build_trainer(root, 3, AsyncProcessCheckpoint(run_dir=root), Stateful(), Advance())
    with pytest.raises(
        CheckpointError,
        match=r"cannot save state\.0\.trainer\.callbacks\.Stateful\.handle \(of type builtins\.object\)",
    ):
        trainer.fit(TwoNets(), PositionData())
    return trainer.global_step


def test_an_unknown_state_is_refused_by_key_before_the_first_step(tmp_path):
    assert run_ranks(fit_with_unknown_state, 1, tmp_path) == [0]


def fit_other_model(root):
    fit(root, 2)
    trainer = build_trainer(root, 4, AsyncProcessCheckpoint(run_dir=root), Advance())
    with pytest.raises(RuntimeError, match="size mismatch for first"):
        trainer.fit(TwoNets(width=5), PositionData(), ckpt_path="latest")


def test_another_model_is_refused(tmp_path):
    run_ranks(fit_other_model, 1, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "name"), [(FSDPStrategy, "FSDP1"), (DeepSpeedStrategy, "DeepSpeed"), (XLAStrategy, "XLA")]
)
def test_strategies_without_support_are_refused_by_name(strategy, name):
    with pytest.raises(CheckpointError, match=name):
        refuse_to_save(strategy.__new__(strategy))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "threads"}, "mode must be 'sync' or 'thread' or 'process', not 'threads'"),
        ({"staging": "none"}, "staging must be 'blocking' or 'overlapped', not 'none'"),
        ({"when_busy": "fail"}, "when_busy must be 'wait' or 'skip', not 'fail'"),
        ({"save_timeout_seconds": 0.0}, "save_timeout_seconds must be positive"),
        ({"every_n_steps": 0}, "every_n_steps must be positive"),
        ({"every_n_minutes": -1.0}, "every_n_minutes must be positive"),
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"on_save_failure": "ignore"}, "on_save_failure must be"),
    ],
)
def test_arguments_without_meaning_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        AsyncProcessCheckpoint(run_dir=tmp_path, **options)
