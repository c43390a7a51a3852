"""Lightning's averaging callbacks swap weights around saves and validations: the model is what trains, nothing else."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from outside.loaders import build_counting_loader
from outside.models import Validated

from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification
from genesis_callbacks.checkpoint import read_manifest, read_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback, but loading"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class AtStart(Callback):
    """Keeps the weights with which training begins, and the average that belongs to them."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if not hasattr(self, "weights"):
            self.weights = copy(pl_module.state_dict())
            average = [callback for callback in trainer.callbacks if isinstance(callback, EMAWeightAveraging)]
            self.average = copy(average[0]._average_model.state_dict()) if average else None


def copy(state):
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_equal(state, other) -> None:
    assert state.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def build_trainer(run_dir, *callbacks, max_steps=6, **options):
    torch.manual_seed(1)
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, **{"mode": "thread", **options})
    return checkpoint, Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[checkpoint, *callbacks],
        default_root_dir=run_dir,
    )


def test_live_weights_and_their_average_come_back_bit_for_bit(tmp_path):
    model, average = Validated(build_counting_loader), EMAWeightAveraging(decay=0.5)
    at_sixth = AtStart()
    options = {"every_n_steps": 6, "save_at_end": False}
    checkpoint, trainer = build_trainer(tmp_path, average, CheckpointVerification(), max_steps=7, **options)
    trainer.callbacks.insert(0, _BeforeBatch(6, at_sixth))
    trainer.fit(model)
    resumed = AtStart()
    _, trainer = build_trainer(tmp_path, EMAWeightAveraging(decay=0.5), resumed, max_steps=7)
    trainer.fit(Validated(build_counting_loader), ckpt_path=checkpoint.latest())
    assert_equal(at_sixth.weights, resumed.weights)
    assert_equal(at_sixth.average, resumed.average)
    assert any(not torch.equal(tensor, at_sixth.average["module." + name]) for name, tensor in resumed.weights.items())


class _BeforeBatch(Callback):
    """Passes on the batch after so many."""

    def __init__(self, step, callback) -> None:
        self._step, self._callback = step, callback

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self._step:
            self._callback.on_train_batch_start(trainer, pl_module, batch, batch_idx)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of six steps with an average, its live weights before the end, and its average."""
    run_dir = tmp_path_factory.mktemp("saved")
    model, average = Validated(build_counting_loader), EMAWeightAveraging(decay=0.5)
    live = {}

    class AtEnd(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            live.update(copy(pl_module.state_dict()))

    checkpoint, trainer = build_trainer(run_dir, average, AtEnd())
    trainer.fit(model)
    return checkpoint, live, copy(average._average_model.module.state_dict())


def test_the_checkpoint_has_the_live_weights_as_the_model_and_the_average_beside(saved):
    checkpoint, live, average = saved
    path = checkpoint.latest()
    assert_equal(live, _strip(path, "model."))
    assert_equal(average, _strip(path, "swapped."))
    others = [name for name in read_manifest(path).tensors if name.startswith("state.") and ".weight" in name]
    assert others == []  # `current_model_state` refers to the model's tensors


def _strip(path, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in read_tensors(path, prefix=prefix).items()}


def test_a_run_without_the_averaging_callback_goes_on_from_the_live_weights(saved, tmp_path):
    checkpoint, live, _ = saved
    resumed = AtStart()
    _, trainer = build_trainer(tmp_path, resumed, max_steps=7)
    trainer.fit(Validated(build_counting_loader), ckpt_path=checkpoint.latest())
    assert_equal(live, resumed.weights)


def test_validation_from_a_checkpoint_evaluates_the_average(saved, tmp_path):
    checkpoint, _, average = saved
    model = Validated(build_counting_loader)
    _, trainer = build_trainer(tmp_path, EMAWeightAveraging(decay=0.5))
    trainer.validate(model, ckpt_path=checkpoint.latest(), verbose=False)
    assert_equal(average, copy(model.state_dict()))


def test_the_last_step_is_saved_before_the_average_becomes_the_model(tmp_path):
    """Lightning's callback does that in its `on_train_end`, which runs before the checkpoint callback's own."""
    live = {}

    class StopAfterValidation(Callback):
        def on_validation_end(self, trainer, pl_module) -> None:
            trainer.should_stop = True
            live.update(copy(pl_module.state_dict()))

    model = Validated(build_counting_loader)
    checkpoint, trainer = build_trainer(tmp_path, EMAWeightAveraging(decay=0.5), StopAfterValidation(), max_steps=99)
    trainer.fit(model)
    path = checkpoint.last_saved
    assert path.name == "step-00000004"
    assert_equal(live, _strip(path, "model."))
    assert any(not torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())


def test_an_exception_in_a_validation_does_not_save_the_average_as_the_model(tmp_path):
    class FailInValidation(Validated):
        def validation_step(self, batch, batch_idx) -> None:
            raise ArithmeticError

    checkpoint, trainer = build_trainer(tmp_path, EMAWeightAveraging(decay=0.5), save_on_exception=True, max_steps=99)
    with (
        pytest.warns(UserWarning, match="Training failed .ArithmeticError.; nothing is saved yet"),
        pytest.warns(UserWarning, match="a callback may have replaced the weights by an average"),
        pytest.raises(ArithmeticError),
    ):
        trainer.fit(FailInValidation(build_counting_loader))
    assert checkpoint.last_saved is None
