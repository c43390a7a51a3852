"""Where the data stand comes back exactly, or the restore is refused: pure parts, and plain fits in this process."""

import os

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from outside.loaders import CountingLoader, build_counting_loader, build_plain_loader
from outside.models import OneCycle, Plain

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks._data_position import LostDataPositionWarning, count_epoch, find_difference, is_epoch_over
from genesis_callbacks.base.checkpoint_errors import CheckpointError
from genesis_callbacks.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
STOP = "stopped by the test"


class Seen(Callback):
    """Keeps what training saw, and ends it by an exception before a step."""

    def __init__(self, stop: int | None) -> None:
        self.batches: list[torch.Tensor] = []
        self.epochs: list[int] = []
        self._stop = stop

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self._stop:
            raise InterruptedError(STOP)
        self.batches.append(batch)


def fit(run_dir, build_loader, *, stop=None, kind=Plain, max_steps=-1, **options) -> Seen:
    torch.manual_seed(1)
    seen = Seen(stop)
    checkpoint = AsyncProcessCheckpoint(
        run_dir=run_dir, **{"mode": "thread", "every_n_steps": 1, "save_at_end": False, **options}
    )
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=-1 if max_steps != -1 else 3,
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, seen],
        default_root_dir=run_dir,
    )
    if stop is None:
        trainer.fit(kind(build_loader), ckpt_path="latest")
        return seen
    with pytest.warns(UserWarning, match="Training failed .InterruptedError."), pytest.raises(InterruptedError):
        trainer.fit(kind(build_loader), ckpt_path="latest")
    return seen


def assert_goes_on(whole: Seen, resumed: Seen, step: int) -> None:
    assert len(resumed.batches) == len(whole.batches) - step
    for batch, other in zip(whole.batches[step:], resumed.batches, strict=True):
        assert torch.equal(batch, other)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Plain, 3),
        (OneCycle, 4),
        *(pytest.param(kind, step, marks=pytest.mark.slow) for kind, step in ((Plain, 4), (OneCycle, 3))),
        *(pytest.param(kind, step, marks=pytest.mark.slow) for kind in (Plain, OneCycle) for step in (5, 8)),
    ],
)
def test_a_loader_with_a_state_goes_on_from_every_step(tmp_path, kind, step):
    """Within an epoch and at its last step; also where `estimated_stepping_batches` builds the loader early."""
    whole = fit(tmp_path / "whole", build_counting_loader, kind=kind, every_n_steps=None)
    fit(tmp_path / "run", build_counting_loader, kind=kind, stop=step)
    assert_goes_on(whole, fit(tmp_path / "run", build_counting_loader, kind=kind), step)


@pytest.mark.parametrize("max_steps", [-1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_plain_loader_goes_on_from_an_epochs_end_with_the_same_draws(tmp_path, max_steps):
    whole = fit(tmp_path / "whole", build_plain_loader, every_n_steps=None, max_steps=max_steps)
    fit(tmp_path / "run", build_plain_loader, stop=4, max_steps=max_steps)
    resumed = fit(tmp_path / "run", build_plain_loader, max_steps=max_steps)
    assert_goes_on(whole, resumed, 4)
    assert resumed.epochs == [1, 2]


class ForgetfulLoader(CountingLoader):
    """Takes its state and begins at 0 all the same."""

    def load_state_dict(self, state) -> None:
        pass


def build_forgetful_loader():
    generator = torch.Generator().manual_seed(5)
    return ForgetfulLoader(build_plain_loader().dataset, batch_size=4, shuffle=True, generator=generator)


def test_a_loader_that_does_not_take_its_state_is_refused_with_place_and_remedy_and_may_be_allowed(tmp_path):
    fit(tmp_path, build_forgetful_loader, stop=6)
    message = (
        r"rank 0: loader 0 did not take its state \(num_given is 0, but 2 was saved\).*on_lost_data_position='warn'"
    )
    with pytest.raises(CheckpointError, match=message), pytest.warns(UserWarning, match="Training failed"):
        fit(tmp_path, build_forgetful_loader)
    with pytest.warns(LostDataPositionWarning, match="did not take its state"):
        fit(tmp_path, build_forgetful_loader, on_lost_data_position="warn")


def fit_two_steps(run_dir) -> None:
    fit(run_dir, build_counting_loader, max_steps=2)


@pytest.mark.process
def test_loaders_of_another_number_of_ranks_are_refused_with_both_numbers_and_may_be_allowed(tmp_path):
    run_ranks(fit_two_steps, 2, tmp_path)
    message = r"2 ranks saved the states of their loaders, but 1 restore; on_lost_data_position='warn'"
    with pytest.raises(CheckpointError, match=message), pytest.warns(UserWarning, match="Training failed"):
        fit(tmp_path, build_counting_loader, max_steps=4)
    with pytest.warns(LostDataPositionWarning, match="2 ranks saved the states of their loaders, but 1 restore"):
        fit(tmp_path, build_counting_loader, max_steps=4, on_lost_data_position="warn")


def build_loop(*, ready: int, processed: int, batch_processed: int, batch_completed: int, is_last: bool):
    counts = {"ready": ready, "started": ready, "processed": processed, "completed": processed}
    batch = {"ready": batch_processed, "processed": batch_processed, "completed": batch_completed}
    return {
        "epoch_progress": {"total": counts, "current": counts},
        "epoch_loop.batch_progress": {"current": batch, "is_last_batch": is_last},
    }


def test_an_epoch_is_over_after_its_last_batch_and_after_training():
    assert not is_epoch_over(build_loop(ready=1, processed=0, batch_processed=3, batch_completed=2, is_last=False))
    assert is_epoch_over(build_loop(ready=1, processed=0, batch_processed=4, batch_completed=3, is_last=True))
    assert is_epoch_over(build_loop(ready=1, processed=1, batch_processed=4, batch_completed=4, is_last=True))
    # Saved in a validation at the epoch's end, whose hooks are still to come.
    assert not is_epoch_over(build_loop(ready=1, processed=0, batch_processed=4, batch_completed=4, is_last=True))


def test_an_epoch_that_was_not_counted_is_counted():
    right = build_loop(ready=2, processed=1, batch_processed=3, batch_completed=2, is_last=False)
    assert count_epoch(right) == right
    short = build_loop(ready=1, processed=1, batch_processed=3, batch_completed=2, is_last=False)
    counted = count_epoch(short)["epoch_progress"]
    assert counted["current"] == counted["total"] == {"ready": 2, "started": 2, "processed": 1, "completed": 1}


def test_differences_name_their_place():
    assert find_difference({"a": [1, torch.ones(2)]}, {"a": [1, torch.ones(2)]}) is None
    assert find_difference({"a": [1, torch.ones(2)]}, {"a": [1, torch.zeros(2)]}).startswith("a.1 is tensor([0., 0.])")
    assert find_difference({"a": 1}, {}) == "a was saved and is missing now"
    assert find_difference({}, {"a": 1}) == "a was not saved"
    assert find_difference({"a": 1}, {"a": True}) == "a is True, but 1 was saved"
