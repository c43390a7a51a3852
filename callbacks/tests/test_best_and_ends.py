"""The best by a metric, saves on an exception, weights alone, forks, and ranks that are gone."""

import fcntl
import json
import math
import os
import re
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from lightning.pytorch import Callback, LightningDataModule, Trainer
from plain_project import CountedCheckpoint, PlainModel, build_strategy, full, run_training
from torch.utils.data import DataLoader

from genesis_callbacks._best_watch import BestWatch
from genesis_callbacks._rank_watch import RankWatch
from genesis_callbacks.base.run_directory import RunDirectory
from genesis_callbacks.checkpoint import (
    CheckpointError,
    find_best,
    find_latest,
    read_manifest,
    read_tensors,
    verify,
    writer,
)
from genesis_callbacks.checkpoint.best import Measured, MonitorMode, read_best
from genesis_callbacks.checkpoint.inventory import trace_ancestors
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.phases import PhaseListener
from genesis_callbacks.testing import run_ranks

METRIC = {0: 6.0, 1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 2.5, 6: 2.5, 7: 9.0, 8: float("nan")}


class ValidatedModel(PlainModel):
    """Logs a metric whose value is a function of the step, and uses random numbers in validation."""

    def validation_step(self, batch, batch_idx):
        torch.rand(3)
        self.log("validation/loss", METRIC[self.global_step], sync_dist=True)


class FailsAt(Callback):
    """Raises at a place of the loop, after so many steps."""

    def __init__(self, hook: str, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.step, self.ranks = step, ranks
        setattr(self, hook, self.fail)

    def fail(self, trainer, *_) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            raise ValueError("on purpose")


def fit(
    run_dir,
    strategy,
    max_steps,
    *,
    ckpt_path=None,
    callbacks=(),
    is_failing=False,
    val_check_interval=1,
    accumulate_grad_batches=1,
    **options,
):
    """Trains with a validation at every step and returns losses, weights and the callback's view of this rank."""
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(1)
    model = ValidatedModel(dropout=0.3)
    checkpoint = CountedCheckpoint(run_dir=run_dir, **{"mode": "sync", **options})
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=build_strategy(strategy, world_size),
        max_steps=max_steps,
        val_check_interval=val_check_interval,
        accumulate_grad_batches=accumulate_grad_batches,
        num_sanity_val_steps=0,
        inference_mode=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, *callbacks],
        default_root_dir=run_dir,
    )
    try:
        trainer.fit(model, DataLoader(range(100)), DataLoader(range(2)), ckpt_path=ckpt_path)
    except ValueError:
        if not is_failing:
            raise
    else:
        assert not is_failing
    return {
        "losses": model.losses,
        "weights": {} if is_failing else {name: full(tensor) for name, tensor in model.state_dict().items()},
        "best": checkpoint.best(),
        "last_saved": checkpoint.last_saved,
        "report": checkpoint.restore_report.text if checkpoint.restore_report else None,
    }


def call(arguments, keywords):
    return fit(*arguments, **keywords)


def fit_on(world_size, *arguments, **keywords):
    return run_ranks(call, world_size, arguments, keywords)


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith("step"))


# ---- the best


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("ddp", "process"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("single", "sync"), ("fsdp2", "thread"))),
    ],
)
def test_the_best_is_saved_marked_and_outlives_retention(tmp_path, strategy, mode):
    world_size = 1 if strategy == "single" else 2
    options = {"monitor": "validation/loss", "every_n_steps": 3, "keep_last": 1, "mode": mode}
    runs = fit_on(world_size, tmp_path, strategy, 8, **options)
    best = read_best(tmp_path)
    assert (best.name, best.value, best.monitor) == ("step-00000004", 2.0, "validation/loss")
    assert {run["best"] for run in runs} == {tmp_path / "checkpoints/step-00000004"}
    assert names_in(tmp_path) == ["step-00000004", "step-00000008"]
    for name in names_in(tmp_path):
        verify(tmp_path / "checkpoints" / name, "deep")


