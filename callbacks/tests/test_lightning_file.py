"""One portable .ckpt from a checkpoint: stock Lightning, without this package's callback, takes it as its own."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from plain_project import PlainModel
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint, export_lightning_checkpoint
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    Ranks,
    RunMetadata,
    SaveTarget,
    Snapshot,
    save_blocking,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]


def build_trainer(root, *callbacks, max_steps=4) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        default_root_dir=root,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four steps with tied weights, saved by both, and its portable file."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(1)
    ours = AsyncProcessCheckpoint(run_dir=root / "run", mode="thread")
    theirs = ModelCheckpoint(dirpath=root, filename="theirs", every_n_train_steps=4)
    build_trainer(root, ours, theirs).fit(PlainModel(), DataLoader(range(100)))
    return root, export_lightning_checkpoint(root / "run", root / "ours.ckpt")


def load(path):
    return torch.load(path, weights_only=True)


def assert_equal(value, other, path="") -> None:
    if isinstance(value, torch.Tensor):
        assert torch.equal(value, other), path
    elif isinstance(value, dict):
        assert value.keys() == other.keys(), path
        for key in value:
            assert_equal(value[key], other[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        assert len(value) == len(other), path
        for index, pair in enumerate(zip(value, other, strict=True)):
            assert_equal(*pair, f"{path}.{index}")
    else:
        assert value == other, path


def test_the_file_holds_what_lightning_would_have_saved(saved):
    root, path = saved
    ours, theirs = load(path), load(root / "theirs.ckpt")
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "global_step", "epoch"):
        assert_equal(ours[name], theirs[name], name)
    assert ours.keys() == theirs.keys()


def test_load_from_checkpoint_gives_the_model(saved):
    root, path = saved
    model = PlainModel.load_from_checkpoint(path)
    assert_equal(model.state_dict(), PlainModel.load_from_checkpoint(root / "theirs.ckpt").state_dict())


def test_stock_lightning_goes_on_from_the_file_as_from_its_own(saved, tmp_path):
    root, path = saved
    models = []
    for file in (path, root / "theirs.ckpt"):
        model = PlainModel()
        build_trainer(tmp_path, max_steps=7).fit(model, DataLoader(range(100)), ckpt_path=file)
        assert len(model.losses) == 3
        models.append(model)
    assert_equal(models[0].state_dict(), models[1].state_dict())


def test_with_an_averaging_callback_the_file_gives_the_average_and_goes_on_from_the_live_weights(tmp_path):
    average = EMAWeightAveraging(decay=0.5)
    checkpoint = AsyncProcessCheckpoint(run_dir=tmp_path, mode="thread")
    build_trainer(tmp_path, checkpoint, average).fit(BoringModel())
    path = export_lightning_checkpoint(tmp_path, tmp_path / "ema.ckpt")
    content = load(path)
    assert_equal(content["state_dict"], average._average_model.module.state_dict())
    resumed = EMAWeightAveraging(decay=0.5)
    trainer = build_trainer(tmp_path, resumed, max_steps=4)
    model = BoringModel()
    trainer.fit(model, ckpt_path=path)
    assert_equal(resumed._average_model.module.state_dict(), content["state_dict"])


def test_a_file_that_exists_a_folder_without_checkpoints_and_damage_are_refused(saved, tmp_path):
    root, path = saved
    with pytest.raises(CheckpointError, match=r"ours\.ckpt exists: give the name of a new file"):
        export_lightning_checkpoint(root / "run", path)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        export_lightning_checkpoint(tmp_path, tmp_path / "new.ckpt")
    damaged = tmp_path / "checkpoints/step-00000004"
    damaged.mkdir(parents=True)
    for file in (root / "run/checkpoints/step-00000004").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[: -1 if file.suffix == ".distcp" else None])
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        export_lightning_checkpoint(damaged, tmp_path / "new.ckpt")
    assert not (tmp_path / "new.ckpt").exists()


def test_a_checkpoint_whose_state_is_not_a_trainers_is_refused(tmp_path):
    target = SaveTarget(tmp_path, Ranks(), origin=RunMetadata({}, {}))
    path = save_blocking(target, lambda: Snapshot(1, {}, local_shards("model.w", torch.ones(3), "parameter"), {}))
    with pytest.raises(CheckpointError, match=r"holds no state of a Trainer \(KeyError: 'model_extras'\)"):
        export_lightning_checkpoint(path, tmp_path / "new.ckpt")
