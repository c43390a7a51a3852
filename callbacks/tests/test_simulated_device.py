"""Saves from a simulated accelerator whose streams are late, or early: what is staged is what was live, in any order.

It also stands in for a device that is short of memory, does not pin, fails, or is lost.
"""

import functools
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from simulated import build_library, kills, load, project, require_compiler, the_device
from simulated.project import train
from test_digest import DTYPES, random_tensor

from genesis_callbacks import AsyncProcessCheckpoint, StepTimer, _fit_saves, _step_timeline
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    Ranks,
    SaveTarget,
    Snapshot,
    read_tensors,
)
from genesis_callbacks.checkpoint import digest as digest_module
from genesis_callbacks.checkpoint import (
    stage as stager,
)
from genesis_callbacks.checkpoint.device import DevicePath
from genesis_callbacks.checkpoint.device_proof import DeviceProof, prove_device
from genesis_callbacks.checkpoint.digest import DigestScratch, digest_chunk
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.testing import run_ranks

pytestmark = pytest.mark.process
LATE_US = 700
SHAPE = (3, 5, 22)
# (lowest index, end) of chunks: whole, runs that touch, runs at one distance, at two distances, and none.
CUTS = [
    ((0, 0, 0), (3, 5, 22)),
    ((1, 0, 0), (3, 5, 22)),
    ((1, 2, 0), (3, 4, 22)),
    ((0, 0, 11), (3, 5, 17)),
    ((1, 2, 3), (3, 4, 20)),
    ((0, 3, 21), (3, 5, 22)),
    ((2, 2, 2), (2, 2, 2)),
]


@pytest.fixture(autouse=True, scope="module")
def _compiler():
    require_compiler()
    build_library()


def run_alone(function, *arguments):
    """Returns what a function gives in a process of its own, which has the device to itself."""
    return run_ranks(function, 1, *arguments)[0]


def check_saved(run, *steps):
    assert sorted(run["saved"]) == list(steps)
    for step, saved in run["saved"].items():
        assert saved["compared"] > 15, step
        assert saved["wrong"] == [], step


def warned(run, category):
    return [text for text in run["warnings"] if text.startswith(category)]


def fit(run_dir: Path, first_us: int, other_us: int, options: dict) -> dict:
    load(first_us, other_us)
    return train(run_dir, **options)


# ---- digests


def digest_everywhere() -> list[str]:
    load()
    wrong = []
    for dtype in (*DTYPES, torch.float8_e5m2, torch.uint16, torch.complex128):
        tensor = random_tensor(SHAPE, dtype)
        there = tensor.to(the_device())
        for block_words in (37, 1 << 12):
            scratch = DigestScratch(the_device(), block_words)
            slices = [tuple(slice(*ends) for ends in zip(*cut, strict=True)) for cut in CUTS]
            found = scratch.digest_all(
                [(there[index], SHAPE, low) for index, (low, _) in zip(slices, CUTS, strict=True)]
            )
            for index, (low, _), digest in zip(slices, CUTS, found, strict=True):
                if digest != digest_chunk(tensor[index], SHAPE, low):
                    wrong.append(f"{dtype} {low} {block_words}")
        if digest_chunk(there, SHAPE, (0, 0, 0)) != digest_chunk(tensor, SHAPE, (0, 0, 0)):
            wrong.append(f"{dtype} alone")
    return wrong


def test_digests_that_are_taken_there_are_those_of_the_cpu_for_any_sharding():
    assert run_alone(digest_everywhere) == []


def count_waits(num_tensors: int) -> tuple[int, int, int]:
    device = load()
    tensors = [torch.ones(3000, device=the_device()) for _ in range(num_tensors)]
    scratch = DigestScratch(the_device())
    waits, before = device.simulated_num_waits(), device.simulated_allocated_bytes()
    scratch.digest_all([(tensor, (3000,), (0,)) for tensor in tensors])
    return device.simulated_num_waits() - waits, device.simulated_allocated_bytes() - before, scratch.num_bytes


