"""Lightning's own words with our checkpoints: ckpt_path, the paths' attributes, and what a used directory means."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.checkpoint import CheckpointError, list_checkpoints, read_best, read_tensors

SAMPLES = torch.linspace(-1, 1, 16).reshape(8, 2)
LOSSES = {2: 3.0, 4: 1.0, 6: 2.0}
"""What validation logs after a step: the best of the three epochs is the second."""


class Model(LightningModule):
    """Two batches an epoch; validates after each epoch and logs `LOSSES`."""

    def __init__(self, *, logs: str = "val_loss", values=None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.logs, self.values = logs, values or LOSSES
        self.steps = []

    def training_step(self, batch, batch_idx):
        self.steps.append(self.global_step)
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log(self.logs, self.values.get(self.global_step, 9.0))

    def test_step(self, batch, batch_idx):
        self.log("weight", self.layer.weight.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_loader():
    return DataLoader(SAMPLES, batch_size=4)


def build_trainer(run_dir, max_epochs=3, callbacks=(), **options):
    options = {"mode": "sync", "every_n_epochs": 1, "keep_last": None, **options}
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, **options)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[*callbacks, checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=run_dir,
    )
    return trainer, checkpoint


def fit(run_dir, max_epochs=3, ckpt_path=None, *, has_validation=True, model=None, **options):
    trainer, checkpoint = build_trainer(run_dir, max_epochs, **options)
    model = model or Model()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*many workers.*|.*no `val_dataloader`.*")
        loaders = (build_loader(), build_loader()) if has_validation else (build_loader(),)
        trainer.fit(model, *loaders, ckpt_path=ckpt_path)
    return model, checkpoint


def names(run_dir):
    return [path.name for path in list_checkpoints(run_dir)]


def steps(*numbers):
    return [f"step-{number:08d}" for number in numbers]


@pytest.mark.parametrize("word", ["last", "latest"])
def test_last_starts_a_run_and_then_continues_it(tmp_path, word, caplog):
    """The same script in a second process; reported as Lightning-AI/pytorch-lightning#14466."""
    with caplog.at_level("INFO"):
        first, _ = fit(tmp_path, 1, word)
    assert first.steps == [0, 1]
    assert "no checkpoint in" in caplog.text
    second, checkpoint = fit(tmp_path, 3, word)
    assert second.steps == [2, 3, 4, 5]
    assert names(tmp_path) == steps(2, 4, 6)
    assert checkpoint.restore_report.step == 2


def test_last_takes_the_file_of_a_model_checkpoint_until_there_is_a_checkpoint_of_ours(tmp_path):
    theirs = ModelCheckpoint(tmp_path / "theirs", save_last=True)
    trainer, _ = build_trainer(tmp_path / "other", 1, [theirs], every_n_epochs=None, save_at_end=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Model(), build_loader(), build_loader())
        model = Model()
        again = ModelCheckpoint(tmp_path / "theirs", save_last=True)
        trainer, _ = build_trainer(tmp_path / "ours", 2, [again])
        trainer.fit(model, build_loader(), build_loader(), ckpt_path="last")
        assert model.steps == [2, 3]
        model = Model()
        trainer, checkpoint = build_trainer(
            tmp_path / "ours", 3, [ModelCheckpoint(tmp_path / "theirs", save_last=True)]
        )
        trainer.fit(model, build_loader(), build_loader(), ckpt_path="last")
    assert (model.steps, checkpoint.restore_report.step) == ([4, 5], 4)


def test_best_resumes_and_evaluates_the_best_and_the_attributes_name_it(tmp_path):
    """An empty path and no score; reported as Lightning-AI/pytorch-lightning#8900."""
    _, checkpoint = fit(tmp_path, monitor="val_loss")
    best = tmp_path / "checkpoints/step-00000004"
    assert checkpoint.best_model_path == str(best)
    assert checkpoint.best_model_score == 1.0
    assert checkpoint.last_model_path == str(tmp_path / "checkpoints/step-00000006")
    # In another process, before any fit, as a script for evaluation begins.
    trainer, fresh = build_trainer(tmp_path, monitor="val_loss")
    assert fresh.best_model_path == str(best)
    assert fresh.best_model_score.item() == 1.0
    expected = {path.name: _read_sum(path) for path in list_checkpoints(tmp_path)}
    for word, name in (("best", best.name), ("last", "step-00000006"), ("latest", "step-00000006")):
        trainer, _ = build_trainer(tmp_path, monitor="val_loss")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (metrics,) = trainer.test(Model(), build_loader(), ckpt_path=word, verbose=False)
        assert metrics["weight"] == pytest.approx(expected[name])
    with pytest.warns(UserWarning, match=r"continues from the older step 4: 1 newer checkpoint was moved to .*superse"):
        model, _ = fit(tmp_path, ckpt_path="best", monitor="val_loss")
    assert model.steps == [4, 5]
    assert names(tmp_path / "checkpoints/superseded-1") == steps(6)


def _read_sum(path):
    return float(read_tensors(path, prefix="model.layer.weight")["model.layer.weight"].sum())


def test_without_a_monitor_the_best_is_the_newest_as_with_lightnings_own(tmp_path, caplog):
    _, checkpoint = fit(tmp_path, 2)
    assert checkpoint.best_model_path == checkpoint.last_model_path
    assert checkpoint.best_model_score is None
    trainer, _ = build_trainer(tmp_path)
    with warnings.catch_warnings(), caplog.at_level("INFO"):
        warnings.simplefilter("ignore")
        trainer.test(Model(), build_loader(), ckpt_path="best", verbose=False)
    assert "Without a monitor, ckpt_path='best' takes the newest checkpoint" in caplog.text


