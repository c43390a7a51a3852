"""A run that hangs ends with the stacks of its ranks and the name of the one that is missing."""

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer
from lightning.pytorch import Callback

from genesis_callbacks import HangWatch, Heartbeat, TokenCounters
from genesis_callbacks._hang_report import (
    HangReport,
    describe_last,
    find_missing,
    read_flight_record,
    read_reports,
    write_report,
)
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.base.run_directory import RunDirectory
from genesis_callbacks.hang_watch import EXIT_STATUS, HangLimits, Pulse, choose_limit
from genesis_callbacks.heartbeats import read_heartbeats
from genesis_callbacks.phases import in_phase, note_progress
from genesis_callbacks.testing import run_ranks

pytestmark = LIGHTNING_WARNINGS

REPORT = HangReport(0, 42, "node", "train", 9, 4, 31.0, "main.py:3 in step", True, "gloo:all_reduce [[4]]")


@pytest.mark.parametrize(
    ("others", "ranks", "reason"),
    [
        ([], (1, 2), "they have written no report"),
        ([replace(REPORT, rank=1)], (2,), "it has written no report"),
        ([replace(REPORT, rank=1, count=8, where="x.py:1 in load"), replace(REPORT, rank=2)], (1,), "x.py:1 in load"),
        (
            [replace(REPORT, rank=1), replace(REPORT, rank=2, is_waiting=False)],
            (2,),
            "other ranks wait in a collective",
        ),
        (
            [replace(REPORT, rank=1, silent_seconds=40.0), replace(REPORT, rank=2)],
            (1,),
            "its last progress is the oldest",
        ),
    ],
    ids=["none", "silent", "behind", "elsewhere", "oldest"],
)
def test_the_rank_for_which_the_others_wait_is_named(others: list[HangReport], ranks, reason: str) -> None:
    verdict = find_missing([REPORT, *others], 3)
    assert verdict.ranks == ranks
    assert reason in verdict.describe()


def test_each_phase_has_a_limit_and_the_first_step_one_of_its_own() -> None:
    limits = HangLimits(10.0, 100.0, {"validate": 5.0})
    chosen = {phase: choose_limit(phase, limits, has_stepped=True) for phase in ("train", "validate", "generate")}
    assert chosen == {"train": 10.0, "validate": 5.0, "generate": 40.0}
    assert choose_limit("train", limits, has_stepped=False) == 100.0


def test_a_report_comes_back_and_one_of_another_form_is_none(tmp_path: Path) -> None:
    write_report(tmp_path, REPORT)
    (tmp_path / "rank-1.json").write_text('{"rank": 1, "phase": "asleep"}')
    assert read_reports(tmp_path, 3) == [REPORT]


def test_the_last_collective_of_a_record_has_its_sizes_and_nccl_its_state() -> None:
    entries = [{"record_id": 1, "profiling_name": "nccl:all_reduce", "input_sizes": [[8]], "state": "started"}]
    entries.append({"record_id": 0, "profiling_name": "nccl:broadcast", "input_sizes": [[2]], "state": "completed"})
    assert describe_last(json.dumps({"entries": entries}).encode()) == "nccl:all_reduce [[8]] (started)"
    assert describe_last(b"{") == describe_last(b"[]") == describe_last(b'{"entries": []}') == ""
    assert describe_last(read_flight_record()) == ""  # this process has no group


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_seconds": 0.0}, "timeout_seconds is 0.0"),
        ({"first_step_seconds": float("nan")}, "first_step_seconds is nan"),
        ({"phase_seconds": {"validate": -1.0}}, "phase_seconds\\['validate'\\] is -1.0"),
        ({"phase_seconds": {"sleep": 1.0}}, "'sleep', which has no limit"),
    ],
)
def test_wrong_limits_are_refused(options, words: str) -> None:
    with pytest.raises(UserError, match=words):
        HangWatch(**options)