def test_a_best_at_a_step_that_is_saved_already_only_marks_it(tmp_path):
    fit_on(1, tmp_path, "single", 4, monitor="validation/loss", every_n_steps=1, keep_last=None)
    assert names_in(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    assert read_best(tmp_path).name == "step-00000004"


def test_the_largest_is_the_best_by_choice(tmp_path):
    fit_on(1, tmp_path, "single", 8, monitor="validation/loss", monitor_mode="max", keep_last=1)
    assert read_best(tmp_path).value == 9.0


@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_best_bit_for_bit(tmp_path, strategy):
    """The save after a validation holds generators and loops as they are there."""
    world_size = 1 if strategy == "single" else 2
    straight = fit_on(world_size, tmp_path / "straight", strategy, 8, save_at_end=False)
    fit_on(world_size, tmp_path / "run", strategy, 6, monitor="validation/loss", save_at_end=False)
    path = tmp_path / "run/checkpoints/step-00000004"
    assert find_latest(tmp_path / "run") == path
    resumed = fit_on(world_size, tmp_path / "run", strategy, 8, ckpt_path="latest", monitor="validation/loss")
    for run, other in zip(straight, resumed, strict=True):
        assert run["losses"][4:] == other["losses"]
        for name, tensor in run["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name
    assert read_best(tmp_path / "run").name == "step-00000004"  # it remembers: 2.5 is no best


class NotesPhases(Callback, PhaseListener):
    """Keeps the phases that have begun and not ended."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def enter_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def leave_phase(self) -> None:
        self.phases.pop()


def validate_within_the_first_window(run_dir: Path) -> tuple[list[tuple[str, list[str]]], dict[str, object]]:
    """Validates, and saves the best, before the first step; the writer starts slowly."""
    notes = NotesPhases()
    read_memory = writer.read_own_memory_bytes

    def start_slowly() -> int:
        time.sleep(0.5)
        return read_memory()

    writer.read_own_memory_bytes = start_slowly  # a forked writer inherits it
    waits: list[tuple[str, list[str]]] = []
    wait_ready = WriterProcess.wait_ready

    def note(self: WriterProcess, *arguments: float) -> None:
        if not self._is_ready:
            waits.append((threading.current_thread().name, [*notes.phases]))
        wait_ready(self, *arguments)

    WriterProcess.wait_ready = note
    options = {"mode": "process", "monitor": "validation/loss", "every_n_steps": 1, "keep_last": None}
    return waits, fit(
        run_dir, "single", 2, val_check_interval=2, accumulate_grad_batches=4, callbacks=(notes,), **options
    )


def test_a_validation_within_the_first_window_saves_after_the_writer_has_started(tmp_path):
    ((waits, run),) = run_ranks(validate_within_the_first_window, 1, tmp_path)
    assert waits == [("MainThread", ["save"])]
    assert run["best"] == tmp_path / "checkpoints/step-00000002"
    assert names_in(tmp_path) == [f"step-{step:08d}" for step in range(3)]


def test_each_of_two_callbacks_has_its_own_best(tmp_path):
    other = CountedCheckpoint(run_dir=tmp_path / "b", mode="sync", monitor="validation/loss", monitor_mode="max")
    fit_on(1, tmp_path / "a", "single", 8, monitor="validation/loss", callbacks=(other,))
    assert (read_best(tmp_path / "a").value, read_best(tmp_path / "b").value) == (2.0, 9.0)


def test_a_run_that_goes_on_from_before_the_best_marks_its_own(tmp_path):
    options = {"monitor": "validation/loss", "every_n_steps": 1, "keep_last": None}
    fit_on(1, tmp_path, "single", 4, **options)
    older = tmp_path / "checkpoints/step-00000002"
    fit_on(1, tmp_path, "single", 3, ckpt_path=str(older), **options)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    # Marked was step 4, which is another's future now; step 2 was saved before its validation, which is made first.
    assert read_best(tmp_path).name == "step-00000002"


def test_a_mark_that_is_newer_than_what_was_restored_stays(tmp_path):
    options = {"monitor": "validation/loss", "every_n_steps": 1, "keep_last": None}
    fit_on(1, tmp_path, "single", 2, **options)
    fit_on(1, tmp_path, "single", 3, ckpt_path="latest", **options)  # saved before the validation of step 2
    assert read_best(tmp_path).name == "step-00000002"
    (tmp_path / "checkpoints/best.json").unlink()  # as after a kill between commit and mark
    fit_on(1, tmp_path, "single", 3, ckpt_path="latest", **options)
    fit_on(1, tmp_path, "single", 5, ckpt_path="latest", **options)
    assert read_best(tmp_path).name == "step-00000004"


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_save_before_a_validation_that_draws_random_numbers_resumes_bit_for_bit(tmp_path, strategy):
    world_size = 1 if strategy == "single" else 2
    straight = fit_on(world_size, tmp_path / "straight", strategy, 6, save_at_end=False)
    fit_on(world_size, tmp_path / "run", strategy, 4)
    resumed = fit_on(world_size, tmp_path / "run", strategy, 6, ckpt_path="latest")
    for run, other in zip(straight, resumed, strict=True):
        assert run["losses"][4:] == other["losses"]


def test_a_metric_that_is_not_logged_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(AssertionError, match=r"monitor is 'loss', but validation logged validation/loss"):
        fit_on(1, tmp_path, "single", 2, monitor="loss")


def test_a_damaged_mark_stops_retention_and_says_so(tmp_path):
    fit_on(1, tmp_path, "single", 2, monitor="validation/loss", every_n_steps=1)
    mark = tmp_path / "checkpoints/best.json"
    mark.write_text(mark.read_text()[:10])
    with pytest.raises(CheckpointError, match=r"best\.json is not a mark of a best checkpoint"):
        read_best(tmp_path)


# ---- the best k


def marks_in(run_dir: Path) -> list[tuple[str, float]]:
    best = read_best(run_dir)
    return [] if best is None else [(marked.name, marked.value) for marked in best.ranked]


@pytest.mark.parametrize(
    ("strategy", "mode"), [("single", "sync"), pytest.param("ddp", "process", marks=pytest.mark.slow)]
)
def test_the_best_two_and_the_last_stay(tmp_path, strategy, mode):
    world_size = 1 if strategy == "single" else 2
    options = {"monitor": "validation/loss", "keep_best": 2, "every_n_steps": 3, "keep_last": 1, "mode": mode}
    runs = fit_on(world_size, tmp_path, strategy, 8, **options)
    # Step 6 is as good as step 5, which was before it; step 8 is not a number.
    assert marks_in(tmp_path) == [("step-00000004", 2.0), ("step-00000005", 2.5)]
    assert names_in(tmp_path) == ["step-00000004", "step-00000005", "step-00000008"]
    assert {run["best"] for run in runs} == {tmp_path / "checkpoints/step-00000004"}
    for name in names_in(tmp_path):
        verify(tmp_path / "checkpoints" / name, "deep")


class KilledAt(FailsAt):
    """Ends the process at a place of the loop, as the system does when memory runs out."""

    def fail(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_best_two_are_remembered_after_a_kill(tmp_path):
    options = {"monitor": "validation/loss", "keep_best": 2, "keep_last": 1}
    with pytest.raises(AssertionError, match="rank 0"):
        fit_on(1, tmp_path, "single", 8, callbacks=(KilledAt("on_train_batch_start", 3),), **options)
    assert marks_in(tmp_path) == [("step-00000002", 3.0), ("step-00000003", 4.0)]
    (tmp_path / "checkpoints/best.json").unlink()  # the state of step 3 has them
    killed = (KilledAt("on_train_batch_start", 4),)
    with pytest.raises(AssertionError, match="rank 0"):
        fit_on(1, tmp_path, "single", 5, ckpt_path="latest", callbacks=killed, **options)
    assert marks_in(tmp_path) == [("step-00000004", 2.0), ("step-00000002", 3.0)]
    fit_on(1, tmp_path, "single", 8, ckpt_path="latest", **options)
    assert names_in(tmp_path) == ["step-00000004", "step-00000005", "step-00000008"]


def test_a_validation_that_a_kill_has_prevented_is_made_at_the_resume(tmp_path):
    options = {"monitor": "validation/loss", "keep_best": 2, "every_n_steps": 4, "val_check_interval": 2}
    with pytest.raises(AssertionError, match="rank 0"):
        fit_on(1, tmp_path, "single", 8, callbacks=(KilledAt("on_validation_start", 4),), **options)
    assert marks_in(tmp_path) == [("step-00000002", 3.0)]
    seen = RecordsValidations(tmp_path / "validations")
    fit_on(1, tmp_path, "single", 8, ckpt_path="latest", callbacks=(seen,), **options)
    assert seen.path.read_text().split() == ["4:2.0", "6:2.5", "8:nan"]
    assert marks_in(tmp_path) == [("step-00000004", 2.0), ("step-00000006", 2.5)]
    fit_on(1, tmp_path, "single", 9, ckpt_path="latest", callbacks=(seen,), **options)
    assert seen.path.read_text().split()[3:] == ["8:nan"], "the last save may have come before its validation"


class RecordsValidations(Callback):
    """Writes the step and the metric of each validation, as EarlyStopping and others see them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer, *_) -> None:
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step}:{trainer.callback_metrics['validation/loss'].item()}\n")


