"""What saves leave behind in the process that made them: nothing, counted over hundreds; and what they do without."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_background import committed, find_writers, list_descriptors
from test_fault_drills import mount, wait_until

from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import Ranks, Retention, SaveTarget, Snapshot, find_latest, read_tensors, verify
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.testing import run_ranks

NUM_SAVES = 300
WARM_UP_SAVES = 30


def list_children() -> list[int]:
    """Returns the process ids of this process's children; a thread that ends meanwhile leaves its own to another."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            tasks = Path("/proc/self/task").iterdir()
            return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def count_everything() -> dict[str, int]:
    """Counts what this process holds."""
    return {
        "descriptors": len(list_descriptors()),
        "maps": Path("/proc/self/maps").read_text().count("genesis-staging"),
        "children": len(list_children()),
        "threads": threading.active_count(),
        "named shared memory": Path("/proc/self/maps").read_text().count("/dev/shm/"),
    }


def resident_bytes(pid: int | str = "self") -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def build_pipeline(directory: Path, mode: str) -> SavePipeline:
    target = SaveTarget(directory, Ranks(), retention=Retention(keep_last=2))
    writer = WriterProcess() if mode == "process" else None
    return SavePipeline(target, mode=mode, writer=writer, staging="overlapped", time_limit_seconds=60.0)


def save(pipeline: SavePipeline, step: int, tensors: dict[str, torch.Tensor]) -> None:
    parts = [part for name, tensor in tensors.items() for part in local_shards(name, tensor, "parameter")]
    pipeline.begin(step, lambda: Snapshot(step, {}, parts, {}), Progress(lambda: 0))
    outcome = pipeline.finish()
    assert outcome.kind == "committed", outcome.text


def save_three_hundred_times(directory: Path, mode: str) -> dict[str, object]:
    before = count_everything()
    pipeline = build_pipeline(directory, mode)
    live = torch.zeros(2_000)
    during, resident, writer_resident = {}, {}, {}
    for step in range(1, NUM_SAVES + 1):
        live += 1
        save(pipeline, step, {"model.x": live, "model.y": torch.zeros(step % 7 + 1)})
        if step in (WARM_UP_SAVES, NUM_SAVES):
            wait_until(lambda: "genesis-write" not in {thread.name for thread in threading.enumerate()})
            during[step], resident[step] = count_everything(), resident_bytes()
            writer_resident[step] = [resident_bytes(child) for child in list_children()]
    pipeline.close(0.0)
    wait_until(lambda: threading.active_count() == before["threads"])
    return {
        "before": before,
        "during": [during[WARM_UP_SAVES], during[NUM_SAVES]],
        "after": count_everything(),
        "growth": resident[NUM_SAVES] - resident[WARM_UP_SAVES],
        "writer growth": sum(writer_resident[NUM_SAVES]) - sum(writer_resident[WARM_UP_SAVES]),
    }


@pytest.mark.usefixtures("started_writers")
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.slow
def test_three_hundred_saves_leak_nothing(memory_path, mode):
    (memory_path / "checkpoints").mkdir()
    (counted,) = run_ranks(save_three_hundred_times, 1, memory_path / "checkpoints", mode)
    first, last = counted["during"]
    assert first == last
    assert counted["after"] == counted["before"]
    assert counted["growth"] < 4 << 20
    assert counted["writer growth"] < 4 << 20
    assert committed(memory_path) == ["step-00000299", "step-00000300"]


def kill_writers(directory: Path, num_kills: int) -> tuple[dict[str, int], dict[str, int]]:
    """Counts what is held after one killed writer, and after several."""
    counts = []
    pipeline = build_pipeline(directory, "process")
    for step in range(1, num_kills + 1):
        pipeline.wait_ready()
        (writer,) = find_writers()
        os.kill(writer, signal.SIGKILL)
        parts = local_shards("model.x", torch.ones(9), "parameter")
        pipeline.begin(step, lambda parts=parts, step=step: Snapshot(step, {}, parts, {}), Progress(lambda: 0))
        # Whether the death was seen before the save was handed over is a matter of microseconds.
        assert pipeline.finish().kind in ("failed", "committed")
        counts.append(count_everything())
    pipeline.close(0.0)
    return counts[0], counts[-1]


