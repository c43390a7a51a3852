"""Optimizer states in files: results are those in memory, bit for bit, also while a save holds them, and faults."""

import errno
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from genesis.base.errors import UserError
from genesis.model.decoder import Decoder
from genesis.optim import GroupedOptimizer, OptimizerOptions, build_optimizer
from genesis.optim.piece_memory import DiskRates, OffloadError
from genesis.optim.transfers import Traffic
from genesis.strategies.host_memory import HostOffload, describe_disk
from genesis_callbacks.checkpoint import FileMemory, SaveFailedError, find_file_memory
from genesis_callbacks.testing import run_ranks
from tests.optim.test_offload import CPU, PAGE, build, differences, shard, values
from tests.optim.test_optimizer import ADAMW, MUON, _decoder, _train


def on_disk(
    directory: Path, options: OptimizerOptions = ADAMW, share: float = 1.0, piece_bytes: int = PAGE
) -> tuple[Decoder, GroupedOptimizer, Traffic]:
    model, traffic = _decoder(), Traffic()
    optimizer = build_optimizer(model, options)
    optimizer.offload_states(share, CPU, traffic, piece_bytes=piece_bytes, directory=directory)
    return model, optimizer, traffic


def memory_of(optimizer: GroupedOptimizer) -> FileMemory:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    found = [place[0] for place in map(find_file_memory, tensors) if place is not None]
    assert len(set(map(id, found))) == 1
    return found[0]


def give_gradients(model: Decoder, step: int) -> None:
    _train(model, [], range(step, step + 1))


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize(("share", "piece_bytes"), [(0.3, PAGE), (1.0, PAGE), (1.0, 3 * PAGE), (1.0, 1 << 20)])
def test_updates_are_those_in_memory_bit_for_bit(
    tmp_path: Path, options: OptimizerOptions, share: float, piece_bytes: int
) -> None:
    plain = _decoder()
    optimizer = build_optimizer(plain, options)
    _train(plain, [optimizer], range(4))
    model, offloaded, traffic = on_disk(tmp_path, options, share, piece_bytes)
    _train(model, [offloaded], range(4))
    assert differences(values(plain, optimizer), values(model, offloaded)) == []
    taken = traffic.take()
    assert taken.disk_read_bytes == taken.disk_written_bytes >= taken.to_device_bytes > 0
    assert taken.disk_wait_seconds > 0
    assert list(tmp_path.iterdir()) == []  # files have no names


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_what_a_save_holds_stays_while_training_goes_on(tmp_path: Path, options: OptimizerOptions) -> None:
    plain = _decoder()
    optimizer = build_optimizer(plain, options)
    model, offloaded, _ = on_disk(tmp_path, options)
    memory = memory_of(offloaded)
    for step in range(6):
        held = memory.hold() if step in (1, 3, 4) else None
        expected = bytes(memory.bytes.numpy())
        for one, its in ((plain, optimizer), (model, offloaded)):
            give_gradients(one, step)
            if step == 3:  # parts without a gradient must pass to the other file as well
                one.blocks[0].attention.requires_grad_(False)
                for parameter in one.blocks[0].parameters():
                    parameter.grad = None
            its.step()
            its.zero_grad()
        if held is not None:
            assert os.pread(held.descriptor, memory.num_bytes, 0) == expected
            held.release()
        assert differences(values(plain, optimizer), values(model, offloaded)) == []


def test_values_that_were_restored_in_place_are_updated(tmp_path: Path) -> None:
    plain = _decoder()
    optimizer = build_optimizer(plain, ADAMW)
    _train(plain, [optimizer], range(3))
    model, offloaded, _ = on_disk(tmp_path)
    model.load_state_dict(plain.state_dict())
    names = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[names[name]].items():
            offloaded.state[parameter][key].copy_(value)  # into the mapped file, as a restore does
    for one, its in ((plain, optimizer), (model, offloaded)):
        _train(one, [its], range(3, 5))
    assert differences(values(plain, optimizer), values(model, offloaded)) == []


def shard_on_disk(directory: str, options: OptimizerOptions) -> dict[str, Tensor]:
    return shard(0.7, options, Path(directory))


@pytest.mark.slow
@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_sharded_states_are_those_in_memory(tmp_path: Path, options: OptimizerOptions) -> None:
    plain, moved = run_ranks(shard, 2, 0.0, options), run_ranks(shard_on_disk, 2, str(tmp_path), options)
    assert [differences(one, other) for one, other in zip(plain, moved, strict=True)] == [[], []]


# ---- faults