def test_a_marked_checkpoint_that_is_gone_is_forgotten_at_a_resume(tmp_path):
    options = {"monitor": "validation/loss", "keep_best": 3, "every_n_steps": 1, "keep_last": None}
    fit_on(1, tmp_path, "single", 5, **options)
    assert [name for name, _ in marks_in(tmp_path)] == ["step-00000004", "step-00000005", "step-00000002"]
    shutil.rmtree(tmp_path / "checkpoints/step-00000004")
    assert find_best(tmp_path).name == "step-00000005"
    fit_on(1, tmp_path, "single", 7, ckpt_path="latest", **options)
    assert [name for name, _ in marks_in(tmp_path)] == ["step-00000005", "step-00000006", "step-00000002"]


def test_a_run_goes_on_from_marks_and_states_that_know_only_one_best(tmp_path):
    options = {"monitor": "validation/loss", "every_n_steps": 1, "keep_last": None}
    fit_on(1, tmp_path, "single", 4, **options)
    mark = json.loads((tmp_path / "checkpoints/best.json").read_text())
    assert mark.keys() == {"name", "manifest_hash", "monitor", "mode", "value"}
    assert marks_in(tmp_path) == [("step-00000004", 2.0)]
    fit_on(1, tmp_path, "single", 5, ckpt_path="latest", keep_best=2, **options)
    assert marks_in(tmp_path) == [("step-00000004", 2.0), ("step-00000005", 2.5)]
    fit_on(1, tmp_path, "single", 6, ckpt_path="latest", **options)  # and back to one
    assert json.loads((tmp_path / "checkpoints/best.json").read_text()) == mark