@pytest.mark.parametrize("word", ["best", "last"])
def test_a_word_without_a_checkpoint_never_evaluates_untrained_weights(tmp_path, word):
    trainer, checkpoint = build_trainer(tmp_path, monitor="val_loss")
    assert (checkpoint.best_model_path, checkpoint.last_model_path, checkpoint.best_model_score) == ("", "", None)
    with pytest.raises(CheckpointError, match=f"ckpt_path is '{word}', but .* has no checkpoint"):
        trainer.test(Model(), build_loader(), ckpt_path=word)


def test_a_used_directory_is_refused_in_one_line_that_names_both_ways(tmp_path):
    """A run that starts from scratch unasked; reported as Lightning-AI/pytorch-lightning#7072 and #2735."""
    fit(tmp_path, 2)
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, 2)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{tmp_path} already has checkpoints, the newest step-00000004")
    assert 'ckpt_path="latest"' in text
    assert 'on_existing="start_over"' in text
    assert names(tmp_path) == steps(2, 4)
    # Whatever was restored from elsewhere: these checkpoints would not be continued either.
    fit(tmp_path / "other", 1)
    with pytest.raises(CheckpointError, match="already has checkpoints"):
        fit(tmp_path, 2, str(tmp_path / "other/checkpoints/step-00000002"))
    # Damaged ones are checkpoints, too: the run is not a new one.
    for path in list_checkpoints(tmp_path):
        (path / "COMMITTED").unlink()
    with pytest.raises(CheckpointError, match="already has checkpoints"):
        fit(tmp_path, 2)


def test_asked_to_start_over_it_says_what_was_moved_where(tmp_path):
    fit(tmp_path, 2)
    place = tmp_path / "checkpoints/superseded-1"
    message = rf"starts over from step 0: 2 earlier checkpoints were moved to {place}, and nothing was deleted"
    with pytest.warns(UserWarning, match=message):
        model, _ = fit(tmp_path, 1, on_existing="start_over")
    assert model.steps == [0, 1]
    assert (names(tmp_path), names(place)) == (steps(2), steps(2, 4))
    # The option does not matter to a run that continues.
    model, _ = fit(tmp_path, 2, "latest", on_existing="start_over")
    assert model.steps == [2, 3]


def test_a_runs_directory_is_no_checkpoint_and_the_line_names_one(tmp_path):
    fit(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"is the directory of a run: give .*step-00000002, or, .*'latest'"):
        fit(tmp_path, 2, str(tmp_path))


def test_a_dry_run_in_a_used_directory_changes_nothing(tmp_path):
    fit(tmp_path, 2)
    checkpoint = AsyncProcessCheckpoint(run_dir=tmp_path)
    trainer = Trainer(
        accelerator="cpu",
        fast_dev_run=True,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*many workers.*")
        trainer.fit(Model(), build_loader(), build_loader())
    assert names(tmp_path) == steps(2, 4)
    assert not (tmp_path / "checkpoints/superseded-1").exists()


@pytest.mark.parametrize(("every", "expected"), [(1, (2, 4, 6)), (2, (4, 6)), (5, (6,))])
def test_every_n_epochs_saves_after_the_last_step_of_an_epoch(tmp_path, every, expected):
    fit(tmp_path, every_n_epochs=every)
    assert names(tmp_path) == steps(*expected)


def test_a_monitor_that_is_never_logged_is_said(tmp_path, caplog):
    """No best checkpoint and no reason; reported as Lightning-AI/pytorch-lightning#12923 and sp-uhh/sgmse#32."""
    ended = pytest.warns(UserWarning, match=r"Training failed \(CheckpointError\); the last good one is step-00000002")
    with ended, pytest.raises(CheckpointError, match="monitor is 'val_acc', but validation logged val_loss"):
        fit(tmp_path / "key", monitor="val_acc")
    message = "no validation has logged a finite value of the monitor 'val_loss'"
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match=message):
        fit(tmp_path / "none", monitor="val_loss", has_validation=False)
    assert "monitor is 'val_loss', but this fit runs no validation" in caplog.text
    nothing = Model(values=dict.fromkeys(LOSSES, float("nan")))
    with pytest.warns(UserWarning, match=message):
        fit(tmp_path / "nan", monitor="val_loss", model=nothing)
    assert read_best(tmp_path / "nan") is None


def test_what_a_resume_will_not_and_did_not_restore_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, 1, every_n_steps=1, every_n_epochs=None)
    assert "position of DataLoader in an epoch is not saved" in caplog.text
    within = tmp_path / "checkpoints/step-00000001"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, and that newer ones move
        model = Model()
        model.accuracy = MeanMetric()
        _, checkpoint = fit(tmp_path, 1, str(within), model=model)
    assert model.steps == [1]
    assert "  reset    what the metrics accuracy counted in this epoch" in checkpoint.restore_report.text
    assert "the position of DataLoader in the epoch: 1 of 2 batches were used" in checkpoint.restore_report.text
    _, checkpoint = fit(tmp_path, 2, "latest")
    assert "the position of" not in checkpoint.restore_report.text  # from an epoch's end the next one is whole


def test_the_unit_of_an_interval_with_two_optimizers_is_said(tmp_path, caplog):
    """Reported as Lightning-AI/pytorch-lightning#17958 and ashleve/lightning-hydra-template#409."""

    class Two(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch).square().mean())
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with caplog.at_level("INFO"):
        fit(tmp_path, 1, every_n_steps=2, every_n_epochs=None, model=Two())
    assert "the steps of all 2 optimizers together are a multiple of 2" in caplog.text
    assert names(tmp_path) == steps(2, 4)


def test_a_run_that_a_sigkill_would_lose_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, 1, every_n_epochs=None)
    assert "a SIGKILL loses all work" in caplog.text
