"""A run by the command line: what it leaves behind, a signal in its middle, and going on."""

import csv
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from genesis.model import initial
from genesis_callbacks.checkpoint.job import hold_staging
from genesis_callbacks.checkpoint.lineage import LOCK_NAME, DirectoryLock
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import STDOUT, ForkedCommand, start_genesis

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.05


def logged_steps(run_dir: Path) -> list[int]:
    with (run_dir / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def committed_steps(run_dir: Path) -> list[int]:
    return sorted(int(marker.parent.name[5:]) for marker in run_dir.glob("checkpoints/step-*/COMMITTED"))


def test_a_run_leaves_its_recipe_its_log_and_its_checkpoints(genesis: Genesis, recipe: Path) -> None:
    run_dir = recipe.parent / "run"
    assert genesis("fit", "--config", str(recipe)).status == 0
    assert committed_steps(run_dir) == [2, 4]
    assert logged_steps(run_dir) == [1, 2, 3, 4]
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert resolved["model"]["decoder"]["dim"] == 32
    assert resolved["data"]["prefetch_windows"] == 2


def test_a_fit_that_does_not_validate_logs_why_and_its_resume_reports_no_sums_as_lost(
    genesis: Genesis, recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    off = ("fit", "--config", str(recipe), "--trainer.limit_val_batches", "0")
    assert genesis(*off).status == 0
    assert "no held-out loss and no best checkpoint: trainer.limit_val_batches is 0" in caplog.messages
    assert "held out for validation" not in caplog.text
    shutil.rmtree(recipe.parent / "run" / "checkpoints" / "step-00000004")
    assert genesis(*off, "--ckpt_path", "latest").status == 0
    assert "Restored step 2 from" in caplog.text
    assert "counted in this epoch" not in caplog.text


def test_the_recipe_that_a_run_leaves_makes_the_same_run(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    assert genesis("fit", "--config", str(recipe)).status == 0
    left = tmp_path / "run" / "config.yaml"
    again = genesis("fit", "--config", str(left), "--run_dir", str(tmp_path / "again"))
    assert again.status == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


@pytest.mark.parametrize("strategy", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_run_that_goes_on_draws_no_initial_weights(
    genesis: Genesis, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    options = ("--config", str(recipe), "--trainer.strategy", strategy)
    assert genesis("fit", *options, "--trainer.max_steps", "6", "--run_dir", str(tmp_path / "straight")).status == 0
    assert genesis("fit", *options).status == 0
    drawn: list[object] = []
    monkeypatch.setattr(initial, "draw_block", lambda *arguments: drawn.append(arguments))
    allowed = ("--trainer.max_steps", "6", "--checkpoint.allow_changed", "[trainer.max_steps]")
    resumed = genesis("fit", *options, "--ckpt_path", "latest", *allowed)
    assert resumed.status == 0, resumed.err
    assert genesis("validate", *options, "--ckpt_path", "latest").status == 0
    assert drawn == []
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def losses(run_dir: Path) -> list[str]:
    with (run_dir / "metrics.csv").open() as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


def test_a_validation_prints_the_loss_and_leaves_the_run_alone(genesis: Genesis, recipe: Path) -> None:
    run_dir = recipe.parent / "run"
    assert genesis("fit", "--config", str(recipe)).status == 0
    before = (run_dir / "metrics.csv").read_text()
    outcome = genesis("validate", "--config", str(recipe), "--ckpt_path", "latest")
    assert outcome.status == 0
    assert "validation/loss" in outcome.out
    assert (run_dir / "metrics.csv").read_text() == before
    assert not list(run_dir.glob("config.resume-*.yaml"))


def test_a_resume_beside_a_live_run_is_refused_at_once_and_names_its_process(genesis: Genesis, recipe: Path) -> None:
    assert genesis("fit", "--config", str(recipe)).status == 0
    directory = recipe.parent / "run" / "checkpoints"
    (directory / "step-00000006.staging-0").mkdir()
    lock = DirectoryLock(directory)
    (directory / LOCK_NAME).write_text("1")  # another process than this one
    with hold_staging(directory / "step-00000006.staging-0"):
        begin_seconds = time.monotonic()
        refused = genesis("fit", "--config", str(recipe), "--ckpt_path", "latest")
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert f"{directory} is in use by another run (process 1): stop it" in refused.err
        # To look at a run while it trains is allowed.
        assert genesis("validate", "--config", str(recipe), "--ckpt_path", "latest").status == 0
        assert time.monotonic() - begin_seconds < DEADLINE_SECONDS / 4
    lock.release()


def test_sigterm_in_mid_training_saves_ends_with_143_and_latest_goes_on(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    endless = {"trainer.max_steps": 1_000_000, "checkpoint.every_n_steps": 1_000_000, "checkpoint.save_at_end": False}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, run_dir), endless)
    with (tmp_path / "output").open("w") as output:
        process = start_genesis("fit", "--config", recipe, stdout=output, stderr=STDOUT)
        try:
            wait_for_steps(process, run_dir)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM, (tmp_path / "output").read_text()
        finally:
            process.kill()
            process.wait()
    (saved,) = committed_steps(run_dir)
    assert logged_steps(run_dir) == list(range(1, saved + 1))
    resumed = genesis(
        "fit",
        *("--config", str(recipe), "--ckpt_path", "latest", "--trainer.max_steps", str(saved + 2)),
        *("--checkpoint.save_at_end", "true", "--checkpoint.allow_changed", "[trainer.max_steps]"),
    )
    assert resumed.status == 0, resumed.err
    assert committed_steps(run_dir) == [saved, saved + 2]
    assert logged_steps(run_dir) == list(range(1, saved + 3))
    assert (run_dir / "config.resume-1.yaml").exists()


class SendSignals(pl.Callback):
    """Sends signals to its own process before step 3."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        if trainer.global_step == 2:
            for name in self.names:
                os.kill(os.getpid(), getattr(signal, name))


@pytest.fixture
def kept_sigint() -> Iterator[None]:
    """Lightning ignores SIGINT from an interruption on."""
    previous = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(
    ("names", "status", "saved"),
    [
        (["SIGINT"], 130, [3]),
        pytest.param(["SIGTERM"], 143, [3], marks=pytest.mark.slow),
        (["SIGTERM", "SIGTERM"], 143, [3]),
        pytest.param(["SIGINT", "SIGINT"], 130, [], marks=pytest.mark.slow),
        (["SIGTERM", "SIGINT"], 130, []),
    ],
)
@pytest.mark.usefixtures("kept_sigint")
@pytest.mark.filterwarnings("ignore:Training stopped .KeyboardInterrupt.:UserWarning")
def test_sigint_after_another_signal_interrupts_at_once_with_the_shells_status(
    names: list[str], status: int, saved: list[int], genesis: Genesis, recipe: Path
) -> None:
    callback = {"class_path": "tests.cli.test_run.SendSignals", "init_args": {"names": names}}
    quiet = ("--checkpoint.every_n_steps", "null", "--trainer.callbacks", json.dumps([callback]))
    assert genesis("fit", "--config", str(recipe), *quiet).status == status
    assert committed_steps(recipe.parent / "run") == saved


def wait_for_steps(process: ForkedCommand, run_dir: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (run_dir / "metrics.csv").exists() or len(logged_steps(run_dir)) < 3:
        assert process.poll() is None, (run_dir.parent / "output").read_text()
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(POLL_SECONDS)


@pytest.mark.slow
def test_a_fork_goes_on_beside_the_run_and_leaves_it_as_it_is(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    assert genesis("fit", "--config", str(recipe)).status == 0
    run_dir, fork_dir = tmp_path / "run", tmp_path / "longer"
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    forking = ("fit", "--config", str(recipe), "--fork", "longer", "--ckpt_path", "latest")
    longer = ("--trainer.max_steps", "6", "--schedule.shape", "linear")
    refused = genesis(*forking, *longer)
    assert refused.status == 2
    first, *lines = refused.err.splitlines()[-7:]
    assert first.endswith("the checkpoint of step 4 is of another run: schedule.shape, trainer.max_steps changed")
    assert lines == [
        "  optimizer",
        "    schedule.shape is 'linear' and was 'cosine'",
        "  trainer",
        "    trainer.max_steps is 6 and was 4",
        "to continue the run as it was: set the values back to those that they were",
        "to continue the run with these changes: add "
        """--checkpoint.allow_changed '["schedule.shape", "trainer.max_steps"]'""",
    ]
    allowed = ("--checkpoint.allow_changed", "[trainer.max_steps,schedule]")
    forked = genesis(*forking, *longer, *allowed)
    assert forked.status == 0, forked.err
    assert committed_steps(fork_dir) == [6]
    assert logged_steps(fork_dir) == [5, 6]
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    shown = genesis("checkpoint", "show", str(fork_dir / "checkpoints/step-00000006"), "--json")
    assert json.loads(shown.out)["lineage"][0]["directory"] == "../../run/checkpoints"
    again = genesis(*forking, *longer, *allowed)
    assert again.status == 2
    assert f"--run_dir {fork_dir} --ckpt_path latest" in again.err
    left = yaml.safe_load((fork_dir / "config.yaml").read_text())
    assert (left["run_dir"], left["fork"]) == (str(fork_dir), None)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_decoder_spelled_by_its_parts_and_back(
    genesis: Genesis, tmp_path: Path, tiny_corpus: Path
) -> None:
    content = build_recipe(tiny_corpus, tmp_path / "run")
    short = write_recipe(tmp_path / "short.yaml", content)
    decoder = content["model"]["decoder"]
    decoder["attention"] = {name: decoder.pop(name) for name in ("num_heads", "num_kv_heads")}
    decoder["norm"] = {"eps": 1e-5}
    nested = write_recipe(tmp_path / "nested.yaml", content)
    longer = ("--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]", "--trainer.max_steps")
    assert genesis("fit", "--config", str(short)).status == 0
    for recipe, max_steps in ((nested, "6"), (short, "8")):
        resumed = genesis("fit", "--config", str(recipe), *longer, max_steps)
        assert resumed.status == 0, resumed.err
    other = genesis("fit", "--config", str(nested), *longer, "8", "--model.decoder.attention.num_kv_heads", "4")
    assert other.status == 2
    assert "to train with another model.decoder.num_kv_heads: start a new run" in other.err


def test_a_fork_needs_a_checkpoint_and_a_plain_name(genesis: Genesis, recipe: Path) -> None:
    for arguments, said in (
        (("--fork", "b"), "--fork needs a checkpoint to start from"),
        (("--fork", "../b", "--ckpt_path", "latest"), "--fork is '../b': give a name"),
        (("--fork", "b", "--ckpt_path", "latest"), "has no committed checkpoint"),
    ):
        outcome = genesis("fit", "--config", str(recipe), *arguments)
        assert outcome.status == 2
        assert said in outcome.err
        assert outcome.err.count("\n") == 1, outcome.err


def test_the_best_by_a_metric_is_validated_by_its_name(genesis: Genesis, recipe: Path) -> None:
    monitored = ("--checkpoint.monitor", "validation/loss", "--checkpoint.keep_last", "1")
    assert genesis("fit", "--config", str(recipe), *monitored).status == 0
    outcome = genesis("validate", "--config", str(recipe), *monitored, "--ckpt_path", "best")
    assert outcome.status == 0, outcome.err
    none = genesis("validate", "--config", str(recipe), "--run_dir", str(recipe.parent / "x"), "--ckpt_path", "best")
    assert none.status == 2
    assert "has no best checkpoint" in none.err


def test_weights_of_another_run_begin_a_new_one(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    assert genesis("fit", "--config", str(recipe)).status == 0
    source = str(tmp_path / "run/checkpoints/step-00000004")
    begun = ("--run_dir", str(tmp_path / "tuned"), "--checkpoint.restore", "weights", "--model.optimizer.lr", "1e-4")
    outcome = genesis("fit", "--config", str(recipe), "--ckpt_path", source, *begun)
    assert outcome.status == 0, outcome.err
    assert logged_steps(tmp_path / "tuned") == [1, 2, 3, 4]
    assert float(losses(tmp_path / "tuned")[0]) < float(losses(tmp_path / "run")[0])


def test_a_save_in_the_background_logs_itself_and_leaves_the_log_whole(genesis: Genesis, recipe: Path) -> None:
    background = ("--checkpoint.mode", "process", "--checkpoint.every_n_steps", "3", "--trainer.max_steps", "12")
    assert genesis("fit", "--config", str(recipe), *background).status == 0
    assert logged_steps(recipe.parent / "run") == list(range(1, 13))
    with (recipe.parent / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["train/loss"] for row in rows)
    saved = {int(float(row["checkpoint/step"])): int(row["step"]) for row in rows if row["checkpoint/step"]}
    # Where two are known to be committed at one step, its row has the later.
    assert 12 in saved
    assert set(saved) <= {3, 6, 9, 12}
    assert all(at >= step for step, at in saved.items())


def test_a_new_run_in_a_used_directory_is_refused(genesis: Genesis, recipe: Path) -> None:
    assert genesis("fit", "--config", str(recipe)).status == 0
    before = {path: path.read_bytes() for path in recipe.parent.rglob("*") if path.is_file()}
    outcome = genesis("fit", "--config", str(recipe))
    assert outcome.status == 2
    assert "--ckpt_path latest" in outcome.err
    assert "--checkpoint.on_existing start_over" in outcome.err
    assert {path: path.read_bytes() for path in recipe.parent.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_used_directory_is_started_over_only_when_asked_and_the_line_says_what_was_moved(
    genesis: Genesis, recipe: Path, tmp_path: Path
) -> None:
    """Also for weights of another run, which would leave this directory's checkpoints behind just as well."""
    fit = ("fit", "--config", str(recipe))
    other, run_dir = tmp_path / "other", tmp_path / "run"
    assert genesis(*fit).status == genesis(*fit, "--run_dir", str(other)).status == 0
    begun = ("--ckpt_path", str(other), "--checkpoint.restore", "weights")
    refused = genesis(*fit, *begun)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert f"{run_dir} already has checkpoints" in refused.err
    moved = f"2 earlier checkpoints were moved to {run_dir}/checkpoints/superseded-1, and nothing was deleted"
    with pytest.warns(UserWarning, match=f"training starts over from step 0: {moved}"):
        asked = genesis(*fit, "--checkpoint.on_existing", "start_over", "--trainer.max_steps", "2")
    assert asked.status == 0, asked.err
    assert committed_steps(run_dir) == [2]
    assert logged_steps(run_dir) == [1, 2]
    # The consent was for that start, and is not in the recipe that the run records.
    assert genesis("fit", "--config", str(run_dir / "config.yaml")).status == 2
    assert genesis(*fit, "--ckpt_path", "latest", "--trainer.max_steps", "2").status == 0
