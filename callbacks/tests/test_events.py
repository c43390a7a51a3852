"""A run's events read back as one story, whatever tore, filled or forged their files."""

import json
import math
import multiprocessing
import os
import pickle
import resource
import signal
import time
from pathlib import Path

import plain_project
import pytest
from lightning.pytorch import Callback
from plain_project import run_training, train
from torch.utils.data import DataLoader

from genesis_callbacks import CheckpointVerification
from genesis_callbacks.base import events
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.base.event_reader import MAX_READ_BYTES, EventFollower, read_events, share_budget
from genesis_callbacks.base.events import MAX_LINE_BYTES, Event, EventLog, EventWarning, decode_event, encode_event
from genesis_callbacks.base.run_directory import RunDirectory
from genesis_callbacks.checkpoint import find_latest
from genesis_callbacks.checkpoint.lineage import wait_for_orphans
from genesis_callbacks.testing import run_ranks

KILLED_AFTER = 7


def log_of(run: Path, rank: int | None = 0) -> EventLog:
    return EventLog(run, rank)


def kinds(found: list[Event]) -> list[str]:
    return [event.kind for event in found]


# ---- lines


def test_an_event_comes_back_as_it_was_written() -> None:
    event = Event(
        *("validated", 1_700_000_000.123456, 12.5, 3, 40, {"tokens_seen": 123, "updates": 39}, "step-00000040"),
        *("ValueError", {"validation/loss": 5.25}, "validation/loss 5.25"),
    )
    line = encode_event(event)
    assert decode_event(line) == event
    content = json.loads(line)
    assert content["time"] == "2023-11-14T22:13:20.123456+00:00"
    assert (content["kind"], content["rank"], content["step"]) == ("validated", 3, 40)


def test_a_metric_that_is_not_finite_is_told_as_not_a_number() -> None:
    line = encode_event(Event("validated", 0.0, 0.0, 0, metrics={"loss": math.inf}))
    decoded = decode_event(line)
    assert decoded is not None
    assert math.isnan(decoded.metrics["loss"])
    json.loads(line, parse_constant=pytest.fail)


def test_a_line_is_one_line_of_bounded_length_without_control_characters() -> None:
    wild = "\x1b[2J\n\r\u202e\U0001f600" * 10_000
    names = {f"{wild}{number}": number for number in range(1000)}
    event = Event("failed", 0.0, 0.0, 0, 1, names, wild, wild, dict.fromkeys(names, 1e300), wild)
    line = encode_event(event)
    assert len(line) <= MAX_LINE_BYTES
    assert line.count(b"\n") == 1
    assert line.isascii()
    decoded = decode_event(line)
    assert decoded is not None
    assert decoded.text.isprintable()
    assert decoded.checkpoint is not None
    assert decoded.checkpoint.isprintable()


def test_the_clocks_of_an_event_do_not_repeat_its_step(tmp_path: Path) -> None:
    log_of(tmp_path).write("saved", step=4, clocks={"step": 4, "tokens_seen": 64})
    assert [(event.step, dict(event.clocks)) for event in read_events(tmp_path)] == [(4, {"tokens_seen": 64})]


# ---- torn, and full


@pytest.mark.parametrize("num_torn", [1, 20, 80])
def test_a_torn_last_line_is_left_out_and_the_next_append_begins_a_new_line(tmp_path: Path, num_torn: int) -> None:
    log = log_of(tmp_path)
    for step in range(3):
        log.write("saved", step=step)
    path = RunDirectory(tmp_path).event_file(0)
    last = path.read_bytes().splitlines(keepends=True)[-1]
    os.truncate(path, path.stat().st_size - num_torn)
    follower = EventFollower(tmp_path)
    assert [event.step for event in read_events(tmp_path)] == [0, 1]
    assert [event.step for event in follower.poll()] == [0, 1]
    log.write("ended", step=3)
    # A tear that took the line's end alone leaves an event that is whole.
    whole = [0, 1, 2, 3] if num_torn == 1 else [0, 1, 3]
    assert [event.step for event in read_events(tmp_path)] == whole
    assert [event.step for event in follower.poll()] == whole[2:]
    assert path.read_bytes().splitlines(keepends=True)[2] == last[:-num_torn] + b"\n"