def test_killed_writers_leak_nothing(tmp_path):
    ((first, last),) = run_ranks(kill_writers, 1, tmp_path, 2)
    assert first == last


NUM_TENSORS = 600
SHARED_MEMORY_BYTES = 64 << 20


def save_with_little(directory: Path) -> bool:
    """Saves 600 tensors of 80 MB with few descriptors and a small /dev/shm; returns whether that was really small."""
    is_small = mount("-t", "tmpfs", "-o", f"size={SHARED_MEMORY_BYTES}", "none", "/dev/shm")
    limit = len(list_descriptors()) + 64
    assert limit < NUM_TENSORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    num_elements = 80_000_000 // NUM_TENSORS // 4
    tensors = {f"model.{number}": torch.full((num_elements,), float(number)) for number in range(NUM_TENSORS)}
    assert sum(tensor.nbytes for tensor in tensors.values()) > SHARED_MEMORY_BYTES
    pipeline = build_pipeline(directory, "process")
    for step in (1, 2):
        save(pipeline, step, tensors)
        assert not is_small or not list(Path("/dev/shm").iterdir())
        assert count_everything()["named shared memory"] == 0
    pipeline.close(0.0)
    path = find_latest(directory)
    assert verify(path, "deep").step == 2
    assert all(torch.equal(tensors[name], tensor) for name, tensor in read_tensors(path).items())
    return is_small


@pytest.mark.slow
def test_many_tensors_need_few_descriptors_and_no_shared_memory_that_has_a_name(tmp_path):
    (is_small,) = run_ranks(save_with_little, 1, tmp_path, timeout_seconds=280.0)  # 160 MB go to the disk
    if not is_small:
        pytest.skip("saved with few descriptors; mounting a small /dev/shm is not allowed here")


def save_with_many_descriptors(directory: Path) -> None:
    """Saves with more files open than `select` can count."""
    limit = 1_500
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1_100)]
    pipeline = build_pipeline(directory, "process")
    writers = find_writers()
    save(pipeline, 1, {"model.x": torch.ones(9)})
    assert find_writers() == writers  # none has died and been started again
    pipeline.close(0.0)
    for descriptor in held:
        os.close(descriptor)


def test_a_trainer_with_a_thousand_open_files_saves(tmp_path):
    run_ranks(save_with_many_descriptors, 1, tmp_path)
    assert verify(find_latest(tmp_path), "deep").step == 1


def end_with_a_copy_of_the_channel_held(directory: Path) -> float:
    """Returns how long a writer takes to end while a forked child, as a loader's worker is, holds its channel open."""
    pipeline = build_pipeline(directory, "process")
    save(pipeline, 1, {"model.x": torch.ones(9)})
    child = os.fork()
    if child == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    begin_seconds = time.monotonic()
    process = pipeline._writer._process
    pipeline.close(0.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert process.returncode == 0  # it ended by itself
    return time.monotonic() - begin_seconds


def test_a_writer_ends_although_a_forked_child_holds_its_channel(tmp_path):
    run_ranks(end_with_a_copy_of_the_channel_held, 1, tmp_path)


def start_among_strangers(directory: Path) -> None:
    os.chdir(directory)
    WriterProcess().wait_ready()


@pytest.mark.usefixtures("started_writers")
def test_a_working_directory_gives_the_writer_no_code(tmp_path):
    """A run's directory from a stranger may hold files named like modules."""
    for name in ("blake3", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text("open('proof', 'w').close()\nraise ImportError\n")
    run_ranks(start_among_strangers, 1, tmp_path)
    assert not (tmp_path / "proof").exists()
    subprocess.run([sys.executable, "-c", "import torch"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert (tmp_path / "proof").exists()  # the plant does work, where somebody imports it
