"""Tensors in files: a save reads them from there, unchanged, while their owner goes on in the other copy."""

import contextlib
import errno
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch

from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    FILE_ALIGNMENT,
    FileMemory,
    FileRoomError,
    Ranks,
    SaveFailedError,
    SaveTarget,
    Snapshot,
    find_file_memory,
    find_latest,
    read_manifest,
    read_tensors,
    restore_shards,
    verify,
)
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.checkpoint.writer_process import WriterProcess

NUM_BYTES = 4 * FILE_ALIGNMENT
NUM_FLOATS = NUM_BYTES // 4


def fill(memory: FileMemory, value: float) -> None:
    """One pass of the owner: all elements get a value."""
    data = torch.full((memory.num_bytes // 4 + FILE_ALIGNMENT,), value)
    skipped = -data.data_ptr() % FILE_ALIGNMENT // 4
    data = data[skipped : skipped + memory.num_bytes // 4]
    with memory.begin_pass() as one:
        one.write(memoryview(data.view(torch.uint8).numpy()), 0)


def moment_of(memory: FileMemory) -> torch.Tensor:
    return memory.bytes.view(torch.float32)


def find_descriptors(directory: Path) -> list[str]:
    """Returns what this process has open in a directory; another test's files may be closed at any time."""
    opened = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(str(path.readlink()))
    return [path for path in opened if path.startswith(f"{directory}/")]


# ---- the memory


def test_memory_reads_and_writes_like_any_other(tmp_path):
    memory = FileMemory(tmp_path, NUM_BYTES - 100)
    assert memory.num_bytes == NUM_BYTES
    assert not memory.bytes.any()
    moment_of(memory).copy_(torch.arange(NUM_FLOATS))
    with memory.begin_pass() as one:  # what was written through the addresses is what a pass reads
        buffer = torch.empty(2 * NUM_BYTES, dtype=torch.uint8)
        skipped = -buffer.data_ptr() % FILE_ALIGNMENT
        one.read(memoryview(buffer[skipped : skipped + NUM_BYTES].numpy()), 0)
    assert torch.equal(buffer[skipped : skipped + NUM_BYTES].view(torch.float32), torch.arange(NUM_FLOATS).float())
    fill(memory, 3.0)
    assert torch.equal(moment_of(memory), torch.full((NUM_FLOATS,), 3.0))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_is_found_by_its_bytes(tmp_path):
    memory, other = FileMemory(tmp_path, NUM_BYTES), FileMemory(tmp_path, NUM_BYTES)
    moment = moment_of(memory)
    for tensor, expected in [
        (moment, (memory, 0)),
        (moment[5:7], (memory, 20)),
        (torch.nn.Parameter(moment).detach()[-1:], (memory, NUM_BYTES - 4)),
        (moment_of(other)[1:], (other, 4)),
    ]:
        found = find_file_memory(tensor)
        assert found is not None
        assert (found[0] is expected[0], found[1]) == (True, expected[1])
    for tensor in (torch.zeros(4), moment.view(2, -1).T, moment[:0], moment.clone()):
        assert find_file_memory(tensor) is None


def test_memory_ends_with_its_last_tensor(tmp_path):
    memory = FileMemory(tmp_path, NUM_BYTES)
    assert find_descriptors(tmp_path)
    tensor, gone = moment_of(memory), weakref.ref(memory)
    tensor.fill_(2.0)
    del memory
    gc.collect()
    assert gone() is None
    assert tensor.sum() == 2 * NUM_FLOATS  # the mapping lives as long as a tensor does
    assert find_file_memory(tensor) is None
    assert not find_descriptors(tmp_path)


def test_a_pass_waits_for_the_older_of_two_holds(tmp_path):
    memory = FileMemory(tmp_path, NUM_BYTES)
    fill(memory, 1.0)
    first = memory.hold()
    fill(memory, 2.0)
    second = memory.hold()
    is_begun, is_over = threading.Event(), threading.Event()

    def go_on() -> None:
        is_begun.set()
        fill(memory, 3.0)
        is_over.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    assert is_begun.wait(60.0)
    assert not is_over.wait(0.2)
    first.release()
    thread.join(60.0)
    assert is_over.is_set()
    assert moment_of(memory)[0] == 3.0
    assert os.pread(second.descriptor, 4, 0) == torch.tensor(2.0).numpy().tobytes()


def test_a_directory_without_room_is_refused(tmp_path):
    with pytest.raises(FileRoomError) as caught:
        FileMemory(tmp_path, 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(FileRoomError, match="No such file"):
        FileMemory(tmp_path / "missing", 1)


# ---- saves


def build_pipeline(run_dir: Path, mode: str) -> SavePipeline:
    directory = run_dir / "checkpoints"
    directory.mkdir(parents=True, exist_ok=True)
    writer = WriterProcess() if mode == "process" else None
    return SavePipeline(SaveTarget(directory, Ranks()), mode=mode, writer=writer)


def snapshot_of(step: int, weight: torch.Tensor, moment: torch.Tensor) -> Snapshot:
    parts = [
        *local_shards("model.weight", weight, "parameter"),
        *local_shards("optimizer.0.weight.exp_avg", moment[:300].view(10, 30), "optimizer"),
        *local_shards("optimizer.0.weight.exp_avg_sq", moment[1024:1324].view(10, 30), "optimizer"),
    ]
    return Snapshot(step, {"step": step}, parts, {"step": step})


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_a_save_holds_what_was_there_when_it_began(tmp_path, mode):
    memory, weight = FileMemory(tmp_path, NUM_BYTES), torch.zeros(7)
    moment = moment_of(memory)
    moment.copy_(torch.arange(NUM_FLOATS))
    pipeline = build_pipeline(tmp_path, mode)
    expected = {}
    try:
        for step in range(1, 5):
            expected[step] = {0: moment[:300].clone(), 1024: moment[1024:1324].clone()}
            pipeline.begin(step, lambda step=step: snapshot_of(step, weight, moment), Progress(lambda: 0))
            pipeline.wait_staged()
            for number in range(3):  # as many steps as the save may last
                fill(memory, 10.0 * step + number)
            outcome = pipeline.finish()
            assert outcome is not None
            assert outcome.kind == "committed", outcome.text
            assert pipeline.staged_bytes == 64  # the weight alone: 28 bytes, aligned
    finally:
        pipeline.close(60.0)
    for step, values in expected.items():
        path = tmp_path / f"checkpoints/step-{step:08d}"
        verify(path, "deep")
        tensors = read_tensors(path, prefix="optimizer.")
        assert torch.equal(tensors["optimizer.0.weight.exp_avg"].view(-1), values[0])
        assert torch.equal(tensors["optimizer.0.weight.exp_avg_sq"].view(-1), values[1024])
    assert memory.begin_pass().__enter__().is_whole is False  # nothing is held any more


def test_a_restore_fills_the_file(tmp_path):
    memory, weight = FileMemory(tmp_path, NUM_BYTES), torch.zeros(7)
    moment_of(memory).copy_(torch.arange(NUM_FLOATS))
    pipeline = build_pipeline(tmp_path, "sync")
    pipeline.begin(1, lambda: snapshot_of(1, weight, moment_of(memory)), Progress(lambda: 0))
    pipeline.finish()
    pipeline.close(0.0)
    path = find_latest(tmp_path / "checkpoints")
    other = FileMemory(tmp_path, NUM_BYTES)
    restore_shards(path, read_manifest(path), snapshot_of(1, weight, moment_of(other)).parts)
    assert torch.equal(moment_of(other)[:300], moment_of(memory)[:300])
    with other.begin_pass() as one:
        page = torch.empty(2 * FILE_ALIGNMENT, dtype=torch.uint8)
        skipped = -page.data_ptr() % FILE_ALIGNMENT
        one.read(memoryview(page[skipped : skipped + FILE_ALIGNMENT].numpy()), 0)
    assert torch.equal(page[skipped:].view(torch.float32)[:300], torch.arange(300).float())


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_a_save_fails_by_name_if_the_disk_does(tmp_path, mode):
    memory, weight = FileMemory(tmp_path, NUM_BYTES), torch.zeros(7)
    held = memory.hold()
    os.ftruncate(held.descriptor, FILE_ALIGNMENT)
    held.release()
    pipeline = build_pipeline(tmp_path, mode)
    try:
        pipeline.begin(1, lambda: snapshot_of(1, weight, moment_of(memory)), Progress(lambda: 0))
        outcome = pipeline.finish()
    finally:
        pipeline.close(60.0)
    assert outcome.kind == "failed"
    assert f"optimizer states in {tmp_path}" in outcome.text
    assert "the file ends at byte 4096" in outcome.text
    assert find_latest(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_bytes_of_an_incomplete_step_are_never_saved(tmp_path, mode):
    memory, weight = FileMemory(tmp_path, NUM_BYTES), torch.zeros(7)
    with pytest.raises(ZeroDivisionError), memory.begin_pass():
        raise ZeroDivisionError("in the middle of an update")
    pipeline = build_pipeline(tmp_path, mode)
    try:
        pipeline.begin(1, lambda: snapshot_of(1, weight, moment_of(memory)), Progress(lambda: 0))
        outcome = pipeline.finish()
    finally:
        pipeline.close(60.0)
    assert outcome.kind == "failed"
    assert "the last step ended within its update (in the middle of an update)" in outcome.text
    assert find_latest(tmp_path / "checkpoints") is None
    with pytest.raises(SaveFailedError, match="the last step"), memory.begin_pass():
        pass


def test_a_byte_that_the_disk_changes_after_the_digest_is_found(tmp_path, monkeypatch):
    memory, weight = FileMemory(tmp_path, NUM_BYTES), torch.zeros(7)
    pipeline = build_pipeline(tmp_path, "thread")
    from genesis_callbacks.checkpoint import pipeline as module  # noqa: PLC0415

    perform = module.perform_niced

    def flip(job, staged):
        moment_of(memory)[7] = 1.0
        return perform(job, staged)

    monkeypatch.setattr(module, "perform_niced", flip)
    try:
        pipeline.begin(1, lambda: snapshot_of(1, weight, moment_of(memory)), Progress(lambda: 0))
        outcome = pipeline.finish()
    finally:
        pipeline.close(60.0)
    assert outcome.kind == "torn"
    assert "optimizer.0.weight.exp_avg" in outcome.text