def refuse_writes(_: FileMemory) -> Callable[[], None]:
    """Lets the kernel refuse all writes to files behind their first page."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, before[1]))

    def undo() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    return undo


def cut_the_file(memory: FileMemory) -> Callable[[], None]:
    held = memory.hold()
    os.ftruncate(held.descriptor, PAGE)
    held.release()
    return lambda: None


@pytest.mark.parametrize(
    ("fault", "text"), [(refuse_writes, os.strerror(errno.EFBIG)), (cut_the_file, "the file ends at byte")]
)
@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_a_disk_that_fails_ends_the_step_and_nothing_is_saved_of_it(
    tmp_path: Path, options: OptimizerOptions, fault: Any, text: str
) -> None:
    model, optimizer, _ = on_disk(tmp_path, options)
    _train(model, [optimizer], range(2))
    memory = memory_of(optimizer)
    give_gradients(model, 2)
    undo = fault(memory)
    try:
        with pytest.raises(OffloadError, match=text) as caught:
            optimizer.step()
    finally:
        undo()
    message = str(caught.value)
    assert message.startswith(f"optimizer_offload_directory {tmp_path}: ")
    assert message.endswith("the run continues from its last checkpoint when the disk works, or with another directory")
    assert "\n" not in message
    with pytest.raises(SaveFailedError, match="the last step ended within its update"):
        memory.hold()
    with pytest.raises(SaveFailedError, match="the last step ended within its update"):
        optimizer.step()


def test_an_interrupt_within_a_step_leaves_nothing_that_could_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, _ = on_disk(tmp_path)
    memory = memory_of(optimizer)
    give_gradients(model, 0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GroupedOptimizer, "_step_slices", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(SaveFailedError, match="KeyboardInterrupt"):
        memory.hold()


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("missing", "does not exist: create it, or give another directory"),
        ("file", "is not a directory: give one, on a local disk"),
        ("full", "(File too large): give a directory on a disk with room, or lower optimizer_offload"),
    ],
)
def test_a_directory_that_cannot_hold_the_states_is_refused_before_the_first_step(
    tmp_path: Path, kind: str, remedy: str
) -> None:
    directory = tmp_path / "states"
    if kind == "file":
        directory.write_text("")
    undo: Callable[[], None] = lambda: None  # noqa: E731
    if kind == "full":
        directory.mkdir()
        undo = refuse_writes(None)  # type: ignore[arg-type]
    try:
        with pytest.raises(UserError) as caught:
            on_disk(directory)
    finally:
        undo()
    assert str(caught.value).startswith(f"optimizer_offload_directory {directory} ")
    assert str(caught.value).endswith(remedy)


def test_a_directory_without_a_share_is_refused() -> None:
    with pytest.raises(UserError, match="optimizer_offload_directory is '/nvme', and optimizer_offload is 0"):
        HostOffload(activations=False, optimizer_share=0.0, optimizer_directory="/nvme")
    with pytest.raises(UserError, match="optimizer_offload_directory is empty"):
        HostOffload(activations=False, optimizer_share=1.0, optimizer_directory=" ")


# ---- what it costs


def test_the_line_at_the_start_has_the_least_time_of_a_step() -> None:
    line = describe_disk(Path("/nvme"), 10 << 30, DiskRates(read=5e9, write=2e9))
    assert "each rank has 10.00 GiB in /nvme, and as much for saves" in line
    assert "at least 5.4 s at 5.00 GB/s read and 2.00 GB/s written" in line  # 10.74 GB by the slower direction
    assert "page cache" in describe_disk(Path("/nvme"), 1, None)
    small = describe_disk(Path("/nvme"), 1 << 20, DiskRates(read=5e9, write=2e9))
    assert "a step reads and writes 1.00 MiB: at least 0.00052 s at" in small


def test_the_disk_is_measured_without_a_change(tmp_path: Path) -> None:
    plain, (model, offloaded, _) = _decoder(), on_disk(tmp_path)
    optimizer = build_optimizer(plain, ADAMW)
    rates = offloaded.disk_rates
    assert rates is None or min(rates.read, rates.write) > 0
    assert (rates is not None) == memory_of(offloaded).is_direct
    assert not values(model, offloaded)["output.weight.exp_avg"].any()
    _train(plain, [optimizer], range(2))
    _train(model, [offloaded], range(2))
    assert differences(values(plain, optimizer), values(model, offloaded)) == []
    assert build(_decoder(), 1.0)[0].disk_rates is None  # in memory


def test_states_that_are_there_before_the_move_are_kept(tmp_path: Path) -> None:
    plain, moved = _decoder(), _decoder()
    optimizer, offloaded = build_optimizer(plain, ADAMW), build_optimizer(moved, ADAMW)
    _train(plain, [optimizer], range(2))
    _train(moved, [offloaded], range(2))
    offloaded.offload_states(1.0, CPU, Traffic(), piece_bytes=PAGE, directory=tmp_path)
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []
    _train(plain, [optimizer], range(2, 3))
    _train(moved, [offloaded], range(2, 3))
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []


def test_the_time_in_which_a_save_holds_both_copies_is_a_wait_for_the_disk(tmp_path: Path) -> None:
    model, optimizer, traffic = on_disk(tmp_path)
    _train(model, [optimizer], range(1))
    held = [memory_of(optimizer).hold()]
    _train(model, [optimizer], range(1, 2))  # writes to the other copy
    held.append(memory_of(optimizer).hold())
    traffic.take()
    timer = threading.Timer(0.5, held[0].release)
    timer.start()
    _train(model, [optimizer], range(2, 3))
    timer.join()
    held[1].release()
    assert traffic.take().disk_wait_seconds > 0.25
