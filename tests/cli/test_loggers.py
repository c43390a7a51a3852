"""What `configs/loggers/` adds: every number of the run's own log, in the run's directory, and nothing left behind."""

import csv
import json
import os
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from tests.cli.test_configs import CONFIGS
from tests.commands import run_genesis, start_genesis

DEADLINE_SECONDS = 240
POLL_SECONDS = 0.1
# Lightning gives W&B an argument that W&B wants to drop; no setting of ours prevents it.
KNOWN_WARNINGS = ("The anonymous setting has no effect",)
MARK = "GENESIS_TEST_RUN"

Metrics = dict[int, dict[str, float]]


def fit(recipe: Path, logger: str) -> Path:
    """Trains in a process of its own, in an empty directory and without the user's settings; returns the run's."""
    run_dir, here, home = recipe.parent / "run", recipe.parent / "here", recipe.parent / "home"
    here.mkdir()
    mark = uuid.uuid4().hex
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    configs = ("--config", str(recipe), "--config", str(CONFIGS / "loggers" / logger))
    environment |= {"HOME": str(home), MARK: mark}
    done = run_genesis("fit", *configs, cwd=here, env=environment, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "warning" in line.lower()]
    assert [line for line in warned if not any(known in line for known in KNOWN_WARNINGS)] == []
    assert list(here.iterdir()) == []
    assert {path.name for path in recipe.parent.iterdir()} <= {"run", "here", "home", "recipe.yaml"}
    wait_until_all_ended(mark)
    return run_dir