def test_a_process_is_last_seen_when_it_gave_its_last_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "heartbeats" / "rank-1.pulse"
    own, neighbour = Pulse(path, "now"), Pulse(path, "now")
    assert neighbour.look(1.0) is None
    own.beat()
    assert [neighbour.look(seconds) for seconds in (2.0, 9.0)] == [2.0, 2.0]
    os.utime(path, ns=(0, 0))
    assert neighbour.look(10.0) == 10.0
    own.beat()
    assert neighbour.look(11.0) == 11.0
    assert Pulse(path, "another fit").look(12.0) is None
    own.end()
    assert neighbour.look(13.0) is None


def test_a_trainer_without_a_heartbeat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="add Heartbeat"):
        trainer(tmp_path, [HangWatch()]).fit(Module({}), loader([5]))


@pytest.mark.slow
def test_a_run_that_makes_progress_in_long_phases_is_left_alone(tmp_path: Path) -> None:
    phases: list[str] = []

    class Long(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with in_phase(trainer, "generate"):
                phases.append(read_heartbeats(tmp_path / "run")[0].phase)
                for _ in range(8):
                    time.sleep(0.5)
                    note_progress(trainer)

    heartbeat = Heartbeat(tmp_path / "run", every_seconds=0)
    # Shorter than the phase, and longer than a busy machine keeps a thread waiting.
    watch = HangWatch(timeout_seconds=3.0, phase_seconds={"generate": 3.0})
    trainer(tmp_path, [watch, Long(), heartbeat]).fit(Module({}), loader([5]))
    assert phases == ["generate"]
    assert read_heartbeats(tmp_path / "run")[0].phase == "ended"
    assert not RunDirectory(tmp_path / "run").hangs.exists()
    assert heartbeat.progress is None


class Stop(Callback):
    """Stops the process of a rank, or lets it wait, in the middle of training."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank == self.rank:
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(60)


def fit_and_hang(directory: Path, how: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    callbacks = [TokenCounters(), Stop(1, how), Heartbeat(directory / "run"), HangWatch(timeout_seconds=4.0)]
    trainer(directory, callbacks, devices=2, strategy="ddp").fit(Module({}), loader([5] * 8))


def kill_the_stopped_rank(run_dir: Path) -> None:
    """Waits for the verdict, then kills rank 1, as a launcher does once another rank has ended."""
    deadline_seconds = time.monotonic() + 60
    while time.monotonic() < deadline_seconds and not list(RunDirectory(run_dir).hangs.glob("*/verdict.txt")):
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, LookupError):
        os.kill(read_heartbeats(run_dir)[1].pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("how", ["stop", "wait"])
def test_a_rank_that_is_stopped_is_named_within_its_limit(tmp_path: Path, how: str) -> None:
    killer = threading.Thread(target=kill_the_stopped_rank, args=(tmp_path / "run",))
    killer.start()
    with pytest.raises(AssertionError, match="rank 0"):
        run_ranks(fit_and_hang, 2, tmp_path, how, timeout_seconds=60.0)
    killer.join()
    (folder,) = RunDirectory(tmp_path / "run").hangs.iterdir()
    verdict = (folder / "verdict.txt").read_text()
    assert verdict.startswith("rank 1 is missing"), verdict
    assert "all_reduce" in verdict or "allreduce" in verdict, verdict
    assert "clock_runs.py" in (folder / "rank-0.stacks").read_text() or "fit" in (folder / "rank-0.stacks").read_text()
    assert (folder / "rank-1.stacks").exists() == (how == "wait")
    (event,) = [event for event in read_events(tmp_path / "run") if event.kind == "hang"]
    assert "rank 1 is missing" in event.text
    # The limit, the time to gather the reports, and what a busy machine adds.
    beats = read_heartbeats(tmp_path / "run")
    assert event.time_seconds - max(beat.time_seconds for beat in beats.values()) < 30
    assert EXIT_STATUS == 92
