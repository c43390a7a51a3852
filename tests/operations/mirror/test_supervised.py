"""A supervised training with a mirror, metrics and alerts: a crash, a lost machine, and the same weights at the end."""

import csv
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from genesis.base.run_directory import RunDirectory
from genesis.operations.mirror.process import MirrorProcess, MirrorProcessOptions
from genesis.operations.report.runs import summarise_run
from genesis.operations.supervise.alerts import AlertOptions, Alerts
from genesis.operations.supervise.crashes import read_crashes
from genesis.operations.supervise.metrics import MetricsServer
from genesis.operations.supervise.observers import Launch, Observer
from genesis.operations.supervise.skips import Skips
from genesis.operations.supervise.state import read_skips, read_state, write_skips
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.checkpoint import list_committed, verify
from genesis_callbacks.heartbeats import read_heartbeats
from tests.operations.supervise.supervised import Run
from tests.operations.supervise.test_metrics import scrape


class KillOnce(Observer):
    """Kills rank 0 of the first attempt after some steps."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_launch(self, launch: Launch) -> None:
        if launch.attempt == 1:
            threading.Thread(target=self._wait_and_kill, args=(launch.pids[0],), daemon=True).start()

    def _wait_and_kill(self, pid: int) -> None:
        while not any(beat.step >= 6 for beat in read_heartbeats(self._run.run_dir).values()):
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)


def digest(run_dir: Path) -> dict[str, int]:
    tensors = verify(run_dir / "checkpoints" / "step-00000012", "deep").tensors
    return {name: record.digest for name, record in tensors.items()}


@pytest.mark.process
@pytest.mark.slow
def test_a_crash_and_a_lost_machine_change_no_bit_of_a_mirrored_run(tiny_corpus: Path, tmp_path: Path):
    run, place, heard = Run(tiny_corpus, tmp_path, {"trainer.max_steps": 12}), tmp_path / "mirror", tmp_path / "heard"
    mirror = MirrorProcess(run.run_dir, MirrorProcessOptions(str(place)), run.lines.append)
    command = ["sh", "-c", f'echo "$GENESIS_EVENT" >> {heard}']
    alerts = Alerts(run.run_dir, AlertOptions(command=command), run.lines.append)
    server = MetricsServer(run.run_dir)
    write_skips(run.run_dir, Skips(num_windows=2))
    try:
        assert run.supervise([mirror, alerts, server, KillOnce(run)]) == 0
        found = scrape(server)
    finally:
        server.close()
    assert heard.read_text().split() == ["crash", "recovery", "end"]
    assert (found["genesis_crashes_total",], found["genesis_steps_total",]) == (1, 12)
    assert found["genesis_state", "completed"] == 1
    assert 0 < found["genesis_goodput_ratio",] < 1
    summary = summarise_run(run.run_dir)
    assert (summary.state, summary.step, summary.num_crashes) == ("ended", 12, 1)
    assert [manifest.step for _, manifest in list_committed(place)] == [8, 12]
    straight = digest(run.run_dir)
    before, crashes = read_events(run.run_dir), read_crashes(run.run_dir)
    state = read_state(RunDirectory(run.run_dir).supervisor)
    assert state is not None
    assert state.first_crash == 1
    shutil.rmtree(run.run_dir)  # the machine is lost, before its last checkpoint had reached the mirror
    shutil.rmtree(place / "checkpoints" / "step-00000012")
    assert run.supervise([MirrorProcess(run.run_dir, MirrorProcessOptions(str(place)), run.lines.append)]) == 0
    assert [manifest.step for _, manifest in list_committed(run.run_dir)] == [8, 12]
    assert digest(run.run_dir) == straight
    # Its history came back with it: the loss of each step, and what had happened on the lost machine.
    with (run.run_dir / "metrics.csv").open(newline="") as log:
        assert [row["step"] for row in csv.DictReader(log)] == [str(step) for step in range(1, 13)]
    after = read_events(run.run_dir)
    assert all(event in after for event in before)
    assert read_crashes(run.run_dir) == crashes
    assert read_skips(run.run_dir) == Skips(num_windows=2)
    state = read_state(RunDirectory(run.run_dir).supervisor)
    assert state is not None
    assert state.first_crash == 2, "a new machine is a new try"
    assert [manifest.step for _, manifest in list_committed(place)] == [8, 12]