def wait_until_all_ended(mark: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while left := list(processes_with(f"{MARK}={mark}".encode())):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(POLL_SECONDS)


def processes_with(variable: bytes) -> Iterator[bytes]:
    """Yields the command lines of processes that inherited an environment variable, whatever else became of them."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (directory / "environ").read_bytes().split(b"\0"):
                yield (directory / "cmdline").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue


def read_own_log(run_dir: Path) -> Metrics:
    # A training may write meanwhile. It replaces the file for new columns, and lengthens the last row in place: what is
    # added to a row that was read already would be taken for a row.
    with (run_dir / "metrics.csv").open("rb") as file:
        text = file.read(os.fstat(file.fileno()).st_size).decode()
    rows = list(csv.DictReader(line for line in text.splitlines(keepends=True) if line.endswith("\n")))
    return {
        int(row["step"]): {key: float(value) for key, value in row.items() if value and key != "step"} for row in rows
    }


def check_has_all_of(found: Metrics, own: Metrics) -> None:
    assert own.keys() == {1, 2, 3, 4}
    assert {"train/loss", "train/tokens_per_second", "counters/tokens_seen", "validation/loss"} <= own[4].keys()
    for step, metrics in own.items():
        assert {key: found[step].get(key) for key in metrics} == pytest.approx(metrics, rel=1e-6)


def read_wandb(path: Path) -> Iterator[Record]:
    """Yields what W&B wrote to be uploaded later: protobufs in the blocks of a LevelDB log, after 7 bytes more."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        _, num_bytes, kind = struct.unpack_from("<IHB", data, at)
        chunk = data[at + 7 : at + 7 + num_bytes]
        at += 7 + num_bytes
        parts = chunk if kind in (1, 2) else parts + chunk  # whole, first, middle, last
        if kind in (1, 4):
            yield Record.FromString(parts)


@pytest.mark.slow
def test_wandb_offline_has_every_metric_and_leaves_no_service_behind(recipe: Path) -> None:
    run_dir = fit(recipe, "wandb-offline.yaml")
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    found: Metrics = defaultdict(dict)
    settings: dict[str, Any] = {}
    for record in read_wandb(file):
        settings |= {item.key: json.loads(item.value_json) for item in record.config.update}
        values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if values:
            step = int(values["trainer/global_step"])
            found[step] |= {key: float(value) for key, value in values.items()}
    check_has_all_of(found, read_own_log(run_dir))
    assert settings["model"]["decoder"]["dim"] == 32


@pytest.mark.slow
def test_tensorboard_has_every_metric(recipe: Path) -> None:
    run_dir = fit(recipe, "tensorboard.yaml")
    (file,) = run_dir.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    found: Metrics = defaultdict(dict)
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            found[event.step][key] = event.value
    check_has_all_of(found, read_own_log(run_dir))
    settings = yaml.safe_load((file.parent / "hparams.yaml").read_text())
    assert settings["model"]["decoder"]["dim"] == 32


STEPS, SAVE_EVERY = 90, 40


def read_tensorboard(directory: Path) -> Metrics:
    """Returns what TensorBoard shows of a directory; a step with two values fails."""
    events = EventAccumulator(str(directory)).Reload()
    found: Metrics = defaultdict(dict)
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            assert key == "hp_metric" or key not in found[event.step], f"{key} has two values at step {event.step}"
            found[event.step][key] = event.value
    return found


def read_wandb_history(files: list[Path]) -> Metrics:
    """Returns the values of W&B's files by step, the later ones in place of the earlier ones."""
    found: Metrics = defaultdict(dict)
    for file in files:
        for record in read_wandb(file):
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if values:
                found[int(values["trainer/global_step"])] |= {key: float(value) for key, value in values.items()}
    return found


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_one_curve_in_every_logger(recipe: Path) -> None:
    run_dir, mark = recipe.parent / "run", uuid.uuid4().hex
    content = yaml.safe_load(recipe.read_text())
    content["trainer"] |= {
        "max_steps": STEPS,
        "logger": [
            {"class_path": path, "init_args": {"save_dir": str(run_dir), **arguments}}
            for path, arguments in (
                ("genesis.train.tensorboard_log.TensorBoardLogger", {}),
                ("genesis.train.wandb_log.WandbLogger", {"offline": True, "settings": {"git_root": "."}}),
            )
        ],
    }
    content["checkpoint"]["every_n_steps"] = SAVE_EVERY
    recipe.write_text(yaml.safe_dump(content))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"HOME": str(recipe.parent / "home"), MARK: mark}
    process = start_genesis("fit", "--config", recipe, env=environment)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        saved = run_dir / f"checkpoints/step-{SAVE_EVERY:08d}/COMMITTED"
        while not saved.exists() or max(read_own_log(run_dir)) < SAVE_EVERY + 3:
            assert process.poll() is None
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(POLL_SECONDS / 5)
    finally:
        process.kill()
    process.wait()
    wait_until_all_ended(mark)
    metrics = run_dir / "metrics.csv"
    killed_at = max(read_own_log(run_dir))
    assert killed_at > SAVE_EVERY
    metrics.write_bytes(metrics.read_bytes() + b"999999,1.5")  # as if the kill had torn a line
    done = run_genesis(
        *("fit", "--config", str(recipe), "--ckpt_path", "latest"), env=environment, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in "".join(
        line for line in done.stderr.lower().splitlines() if KNOWN_WARNINGS[0].lower() not in line
    )
    wait_until_all_ended(mark)
    own = read_own_log(run_dir)
    assert list(own) == list(range(1, STEPS + 1))
    (board,) = {file.parent for file in run_dir.rglob("events.out.tfevents.*")}
    assert len(list(board.iterdir())) >= 2
    directories = sorted(run_dir.glob("wandb/offline-run-*"))
    assert len(directories) == 2
    assert len({directory.name.rsplit("-", 1)[-1] for directory in directories}) == 1
    files = [file for directory in directories for file in directory.glob("*.wandb")]
    shown, history = read_tensorboard(board), read_wandb_history(files)
    # W&B's service writes whole blocks of 32 kB: the rows in the last one are lost with a killed run.
    lost = own.keys() - history.keys()
    assert lost <= set(range(SAVE_EVERY - 12, SAVE_EVERY + 1))
    for found, steps in ((shown, own.keys()), (history, own.keys() - lost)):
        assert max(found) == STEPS
        for step in steps:
            assert {key: found[step].get(key) for key in own[step]} == pytest.approx(own[step], rel=1e-6), step