def test_the_digests_of_a_save_wait_for_the_device_once_and_take_no_memory_for_the_tensors():
    waits, growth, held = run_alone(count_waits, 40)
    assert waits == 1
    assert growth == 3 * 8 * 40  # three sums for each block
    assert held == 3 * 8 * digest_module._DEVICE_BLOCK_WORDS + growth
    assert held < 25 << 20  # whatever the sizes of the tensors


# ---- staging


@pytest.mark.parametrize(
    ("mode", "first_us", "other_us"),
    [
        ("process", LATE_US, 0),
        pytest.param("thread", LATE_US, 0, marks=pytest.mark.slow),
        pytest.param("thread", 0, LATE_US, marks=pytest.mark.slow),
        pytest.param("process", 0, LATE_US, marks=pytest.mark.slow),
        pytest.param("sync", LATE_US, 0, marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_is_what_was_live_whichever_stream_is_late(tmp_path, mode, first_us, other_us):
    run = run_alone(fit, tmp_path, first_us, other_us, {"mode": mode})
    check_saved(run, 2, 4)
    assert run["failed"] == 0
    assert warned(run, "SlowDeviceWarning") == warned(run, "TornSnapshotWarning") == []
    assert run["saved"][4]["versions"]["device.copies"] == "pinned"


class SlowAfterStep(Callback):
    """Makes the last kernels of the second optimizer step very late, until the next step begins."""

    def __init__(self, device) -> None:
        self.device = device

    def on_train_start(self, trainer, pl_module) -> None:
        (optimizer,) = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: self._delay(trainer, 60_000))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self._delay(trainer, 5_000)

    def _delay(self, trainer, microseconds: int) -> None:
        if trainer.global_step == 1:  # Lightning counts the second step when it has ended
            self.device.simulated_set_delays(microseconds, 0)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.device.simulated_set_delays(0, 0)


def fit_with_slow_step(run_dir: Path, has_event: bool) -> dict:
    device = load()
    if not has_event:
        stager.record_event = torch.Event  # an event that was never recorded holds nobody back
    return train(run_dir, callbacks=(SlowAfterStep(device),), on_save_failure="warn", max_steps=3)


def test_a_missing_event_shows_in_a_whole_fit(tmp_path):
    run = run_alone(fit_with_slow_step, tmp_path / "good", True)
    check_saved(run, 2, 3)
    run = run_alone(fit_with_slow_step, tmp_path / "bad", False)
    assert any(saved["wrong"] for saved in run["saved"].values()) or run["failed"] or warned(run, "TornSnapshotWarning")


class SlowCopies(Callback):
    """Makes the copies of the first save very late, until the optimizer step after it has been made."""

    def __init__(self, device) -> None:
        self.device = device

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.device.simulated_set_delays(0, 50_000 if trainer.global_step == 2 else 0)


def fit_without_wait(run_dir: Path) -> dict:
    device = load()
    _fit_saves.FitSaves.wait_staged = lambda self: None
    return train(run_dir, callbacks=(SlowCopies(device),), max_steps=6)


def test_an_optimizer_step_that_does_not_wait_for_the_copy_is_found_and_the_save_made_again(tmp_path):
    run = run_alone(fit_without_wait, tmp_path)
    assert len(warned(run, "TornSnapshotWarning")) == 1
    assert run["failed"] == 0
    assert 6 in run["saved"]
    assert all(not saved["wrong"] for saved in run["saved"].values())


# ---- memory


class NotePins(Callback):
    """Notes what is pinned when the first step has ended, and at the end."""

    def __init__(self, device) -> None:
        self.device, self.pinned = device, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 1:
            (saves,) = [one._session.saves for one in trainer.callbacks if hasattr(one, "_session")]
            done = []
            saves.pipeline._worker.submit(lambda: done.append(True))
            while not done:
                pass
            self.pinned.append((saves.pipeline.copy_bytes, self.device.simulated_pinned_bytes()))
            # The driver holds a lock while it pins a piece.
            num_pieces = len(saves.pipeline._stager.buffer._pinned)
            assert num_pieces == -(-saves.pipeline.copy_bytes // project.PIECE_BYTES) > 1
            assert saves.pipeline.step_in_flight is None

    def on_train_end(self, trainer, pl_module) -> None:
        (saves,) = [one._session.saves for one in trainer.callbacks if hasattr(one, "_session") and one._session]
        self.pinned.append((saves.pipeline.copy_bytes, saves.pipeline.scratch_bytes))


def fit_and_note_pins(run_dir: Path) -> tuple:
    device = load()
    note = NotePins(device)
    run = train(run_dir, callbacks=(note,), save_at_end=False, max_steps=5)
    return run, note.pinned, device.simulated_pinned_bytes()


def test_memory_is_pinned_once_before_the_first_save_and_given_back(tmp_path):
    run, ((reserved, pinned), (at_end, scratch)), left = run_alone(fit_and_note_pins, tmp_path)
    check_saved(run, 2, 4)
    assert reserved == pinned == at_end
    assert scratch >= 24 << 20
    assert left == 0


def grow() -> list[int]:
    load()
    stage = stager.SharedStager()
    sizes = []
    for num_elements in (100_000, 100_900, 110_000):
        (local,) = local_shards("model.x", torch.zeros(num_elements, device=the_device()), "parameter")
        stage.reserve(the_device(), [local.part])
        sizes.append(stage.buffer.num_bytes)
    stage.close()
    return sizes


def test_a_tensor_that_grows_by_a_little_pins_nothing_again():
    first, second, third = run_alone(grow)
    assert 400_000 < first == second < 410_000
    assert third > 440_000


def fit_with_few_pins(run_dir: Path, limit: int, after_proof: bool) -> tuple[dict, int]:
    device = load(LATE_US, 0)
    if not after_proof:
        device.simulated_limit_pins(limit)
        return train(run_dir), device.simulated_pinned_bytes()

    class Limit(Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            device.simulated_limit_pins(limit)

    return train(run_dir, callbacks=(Limit(),)), device.simulated_pinned_bytes()


@pytest.mark.parametrize("after_proof", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_that_cannot_be_pinned_costs_a_warning_and_speed_alone(tmp_path, after_proof):
    """After the proof the driver pins some pieces and no more: they are given back, or a copy would reach over both."""
    run, pinned = run_alone(fit_with_few_pins, tmp_path, 3 * 4096, after_proof)
    check_saved(run, 2, 4)
    assert run["failed"] == 0
    (text,) = warned(run, "SlowDeviceWarning")
    assert "the driver does not pin" in text
    assert pinned == 0
    assert run["saved"][4]["versions"]["device.copies"] == ("pinned" if after_proof else "pageable")


class Starve(Callback):
    """Leaves a device without room for digests; what training takes is there already."""

    def __init__(self, device, spare_bytes: int) -> None:
        self.device, self.spare_bytes = device, spare_bytes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.device.simulated_limit_memory(self.device.simulated_allocated_bytes() + self.spare_bytes)


def fit_starved(run_dir: Path, mode: str) -> dict:
    device = load()
    return train(run_dir, callbacks=(Starve(device, 1 << 20),), mode=mode)


@pytest.mark.parametrize("mode", ["thread", pytest.param("sync", marks=pytest.mark.slow)])
def test_without_memory_for_digests_they_are_taken_of_the_copies(tmp_path, mode):
    run = run_alone(fit_starved, tmp_path, mode)
    check_saved(run, 2, 4)
    assert run["failed"] == 0
    (text,) = warned(run, "SlowDeviceWarning")
    assert "out of memory" in text


def save_with_failing_digest(directory: Path) -> tuple:
    device = load()
    live = torch.arange(50_000.0, device=the_device())
    parts = local_shards("model.x", live, "parameter")
    pipeline = SavePipeline(SaveTarget(directory, Ranks()), mode="thread")
    pipeline._stager.reserve(the_device(), [parts[0].part])
    device.simulated_limit_memory(0)  # the sums find no room
    pipeline.begin(1, lambda: Snapshot(1, {}, parts, {}), Progress(lambda: 0))
    outcome = pipeline.finish()
    notices = pipeline.take_notices()
    pipeline.close(1.0)
    device.simulated_limit_memory(-1)
    return outcome.kind, notices, bool(torch.equal(read_tensors(directory / "step-00000001")["model.x"], live.cpu()))


def test_memory_that_ends_in_the_midst_of_a_digest_costs_no_save(tmp_path):
    kind, notices, is_equal = run_alone(save_with_failing_digest, tmp_path)
    assert (kind, len(notices), is_equal) == ("committed", 1, True)


# ---- faults


class InStaging(Callback):
    """Sets a fault when the staging of the n-th save begins."""

    def __init__(self, number: int, fault) -> None:
        original, count = stager.SharedStager._stage_from_device, [0]

        def stage(self, *arguments):
            count[0] += 1
            if count[0] == number:
                fault()
            return original(self, *arguments)

        stager.SharedStager._stage_from_device = stage


def fit_with_failing_copy(run_dir: Path) -> dict:
    device = load()
    InStaging(1, lambda: device.simulated_fail_copy(3))
    return train(run_dir, on_save_failure="warn")


def test_a_copy_that_fails_fails_its_save_and_no_other(tmp_path):
    run = run_alone(fit_with_failing_copy, tmp_path)
    check_saved(run, 4)
    assert run["failed"] == 1
    assert "a copy failed" in warned(run, "SaveFailedWarning")[0]


def fit_and_die(run_dir: Path) -> None:
    device = load()
    InStaging(2, lambda: device.simulated_exit_in_copy(3))
    train(run_dir, max_steps=6)


def test_a_process_that_dies_in_a_copy_leaves_the_checkpoint_before_and_goes_on_bit_for_bit(tmp_path):
    with pytest.raises(AssertionError, match="died without a word"):
        run_alone(fit_and_die, tmp_path / "run")
    straight = run_alone(fit, tmp_path / "straight", 0, 0, {"max_steps": 6})
    resumed = run_alone(fit, tmp_path / "run", 0, 0, {"max_steps": 6, "latest": True})
    assert "Restored step 2" in resumed["report"]
    assert straight["end"].keys() == resumed["end"].keys()
    assert all(torch.equal(tensor, resumed["end"][name]) for name, tensor in straight["end"].items())


class LoseDevice(Callback):
    """The device is lost after the third step, and training ends by an error of the user's."""

    def __init__(self, device) -> None:
        self.device = device

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 3:
            self.device.simulated_lose_device()
            raise ZeroDivisionError("the user's own")


class Watched(AsyncProcessCheckpoint):
    """Notes what its hook raises when training ends by an exception, and what it warns of."""

    raised: BaseException | None = None
    texts: tuple[str, ...] = ()

    def on_exception(self, trainer, pl_module, exception) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                super().on_exception(trainer, pl_module, exception)
            except BaseException as error:
                Watched.raised = error
        Watched.texts = tuple(str(one.message) for one in caught)


def fit_and_lose(run_dir: Path, mode: str) -> tuple:
    device = load()
    project.AsyncProcessCheckpoint = Watched
    with pytest.raises(RuntimeError) as error:  # Lightning's own teardown meets the device, too
        train(run_dir, callbacks=(LoseDevice(device),), mode=mode, save_on_exception=True)
    assert isinstance(error.value.__context__, ZeroDivisionError)
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    threads = [path for path in Path("/proc/self/task").iterdir() if "genesis-save" in (path / "comm").read_text()]
    maps = Path("/proc/self/maps").read_text().count("genesis-staging")
    return Watched.raised, Watched.texts, names, len(threads), maps


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_lost_device_does_not_hide_the_error_nor_keep_anything(tmp_path, mode):
    raised, texts, names, num_threads, num_maps = run_alone(fit_and_lose, tmp_path, mode)
    assert raised is None
    assert any("the device is lost" in text for text in texts)
    assert any("Training failed (ZeroDivisionError); the last good one is step-00000002" in text for text in texts)
    assert [name for name in names if name.startswith("step")] == ["step-00000002"]
    assert (num_threads, num_maps) == (0, 0)
    run = run_alone(fit, tmp_path, 0, 0, {"latest": True})  # the lock is free
    assert "Restored step 2" in run["report"]


# ---- several ranks


@pytest.mark.parametrize(
    ("mode", "first_us", "other_us"),
    [
        ("thread", LATE_US, 0),
        pytest.param("process", LATE_US, 0, marks=pytest.mark.slow),
        pytest.param("process", 0, LATE_US, marks=pytest.mark.slow),
    ],
)
def test_several_ranks_with_late_kernels_save_together_what_was_live(tmp_path, mode, first_us, other_us):
    for run in run_ranks(fit, 2, tmp_path, first_us, other_us, {"mode": mode}):
        check_saved(run, 2, 4)
        assert run["failed"] == 0
        assert warned(run, "SlowDeviceWarning") == warned(run, "TornSnapshotWarning") == []


class KillRank(Callback):
    """Kills rank 1 within the fourth step, whose kernels are under way, while the save of step 2 may be."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            kills.die()


def fit_until_a_rank_is_killed(run_dir: Path, mode: str) -> None:
    load(LATE_US, LATE_US)
    train(run_dir, max_steps=6, callbacks=(KillRank(),), mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_after_the_kill_of_a_rank_a_resume_ends_bit_for_bit(tmp_path, mode):
    straight = run_ranks(fit, 2, tmp_path / "straight", 0, 0, {"max_steps": 6, "mode": mode})
    with pytest.raises(AssertionError):
        run_ranks(fit_until_a_rank_is_killed, 2, tmp_path / "run", mode, timeout_seconds=120)
    is_saved = (tmp_path / "run/checkpoints/step-00000002").exists()  # on a busy machine the kill comes before
    resumed = run_ranks(fit, 2, tmp_path / "run", LATE_US, 0, {"max_steps": 6, "latest": True, "mode": mode})
    for one, other in zip(straight, resumed, strict=True):
        assert ("Restored step 2" in (other["report"] or "")) == is_saved
        assert one["end"].keys() == other["end"].keys()
        assert all(torch.equal(tensor, other["end"][name]) for name, tensor in one["end"].items())


# ---- the proof at the start


def break_digests() -> None:
    right = DigestScratch.digest_all
    DigestScratch.digest_all = lambda self, chunks: [digest ^ 1 for digest in right(self, chunks)]


def prove_all() -> list[tuple]:
    device = load()
    slow = []

    def fail(place: torch.device) -> None:
        raise ValueError(f"{place} adds wrongly")

    others = [DeviceProof("sums", "new", "old", fail, slow.append)]
    reports = [prove_device(the_device()), prove_device(the_device(), others)]
    device.simulated_fail_copy(0)
    reports.append(prove_device(the_device()))
    device.simulated_fail_copy(-1)
    break_digests()
    reports.append(prove_device(the_device()))
    found = [(one.environment, [text.partition(": ")[2] for text in one.failures], one.path) for one in reports]
    return [*found, len(slow), [sorted(one.wrong) for one in reports]]


def test_a_proof_that_fails_names_itself_and_its_slow_path_is_taken():
    good, other, copies, digests, slow, wrong = run_alone(prove_all)
    assert wrong == [[], [], [], ["digests"]], "a copy or a proof that raises has no other result"
    name = {"device": "a simulated device", "device.deterministic": "false"}
    assert good == (name | {"device.digests": "device", "device.copies": "pinned"}, [], DevicePath())
    assert other[0] == good[0] | {"device.sums": "old"}
    text = "the proof of sums failed, old instead of new from now on: ValueError: simulated:0 adds wrongly"
    assert (other[1], other[2], slow) == ([text], DevicePath(), 1)
    assert copies[0]["device.digests"] == "host"  # the first copies are the digests'
    assert digests[0]["device.digests"] == "host"
    assert digests[2] == DevicePath(has_digests=False)
    assert "the digest of float64 is " in digests[1][0]


def test_on_the_cpu_nothing_is_proved_and_only_the_threads_are_noted():
    def fail(place: torch.device) -> None:
        raise AssertionError

    report = prove_device(torch.device("cpu"), [DeviceProof("sums", "new", "old", fail)])
    assert report.environment == {"device.threads": str(torch.get_num_threads())}
    assert (report.failures, report.path) == ((), DevicePath())


def fit_with_wrong_digests(run_dir: Path) -> dict:
    load()
    break_digests()
    return train(run_dir)


@pytest.mark.slow
def test_a_device_that_computes_wrong_digests_saves_by_the_host(tmp_path):
    run = run_alone(fit_with_wrong_digests, tmp_path)
    check_saved(run, 2, 4)
    (text,) = warned(run, "SlowDeviceWarning")
    assert "the proof of digests failed, host instead of device from now on" in text
    assert run["saved"][4]["versions"]["device.digests"] == "host"


def fit_twice(run_dir: Path) -> tuple[dict, dict]:
    device = load()
    first = train(run_dir)
    device.simulated_limit_pins(0)
    return first, train(run_dir, max_steps=6, latest=True)


def test_a_path_that_changed_since_the_checkpoint_is_drift_at_a_resume(tmp_path):
    _, resumed = run_alone(fit_twice, tmp_path)
    (text,) = warned(resumed, "DriftWarning")
    assert "device.copies is 'pageable' and was 'pinned'" in text
    assert "device.copies" in resumed["report"]


@pytest.mark.slow
def test_a_run_that_is_killed_twice_is_the_run_that_nobody_killed(tmp_path):
    """`simulated/kills.py` does it fifty times, for a record."""
    kills.rehearse(tmp_path, [kills.Kill("copy", 4, 0.4, (150, 0)), kills.Kill("step", 3, 0.6, (0, 400))])


# ---- the time of steps


class PatientEvent:
    """An event of the device that fails a test whose host waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.Event(device, enable_timing=True)
        self.num_queries = 0

    def record(self) -> None:
        self.event.record()

    def query(self) -> bool:
        return self.event.query()

    def elapsed_time(self, end: "PatientEvent") -> float:
        assert self.query()
        assert end.query()
        return self.event.elapsed_time(end.event)


def time_steps(run_dir: Path, *, has_timer: bool) -> tuple[int, dict]:
    """Returns how often the host waited for a stream in a fit, and what the timer has measured."""
    _step_timeline.build_timer = PatientEvent
    device = load(first_us=2000)
    timer = StepTimer()
    train(run_dir, max_steps=8, every_n_steps=1000, save_at_end=False, callbacks=[timer] if has_timer else [])
    return device.simulated_num_waits(), timer.state_dict()


def test_the_time_of_steps_is_read_late_and_without_a_wait(tmp_path):
    waits, _ = run_alone(functools.partial(time_steps, tmp_path / "without", has_timer=False))
    waits_with_timer, state = run_alone(functools.partial(time_steps, tmp_path / "with", has_timer=True))
    assert waits_with_timer == waits
    assert 1 <= state["num_steps"] <= 7
    assert {"forward", "backward", "optimizer"} <= state["sums_ms"].keys()
    assert sum(state["sums_ms"].values()) > 2.0 * state["num_steps"]