def write_until_killed(run: Path) -> None:
    log = log_of(run)
    for _ in range(2_000):  # ten writers stay below what a reader takes of one file
        log.write("saved", step=7, text="x" * 400)
    signal.pause()


def test_a_writer_that_is_killed_at_any_moment_leaves_only_whole_events(tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).event_file(0)
    for number in range(10):
        num_bytes = path.stat().st_size if number else 0
        process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path,))
        process.start()
        while not path.exists() or path.stat().st_size == num_bytes:
            time.sleep(0.001)
        time.sleep(number * 0.002)
        process.kill()
        process.join()
    found = read_events(tmp_path)
    lines = path.read_bytes().split(b"\n")
    assert len(lines) - len(found) <= 11  # at most one for each kill, and the empty end
    assert {event.step for event in found} == {7}


def test_two_processes_that_append_to_one_file_tear_no_line(tmp_path: Path) -> None:
    def write(step: int) -> None:
        log = log_of(tmp_path)
        for _ in range(500):
            log.write("saved", step=step, text="y" * 300)

    processes = [multiprocessing.get_context("fork").Process(target=write, args=(step,)) for step in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(event.step for event in read_events(tmp_path)) == [1] * 500 + [2] * 500


def test_a_disk_without_room_is_warned_of_once_and_raises_nothing(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.write("saved", step=1)
    path = RunDirectory(tmp_path).event_file(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
        with pytest.warns(EventWarning, match=r"rank-0\.jsonl: only 40 of"):
            log.write("saved", step=2)
        log.write("saved", step=3)  # another warning would be an error here
        assert "File too large" in (log.append("saved", step=4) or "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    log.write("saved", step=5)
    assert [event.step for event in read_events(tmp_path)] == [1, 5]


def test_a_file_in_the_place_of_the_directory_is_warned_of(tmp_path: Path) -> None:
    RunDirectory(tmp_path).events.touch()
    with pytest.warns(EventWarning, match="Not a directory"):
        log_of(tmp_path).write("started")
    assert read_events(tmp_path) == []


# ---- merged, and followed


def test_events_of_ranks_and_commands_are_merged_by_time_and_keep_the_order_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(rank: int | None, *times: float) -> None:
        for moment in times:
            monkeypatch.setattr(events.time, "time", lambda moment=moment: moment)
            log_of(tmp_path, rank).write("saved", step=int(moment))

    write(0, 10.0, 30.0, 25.0, 60.0)  # the clock went back
    write(1, 20.0, 50.0)
    write(None, 40.0)
    monkeypatch.undo()
    found = [(event.rank, event.step) for event in read_events(tmp_path)]
    assert found == [(0, 10), (1, 20), (0, 30), (0, 25), (None, 40), (1, 50), (0, 60)]


def test_a_follower_gives_each_event_once_as_it_comes(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.write("started")
    follower, later = EventFollower(tmp_path), EventFollower(tmp_path, is_from_now=True)
    assert kinds(follower.poll()) == ["started"]
    assert later.poll() == []
    log.write("saved", step=2)
    log_of(tmp_path, 1).write("started")
    assert kinds(follower.poll()) == ["saved", "started"]
    assert kinds(later.poll()) == ["saved", "started"]
    assert follower.poll() == later.poll() == []
    # Another file of the same name is new, all of it.
    RunDirectory(tmp_path).event_file(0).unlink()
    log.write("ended")
    assert kinds(follower.poll()) == ["ended"]


def test_a_log_may_be_given_to_another_process(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(log_of(tmp_path, 2))).write("saved")
    assert [event.rank for event in read_events(tmp_path)] == [2]


# ---- forged


def test_forged_files_are_left_out_and_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path).events
    log = log_of(tmp_path)
    log.write("saved", step=1)
    good = (directory / "rank-0.jsonl").read_bytes()
    os.mkfifo(directory / "rank-1.jsonl")
    (directory / "rank-2.jsonl").mkdir()
    with (directory / "rank-3.jsonl").open("wb") as file:
        file.truncate(1 << 42)
    (directory / "rank-4.jsonl").write_bytes(b"[" * 60_000 + b"\n" + good)
    (directory / "rank-5.jsonl").write_bytes(b'{"kind": "' + b"x" * (8 << 20) + b'"}\n' + good)
    (directory / "rank-6.jsonl").write_bytes(b"\n" * (1 << 20) + b"\xff\xfe\0\n{}\n[]\nnull\n" + good)
    (directory / "rank-7.jsonl").symlink_to("rank-7.jsonl")
    (directory / "notes.txt").write_bytes(good)
    event = json.loads(good)
    changes = [
        *({"kind": "exploded"}, {"kind": ["saved"]}, {"rank": -1}, {"rank": True}, {"step": 1.5}, {"step": 10**100}),
        *({"time": "yesterday"}, {"time": "2026-01-01T00:00:00"}, {"time": 5}, {"monotonic_seconds": "1"}),
        *({"clocks": []}, {"clocks": {"a": "b"}}, {"clocks": {str(n): n for n in range(100)}}, {"metrics": {"a": {}}}),
        *({"text": 5}, {"checkpoint": {}}, {"error_class": 1}, {"monotonic_seconds": 1e999}),
    ]
    lines = [json.dumps(event | change) for change in changes]
    (directory / "rank-8.jsonl").write_text("\n".join([*lines, json.dumps(event | {"step": 2}), '{"step": 3']))
    with pytest.raises(UserError, match=r"rank-7\.jsonl cannot be read"):
        read_events(tmp_path)
    (directory / "rank-7.jsonl").unlink()
    began_seconds = time.monotonic()
    assert [event.step for event in read_events(tmp_path)] == [1, 1, 1, 1, 2]
    follower = EventFollower(tmp_path)
    assert sorted(event.step or 0 for _ in range(3) for event in follower.poll()) == [1, 1, 1, 1, 2]
    assert time.monotonic() - began_seconds < 20.0


def test_of_a_very_large_file_the_newest_events_are_read(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.write("saved", step=0, text="z" * 400)
    path = RunDirectory(tmp_path).event_file(0)
    line = path.read_bytes()
    with path.open("ab") as file:
        for _ in range(2 * MAX_READ_BYTES // len(line) // 1000 + 1):
            file.write(line * 1000)
    log.write("ended", step=9)
    log_of(tmp_path, 1).write("started")
    found = read_events(tmp_path)
    assert kinds(found)[-2:] == ["ended", "started"]
    assert len(found) * len(line) <= MAX_READ_BYTES + 2 * len(line)


def test_shares_of_a_budget_never_exceed_it() -> None:
    assert share_budget([], 10) == []
    assert share_budget([5, 5], 100) == [5, 5]
    assert share_budget([1000, 1, 1000], 101) == [50, 1, 50]
    assert sum(share_budget([7] * 1000, 100)) <= 100


# ---- a run's story


class KillAfter(Callback):
    """Kills its own process after a window."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(run: Path, mode: str) -> None:
    trainer = os.fork()
    if trainer == 0:
        try:
            train(run, "single", 8, mode=mode, every_n_steps=2, callbacks=(KillAfter(KILLED_AFTER),))
        finally:
            os._exit(1)
    _, status = os.waitpid(trainer, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def live_a_story(run: Path, mode: str) -> None:
    train_and_be_killed(run, mode)
    wait_for_orphans(run / "checkpoints", 60.0)  # a writer ends the save that it has in hand
    newest = find_latest(run)
    assert newest is not None
    with (newest / "state.json").open("r+b") as file:
        file.write(b"[[")
    with pytest.warns(UserWarning, match="does not verify and is quarantined"):
        train(run, "single", 8, mode=mode, every_n_steps=2, ckpt_path="latest", callbacks=(CheckpointVerification(),))


@pytest.mark.process
@pytest.mark.parametrize("mode", ["process", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_run_with_a_kill_and_a_quarantine_reads_back_as_one_story(tmp_path: Path, mode: str) -> None:
    run_ranks(live_a_story, 1, tmp_path, mode)
    found = read_events(tmp_path)
    story = [(event.kind, event.step, event.checkpoint) for event in found]
    names = {step: f"step-{step:08d}" for step in (2, 4, 6, 8)}
    # The save of step 6 may be in flight when the kill comes; the second start puts the newest one aside.
    last = max(step for kind, step, _ in story[: story.index(("started", None, None), 1)] if kind == "saved")
    assert last in (4, 6)
    before, num_before = last - 2, 1 + last // 2
    assert story[:num_before] == [
        ("started", None, None),
        *(("saved", step, names[step]) for step in range(2, last + 1, 2)),
    ]
    rest = story[num_before:]
    assert rest[:4] == [
        ("started", None, None),
        ("quarantined", last, names[last]),
        ("verified", before, names[before]),
        ("restored", before, names[before]),
    ]
    saved = [step for kind, step, _ in rest if kind == "saved"]
    verified = [step for kind, step, _ in rest[4:] if kind == "verified"]
    assert saved == list(range(last, 9, 2))
    assert verified == saved
    assert rest[-1] == ("ended", 8, None)
    assert {event.rank for event in found} == {0}
    assert [event.time_seconds for event in found] == sorted(event.time_seconds for event in found)
    (quarantined,) = (event for event in found if event.kind == "quarantined")
    assert quarantined.error_class == "CorruptCheckpointError"
    assert f"quarantined as quarantined-{names[last]}" in quarantined.text
    for event in found:
        if event.kind in ("saved", "restored", "ended") and event.step is not None:
            assert event.clocks == {"tokens_seen": 40 * event.step}


@pytest.mark.process
def test_each_rank_tells_its_start_and_end_and_rank_0_alone_what_is_the_runs(tmp_path: Path) -> None:
    run_training(2, tmp_path, "ddp", 4, every_n_steps=2)
    found = read_events(tmp_path)
    assert kinds([event for event in found if event.rank == 1]) == ["started", "ended"]
    assert kinds([event for event in found if event.rank == 0]) == ["started", "saved", "saved", "ended"]
    assert [event.time_seconds for event in found] == sorted(event.time_seconds for event in found)
    assert {event.text.partition(",")[0] for event in found[:2]} == {"rank 0 of 2", "rank 1 of 2"}


class FailAt(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 3:
            raise ArithmeticError("no more\nnumbers")


def fail_at_step_3(run: Path) -> None:
    with pytest.raises(ArithmeticError):
        train(run, "single", 8, every_n_steps=2, callbacks=(FailAt(),))


@pytest.mark.process
def test_a_fit_that_ends_by_an_error_tells_its_class_and_has_no_end(tmp_path: Path) -> None:
    run_ranks(fail_at_step_3, 1, tmp_path)
    last = read_events(tmp_path)[-1]
    assert (last.kind, last.step, last.error_class, last.text) == ("failed", 3, "ArithmeticError", "no more\\nnumbers")


def save_where_no_save_is_possible(run: Path) -> None:
    plain_project.DataLoader = DataLoader
    (run / "checkpoints").mkdir(parents=True)
    train(run, "single", 1, every_n_steps=1)
    (run / "checkpoints/step-00000002").write_text("in the way")
    with pytest.warns(UserWarning, match="the save at step 2 failed"):
        train(run, "single", 3, every_n_steps=1, ckpt_path="latest", on_save_failure="warn")


@pytest.mark.process
def test_a_save_that_failed_is_told_with_its_checkpoint_and_the_run_goes_on(tmp_path: Path) -> None:
    run_ranks(save_where_no_save_is_possible, 1, tmp_path)
    found = read_events(tmp_path)
    (failed,) = (event for event in found if event.kind == "failed")
    assert (failed.step, failed.checkpoint, failed.error_class) == (2, "step-00000002", "SaveFailedError")
    assert kinds(found)[-2:] == ["saved", "ended"]