class NamesMeasure(Callback):
    """Names what the metric is measured on, as an application does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def setup(self, trainer, pl_module, stage):
        trainer.datamodule = LightningDataModule()
        trainer.datamodule.validation_measure = (self.name, None)


def test_the_best_of_another_measure_is_not_compared_and_stays_marked_until_the_next(tmp_path):
    directory = tmp_path / "checkpoints"
    options = {"monitor": "validation/loss", "every_n_steps": 1, "keep_last": None}
    fit_on(1, tmp_path, "single", 4, callbacks=(NamesMeasure("short"),), **options)
    assert marks_in(tmp_path) == [("step-00000004", 2.0)]
    watch = BestWatch("validation/loss", "min")
    watch.measure = "long"
    line = watch.agree_with(directory)
    assert line is not None
    assert "the best checkpoint so far, step-00000004 with validation/loss 2, was measured on other" in line
    assert (watch.best, marks_in(tmp_path)) == ((), [("step-00000004", 2.0)])
    fit_on(1, tmp_path, "single", 5, ckpt_path="latest", callbacks=(NamesMeasure("long"),), **options)
    # The resume validates before it trains, so that the checkpoint was measured again, as what counts now.
    assert read_best(tmp_path).measure == "long"
    assert marks_in(tmp_path) == [("step-00000004", 2.0)]
    fit_on(1, tmp_path, "single", 7, ckpt_path="latest", callbacks=(NamesMeasure("long"),), **options)
    assert read_best(tmp_path).measure == "long"
    assert marks_in(tmp_path) == [("step-00000004", 2.0)]


@pytest.mark.parametrize(("unnamed", "is_compared"), [("even", True), (None, False)])
def test_marks_without_a_measure_are_of_the_one_that_earlier_versions_had(tmp_path, unnamed, is_compared):
    fit_on(1, tmp_path, "single", 4, monitor="validation/loss", every_n_steps=1)
    state = {"monitor": "validation/loss", "mode": "min", "step": 4, "value": 2.0, "others": []}
    watch = BestWatch("validation/loss", "min")
    watch.measure, watch.unnamed_measure = "even", unnamed
    watch.load_state_dict(state)
    assert bool(watch.best) == is_compared
    assert (watch.agree_with(tmp_path / "checkpoints") is None) == is_compared
    assert [one.step for one in watch.best] == ([4] if is_compared else [])


def watch_of(*measured: tuple[int, float], count: int = 2, mode: MonitorMode = "min") -> BestWatch:
    """A watch to which these were offered in their order, each saved at once."""
    watch = BestWatch("loss", mode, count)
    for step, value in measured:
        if watch.is_among_best(step, value):
            watch.take(step, value)
            watch.keep(step)
    return watch


@given(
    values=st.lists(st.sampled_from([1.0, 2.0, 3.0, float("nan"), float("inf")])),
    count=st.integers(1, 4),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_best_k_are_those_of_a_sort(values, count, mode):
    finite = [(step, value) for step, value in enumerate(values) if math.isfinite(value)]
    expected = sorted(finite, key=lambda one: one[1] if mode == "min" else -one[1])[:count]  # a stable sort
    watch = watch_of(*enumerate(values), count=count, mode=mode)
    assert [(one.step, one.value) for one in watch.best] == expected
    other = BestWatch("loss", mode, count)
    other.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert other.best == watch.best


def test_one_step_is_marked_once_with_its_better_value():
    watch = watch_of((1, 2.0), (2, 3.0), (2, 1.0), (1, 2.5), (1, 2.0))
    assert watch.best == (Measured(2, 1.0), Measured(1, 2.0))


def test_what_a_save_that_failed_had_displaced_is_back():
    watch = watch_of((1, 2.0), (2, 3.0))
    watch.take(3, 1.0)
    watch.take(4, 0.5)  # before it is known what became of step 3
    assert watch.best == (Measured(4, 0.5), Measured(3, 1.0))
    watch.drop(3)
    assert watch.best == (Measured(4, 0.5), Measured(1, 2.0))
    watch.drop(4)
    assert watch.best == (Measured(1, 2.0), Measured(2, 3.0))


def test_a_state_that_knows_one_best_is_taken_and_that_of_another_metric_is_not():
    watch = watch_of()
    watch.load_state_dict({"monitor": "loss", "mode": "min", "step": 3, "value": 1.5})
    assert watch.best == (Measured(3, 1.5),)
    watch.load_state_dict({"monitor": "loss", "mode": "max", "step": 4, "value": 2.5})
    assert watch.best == (Measured(3, 1.5),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_best": 0, "monitor": "loss"}, "keep_best must be from 1 to 100, not 0"),
        ({"keep_best": 2}, "keep_best is 2 without a metric: give one by monitor"),
    ],
)
def test_a_number_of_best_checkpoints_without_meaning_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        CountedCheckpoint(run_dir=tmp_path, **options)


@pytest.mark.parametrize("given", ["", " ", "s3://bucket/run", Path("gs://bucket/run"), "file:///runs/a"])
def test_a_run_directory_that_is_empty_or_a_url_is_refused_with_a_remedy(given):
    with pytest.raises(ValueError, match=r"run_dir is '.*(give the run a directory|give one on a disk)"):
        CountedCheckpoint(run_dir=given)


@pytest.mark.parametrize(
    "others", [3, [3], [{}], [{"name": "../x", "manifest_hash": "a", "value": 1.0}],
               [{"name": "step-00000001", "manifest_hash": "a", "value": 10**400}]],
)  # fmt: skip
def test_forged_others_are_no_marks(tmp_path, others):
    mark = {"name": "step-00000001", "manifest_hash": "a", "monitor": "m", "mode": "min", "value": 1, "others": others}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/best.json").write_text(json.dumps(mark))
    with pytest.raises(CheckpointError, match=r"best\.json is not a mark of a best checkpoint"):
        read_best(tmp_path)


# ---- an exception


@pytest.mark.parametrize("mode", ["process", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", ["on_train_batch_start", pytest.param("on_validation_start", marks=pytest.mark.slow)])
def test_an_exception_saves_the_last_window_and_the_run_goes_on_bit_for_bit(tmp_path, hook, mode):
    straight = fit_on(1, tmp_path / "straight", "single", 6, save_at_end=False)
    fail = (FailsAt(hook, 4),)
    options = {"mode": mode, "save_on_exception": True}
    (failed,) = fit_on(1, tmp_path / "run", "single", 6, callbacks=fail, is_failing=True, **options)
    assert failed["last_saved"] == tmp_path / "run/checkpoints/step-00000004"
    verify(failed["last_saved"], "deep")
    (resumed,) = fit_on(1, tmp_path / "run", "single", 6, ckpt_path="latest", **options)
    assert straight[0]["losses"][4:] == resumed["losses"]
    for name, tensor in straight[0]["weights"].items():
        assert torch.equal(tensor, resumed["weights"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "process"])
def test_ranks_that_fail_together_save_without_talking(tmp_path, mode):
    fail = (FailsAt("on_train_batch_start", 4),)
    options = {"mode": mode, "save_on_exception": True, "every_n_steps": 2}
    fit_on(2, tmp_path, "fsdp2", 6, callbacks=fail, is_failing=True, save_at_end=False, **options)
    assert find_latest(tmp_path, level="deep").name == "step-00000004"
    late = (FailsAt("on_train_batch_start", 5),)
    fit_on(
        2, tmp_path, "fsdp2", 6, ckpt_path="latest", callbacks=late, is_failing=True, **{**options, "every_n_steps": 5}
    )
    assert find_latest(tmp_path, level="deep").name == "step-00000005"


def test_a_window_after_which_a_forward_wrote_a_buffer_is_not_saved(tmp_path):
    fail = (FailsAt("on_before_backward", 4),)
    (failed,) = fit_on(1, tmp_path, "single", 6, callbacks=fail, is_failing=True, save_on_exception=True)
    assert failed["last_saved"] is None


class WritesThenFails(Callback):
    def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 4:
            with torch.no_grad():
                pl_module.net.embed.weight.mul_(1.5)
            raise ValueError("on purpose")


def test_a_window_that_was_written_into_is_not_saved(tmp_path):
    options = {"save_on_exception": True, "every_n_steps": 2}
    (failed,) = fit_on(1, tmp_path, "single", 6, callbacks=(WritesThenFails(),), is_failing=True, **options)
    assert failed["last_saved"].name == "step-00000004"  # which is the save of the step itself
    options["every_n_steps"] = 3
    (failed,) = fit_on(1, tmp_path / "b", "single", 6, callbacks=(WritesThenFails(),), is_failing=True, **options)
    assert failed["last_saved"].name == "step-00000003"


# ---- weights alone, and forks


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)])
def test_a_run_starts_from_weights_alone(tmp_path, strategy, world_size):
    run_training(1, tmp_path / "a", "single", 4)
    source = tmp_path / "a/checkpoints/step-00000004"
    options = {"restore": "weights", "every_n_steps": 1, "keep_last": None}
    runs = run_training(world_size, tmp_path / "b", strategy, 2, ckpt_path=str(source), **options)
    assert len(runs[0]["losses"]) == 2  # it began at step 0
    assert "all but the weights" in runs[0]["report"]
    first = read_manifest(tmp_path / "b/checkpoints/step-00000001")
    assert (first.previous.name, first.previous.directory) == ("step-00000004", "../../a/checkpoints")
    # Without an update the weights are those of the source: the first loss is of them.
    (other,) = run_training(1, tmp_path / "a", "single", 5, ckpt_path=str(source))
    assert runs[0]["losses"][0] != other["losses"][0]  # other data: its step is 0, not 4
    resumed = run_training(world_size, tmp_path / "b", strategy, 3, ckpt_path="latest", **options)
    assert len(resumed[0]["losses"]) == 1  # its own checkpoints give all


def test_what_was_saved_without_optimizers_gives_weights_alone(tmp_path):
    run_training(1, tmp_path / "a", "single", 4, save_optimizer=False)
    source = find_latest(tmp_path / "a", level="deep")
    assert not read_manifest(source).has_optimizer
    assert all(name.startswith(("model.", "state.")) for name in read_tensors(source))
    with pytest.raises(AssertionError, match=r"was saved without the optimizers' state.*restore='weights'"):
        run_training(1, tmp_path / "a", "single", 6, ckpt_path="latest")
    (begun,) = run_training(1, tmp_path / "b", "single", 2, ckpt_path=str(source), restore="weights")
    assert len(begun["losses"]) == 2
    (gone_on,) = run_training(1, tmp_path / "a", "single", 6, ckpt_path="latest", restore="no_optimizer")
    assert len(gone_on["losses"]) == 2
    assert "optimizer state (none was saved; restore is 'no_optimizer')" in gone_on["report"]


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_restore_without_the_optimizer_keeps_clocks_schedule_and_data_and_names_what_it_left(tmp_path, strategy):
    options = {"every_n_steps": 2, "keep_last": None}
    (straight,) = run_training(1, tmp_path / "a", strategy, 6, **options)
    source = tmp_path / "a/checkpoints/step-00000004"
    (begun,) = run_training(1, tmp_path / "b", strategy, 6, ckpt_path=str(source), restore="no_optimizer", **options)
    assert begun["losses"][0] == straight["losses"][4]  # the weights and the data
    assert begun["losses"][1] != straight["losses"][5]  # the moments
    assert begun["lr"] == straight["lr"]
    assert begun["seen"] == straight["seen"]
    assert re.search(r"  reset    optimizer state \(\d+ tensors; restore is 'no_optimizer'\)", begun["report"])
    steps = {
        name: tensor for name, tensor in read_tensors(find_latest(tmp_path / "b")).items() if name.endswith(".step")
    }
    assert steps
    assert all(float(tensor) == 2.0 for tensor in steps.values())
    # Its own checkpoints give all: a run that restarts itself does not lose its moments again and again.
    (resumed,) = run_training(1, tmp_path / "b", strategy, 7, ckpt_path="latest", restore="no_optimizer", **options)
    assert "no_optimizer" not in resumed["report"]


def test_a_fork_names_where_it_came_from_and_leaves_that_alone(tmp_path):
    run_training(1, tmp_path / "a", "single", 6, every_n_steps=2, keep_last=None)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    source = tmp_path / "a/checkpoints/step-00000004"
    (forked,) = run_training(1, tmp_path / "b", "single", 8, ckpt_path=str(source), every_n_steps=2)
    assert len(forked["losses"]) == 4
    after = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert before == after
    newest = find_latest(tmp_path / "b")
    chain = trace_ancestors(newest, read_manifest(newest))
    assert [(ancestor.name, state) for ancestor, state in chain] == [
        ("step-00000006", "there"),
        ("step-00000004", "there"),
        ("step-00000002", "there"),
    ]
    assert [ancestor.directory for ancestor, _ in chain] == [None, "../../a/checkpoints", None]


# ---- a rank that is gone


class Trouble(Callback):
    """At step 3 rank 1 ends in some way, and rank 0 waits for it as in a process group that never notices."""

    def __init__(self, kind: str, *, is_stuck: bool) -> None:
        self.kind, self.is_stuck = kind, is_stuck

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step != 3:
            return
        if trainer.global_rank == 1:
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("on purpose")
        if self.is_stuck:
            time.sleep(100)


def fit_with_a_log(run_dir, kind, is_stuck):
    """Trains with what this rank writes to standard error in a file."""
    log = os.open(run_dir / f"rank-{os.environ['RANK']}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    warnings.simplefilter("default")
    trouble = (Trouble(kind, is_stuck=is_stuck),)
    fit(run_dir / "run", "ddp", 6, every_n_steps=1, lost_rank_seconds=1.0, callbacks=trouble)


@pytest.mark.parametrize("is_stuck", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("kind", "said"), [("kill", r"process \d+"), ("raise", "failed with RuntimeError")])
def test_a_rank_that_is_gone_ends_the_others_by_name(tmp_path, kind, said, is_stuck):
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(fit_with_a_log, 2, tmp_path, kind, is_stuck)
    log = (tmp_path / "rank-0.log").read_text()
    assert re.search(rf"rank 1 \({said}\) is gone", log), log
    assert find_latest(tmp_path / "run", level="deep").name == "step-00000003"
    (resumed,) = fit_on(1, tmp_path / "run", "single", 5, ckpt_path="latest")
    assert len(resumed["losses"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_stuck", [False, True])
def test_one_rank_of_a_node_says_that_another_one_is_gone(tmp_path, is_stuck):
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(fit_with_a_log, 4, tmp_path, "kill", is_stuck)
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 2, 3)]
    assert sum("is gone" in log for log in logs) == 1, logs


def test_ranks_that_end_well_miss_nobody(tmp_path):
    for _ in range(2):
        runs = fit_on(2, tmp_path, "ddp", 2, lost_rank_seconds=0.1, on_existing="start_over")
    assert [run["last_saved"].name for run in runs] == ["step-00000002"] * 2


def test_ranks_whose_locks_cannot_be_seen_are_not_taken_for_lost(tmp_path, monkeypatch):
    """As on a file system that keeps the locks of each node to itself: every node gets every lock."""
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    one, other = RankWatch(tmp_path, 0, 2, 0.1), RankWatch(tmp_path, 1, 2, 0.1)
    with pytest.warns(UserWarning, match="has no locks between ranks"):
        one.start()
    assert one.describe_lost() is None
    assert not one.has_lost_process()
    one.stop()
    other.stop()


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (["process 5", "failed with RuntimeError"], "rank 1 (process 5)"),
        (["failed with DistBackendError", "failed with ValueError"], "rank 2 (failed with ValueError)"),
        (
            ["failed with RuntimeError", "failed with RuntimeError"],
            "rank 1 (failed with RuntimeError), rank 2 (failed with RuntimeError)",
        ),
    ],
)
def test_ranks_that_fail_because_of_a_lost_one_are_not_named_beside_it(tmp_path, said, found):
    watch = RankWatch(tmp_path, 0, 3, grace_seconds=1.0)
    try:
        for rank, text in enumerate(said, 1):
            (RunDirectory(tmp_path).ranks / str(rank)).write_text(text)  # without a lock: its process has ended
        assert watch.describe_lost() == found
        assert watch.has_lost_process() is said[0].startswith("process")
    finally:
        watch.stop()
