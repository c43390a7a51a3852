"""The loop, with real ranks: each class of ends that a CPU can produce is produced, classified and answered."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from genesis.base.errors import RunEndedError
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise import loop
from genesis.operations.supervise.attempt import Limits
from genesis.operations.supervise.crashes import CrashRecord, read_crashes
from genesis.operations.supervise.decide import Policy
from genesis.operations.supervise.launch_protocol import Job, LauncherState
from genesis.operations.supervise.launcher_client import LauncherClient
from genesis.operations.supervise.observers import Launch, Observer
from genesis.operations.supervise.state import SupervisorLock
from genesis.operations.supervise.status import SupervisorStatus, read_status
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.base.events import Event, encode_event
from genesis_callbacks.base.run_directory import RunDirectory as CallbacksDirectory
from genesis_callbacks.heartbeats import read_heartbeats
from tests.operations.supervise.supervised import Run

pytestmark = [pytest.mark.slow, pytest.mark.process]


class Strike(Observer):
    """Lets something happen to the ranks once the first attempt has trained some steps."""

    def __init__(self, act: Callable[[dict[int, int]], None], run: Run, min_step: int = 6) -> None:
        self._act, self._run, self._min_step = act, run, min_step
        self.launches: list[Launch] = []
        self.ended: list[CrashRecord] = []
        self.recovered: list[CrashRecord] = []
        self.completed: list[SupervisorStatus] = []

    def on_launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        if len(self.launches) == 1:
            threading.Thread(target=self._wait_and_act, args=(dict(launch.pids),), daemon=True).start()

    def _wait_and_act(self, pids: dict[int, int]) -> None:
        while not any(beat.step >= self._min_step for beat in read_heartbeats(self._run.run_dir).values()):
            time.sleep(0.01)
        self._act(pids)

    def on_end(self, record: CrashRecord) -> None:
        self.ended.append(record)

    def on_recovered(self, record: CrashRecord) -> None:
        self.recovered.append(record)

    def on_complete(self, status: SupervisorStatus) -> None:
        self.completed.append(status)


def send(number: int, rank: int = 0) -> Callable[[dict[int, int]], None]:
    return lambda pids: os.kill(pids[rank], number)


@pytest.fixture
def run(tiny_corpus: Path, tmp_path: Path) -> Run:
    # Long enough that a heartbeat shows a step before the end.
    return Run(tiny_corpus, tmp_path, {"trainer.max_steps": 150, "checkpoint.every_n_steps": 20})


def test_launchers_and_jobs_that_are_killed_are_started_again(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_corpus, tmp_path, {"trainer.max_steps": 4})
    # What is killed around each request: while the recipe is resolved, and while the ranks are launched.
    kills = iter(["before", "before", "child", "after", "", "before", "before", "before", ""])
    fork = LauncherClient.fork

    def fork_and_kill(client: LauncherClient, attempt: int, jobs: Sequence[Job]) -> LauncherState:
        when = next(kills)
        if when == "before":
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
        state = fork(client, attempt, jobs)
        if when:
            os.kill(state.pid if when == "after" else state.children[0].pid, signal.SIGKILL)
        return state

    monkeypatch.setattr(LauncherClient, "fork", fork_and_kill)
    assert run.supervise() == 0, run.lines
    assert not read_crashes(run.run_dir)
    assert next(kills, None) is None


def write_event_of_another_machine(run_dir: Path) -> None:
    """Writes an error that is no evidence of an end: its clock is that of a machine that had been up for longer."""
    text, later = "CUDA out of memory. Tried to allocate 20.00 MiB.", time.monotonic() + 1e6
    path = CallbacksDirectory(run_dir).event_file(0)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_event(Event("failed", time.time(), later, 0, 3, error_class="OutOfMemoryError", text=text)))


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "lost_rank"), (signal.SIGSEGV, "native_crash"), (signal.SIGTERM, "interrupted")],
)
def test_a_rank_that_a_signal_ends_is_started_again_from_the_newest_checkpoint(
    run: Run, number: int, name: str
) -> None:
    write_event_of_another_machine(run.run_dir)
    strike = Strike(send(number), run, min_step=1)
    assert run.supervise([strike], cost_per_hour=3600.0) == 0, run.lines
    (crash,) = read_crashes(run.run_dir)
    assert (crash.end_class, crash.rank, crash.attempt) == (name, 0, 1)
    assert crash.lost_seconds is not None
    assert crash.cost == pytest.approx(crash.lost_seconds)
    assert [len(each) for each in (strike.launches, strike.ended, strike.recovered, strike.completed)] == [2, 1, 1, 1]
    status = read_status(run.run_dir)
    assert status is not None
    assert (status.state, status.step, status.ends, status.restarts) == ("completed", 150, {name: 1}, {name: 1})
    assert 0 < status.goodput.share < 1
    assert (RunDirectory(run.run_dir).crashes / f"0001-{name}" / "rank-0.log").exists()
    kinds = [event.kind for event in read_events(run.run_dir) if event.rank is None]
    assert kinds == ["launched", "crashed", "launched", "recovered", "completed"]


@pytest.mark.repeat  # `test_classify.py` names the rank, `tests/cli/test_lost_rank.py` ends the others
def test_the_rank_that_failed_first_is_named_and_the_other_is_ended(tiny_corpus: Path, tmp_path: Path) -> None:
    run = Run(tiny_corpus, tmp_path, {"trainer.devices": 2, "trainer.max_steps": 200})
    assert run.supervise([Strike(send(signal.SIGKILL, rank=1), run, min_step=1)]) == 0, run.lines
    (crash,) = read_crashes(run.run_dir)
    assert (crash.end_class, crash.rank, crash.statuses[1]) == ("lost_rank", 1, -signal.SIGKILL)


def test_a_rank_that_is_stopped_hangs_and_leaves_its_stacks(run: Run) -> None:
    limits = Limits(hang_seconds=2.0, start_seconds=120.0, grace_seconds=2.0)
    assert run.supervise([Strike(send(signal.SIGSTOP), run, min_step=1)], limits=limits) == 0, run.lines
    (crash,) = read_crashes(run.run_dir)
    assert (crash.end_class, crash.rank) == ("hang", 0)
    stacks = (RunDirectory(run.run_dir).crashes / "0001-hang" / "rank-0.stacks").read_text()
    assert "Thread" in stacks


def test_a_preemption_saves_and_a_later_supervisor_completes_the_run(run: Run, tmp_path: Path) -> None:
    run.write({"trainer.max_steps": 400, "checkpoint.every_n_steps": 20})  # the supervisor looks for it at times
    notice = tmp_path / "notice"
    preempt = Strike(lambda pids: notice.touch(), run, min_step=1)
    assert run.supervise([preempt], preempt_file=notice) == 75, run.lines
    assert preempt.completed[0].state == "requeued"
    assert (preempt.ended, read_crashes(run.run_dir)) == ([], [])
    kinds = [event.kind for event in read_events(run.run_dir) if event.rank is None]
    assert kinds == ["launched", "preempted", "stopped"]
    saved = [event.step for event in read_events(run.run_dir) if event.kind == "saved"][-1]
    notice.unlink()
    assert run.supervise() == 0
    restored = [event.step for event in read_events(run.run_dir) if event.kind == "restored"]
    assert restored == [saved]


def test_a_mistake_in_the_recipe_is_not_tried_again(run: Run) -> None:
    run.write({"model.optimizer.lr": "fast"})
    with pytest.raises(RunEndedError, match="lr") as caught:
        run.supervise()
    assert caught.value.exit_status == 2


@pytest.mark.repeat  # `test_decide.py` has the decision, `test_classify.py` the signature
def test_a_taken_port_is_left_for_another_one(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_corpus, tmp_path, {"trainer.devices": 2})
    with socket.socket() as thief:
        thief.bind(("", 0))
        thief.listen(1)
        real, taken = loop.choose_port, [thief.getsockname()[1]]
        monkeypatch.setattr(loop, "choose_port", lambda avoided: taken.pop() if taken else real(avoided))
        assert run.supervise() == 0, run.lines
    (crash,) = read_crashes(run.run_dir)
    assert (crash.end_class, crash.action) == ("port_in_use", "restart on another port")


@pytest.mark.repeat  # `test_decide.py`: drift follows the consent
def test_a_changed_recipe_stops_unless_it_is_allowed_or_starts_from_scratch(tiny_corpus: Path, tmp_path: Path) -> None:
    run = Run(tiny_corpus, tmp_path, {"trainer.max_steps": 4})
    assert run.supervise() == 0
    run.write({"trainer.max_steps": 8, "model.optimizer.lr": 2e-2})
    assert run.supervise() == 2
    assert read_crashes(run.run_dir)[-1].end_class == "recipe_drift"
    assert b"model.optimizer.lr is 0.02 and was 0.01" in run.output
    assert run.supervise(fit=["--checkpoint.allow_changed", '["*"]']) == 0
    run.write({"trainer.max_steps": 12, "model.optimizer.lr": 3e-2})
    assert run.supervise(policy=Policy(on_drift="fresh")) == 0
    restored = [event.step for event in read_events(run.run_dir) if event.kind == "restored"]
    assert restored == [4]
    assert (RunDirectory(run.run_dir).checkpoints / "superseded-1" / "step-00000008").exists()


@pytest.mark.repeat  # `test_decide.py`: ends without a new checkpoint; `test_classify.py`
def test_a_damaged_shard_is_tried_twice_and_named(tiny_corpus: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    for path in sorted(tiny_corpus.rglob("*")):
        target = corpus / path.relative_to(tiny_corpus)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    run = Run(corpus, tmp_path)
    for shard in corpus.glob("train/*/00000.ds"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    assert run.supervise() == 86, run.lines
    crashes = read_crashes(run.run_dir)
    assert [crash.end_class for crash in crashes] == ["corrupt_data", "corrupt_data"]
    assert "00000.ds" in crashes[0].reason


@pytest.mark.repeat  # `test_decide.py` decides, `test_skips.py` runs a storm
def test_a_storm_of_windows_that_are_not_finite_rolls_back_twice_and_stops(tiny_corpus: Path, tmp_path: Path) -> None:
    run = Run(tiny_corpus, tmp_path, {"model.optimizer.lr": 1e30, "counters.max_consecutive_skips": 9})
    status = run.supervise(policy=Policy(max_ends_without_progress=9))
    assert status == 88, run.lines
    assert {crash.end_class for crash in read_crashes(run.run_dir)} == {"non_finite"}


def test_a_run_has_one_supervisor(run: Run) -> None:
    lock = SupervisorLock(RunDirectory(run.run_dir).supervisor)
    with pytest.raises(ValueError, match=f"already has a supervisor .process {os.getpid()}."):
        run.supervise()
    lock.release()
