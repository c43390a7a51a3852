"""Offload on the simulated device, whose streams are late: the results are those without offload, bit for bit."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from genesis.model.decoder import Decoder
from genesis.optim import OptimizerOptions, build_optimizer
from genesis.optim.piece_memory import _DiskPassage
from genesis.optim.transfers import CopyLane, PinWarning, Traffic
from genesis.strategies.activation_offload import ActivationOffload
from genesis.strategies.wrap import apply_wrappers
from genesis_callbacks.testing import run_ranks
from tests.fakecuda.compiler import find_compiler
from tests.train.support import TINY

SHAPE = replace(TINY, num_layers=4)
PAGE = 4096
LATE_US = 1500


def load_device() -> Any:
    """Loads the simulated device into this process."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "callbacks" / "tests"))
    import simulated  # noqa: PLC0415  # it lies outside of this package, and only ranks may load it

    return simulated.load()


def train(
    traffic: Traffic | None, name: Literal["adamw", "muon"] = "adamw", directory: Path | None = None
) -> dict[str, Tensor]:
    """Returns parameters and moments after three steps, with traffic everything on the host that can be there."""
    device = torch.device("simulated", 0)
    decoder = Decoder(SHAPE)
    decoder.init_weights(0)
    decoder.to(device)
    apply_wrappers(decoder, "block", offload=None if traffic is None else ActivationOffload(traffic))
    optimizer = build_optimizer(decoder, OptimizerOptions(name=name, lr=1e-2))
    if traffic is not None:
        optimizer.offload_states(1.0, device, traffic, piece_bytes=4 * PAGE, directory=directory)
    for step in range(3):
        ids = (torch.arange(16) * (step + 3) % 61)[None].to(device)
        optimizer.zero_grad()
        decoder(ids).float().logsumexp(-1).mean().backward()
        optimizer.step()
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    found = {name: parameter.detach().to("cpu") for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        # Not a copy that would wait for the device: what a save reads when the step has ended.
        found |= {f"{names[parameter]}.{key}": value.to("cpu").clone() for key, value in state.items()}
    return found


def compare(
    first_us: int,
    other_us: int,
    fault: str,
    name: Literal["adamw", "muon"] = "adamw",
    directory: Path | None = None,
) -> tuple[list[str], dict[str, float]]:
    library = load_device()
    expected = train(None, name)
    library.simulated_set_delays(first_us, other_us)
    if fault == "no wait of the device":
        Traffic.wait_for = lambda self, mark, device: None  # type: ignore[method-assign]
    elif fault == "copies wait for nothing":
        copy = CopyLane._copy
        CopyLane._copy = lambda self, target, source, after: copy(self, target, source, None)  # type: ignore[method-assign]
    elif fault == "the disk waits for nothing":
        leave = _DiskPassage.leave
        _DiskPassage.leave = lambda self, number, mark: leave(self, number, None)  # type: ignore[method-assign]
    elif fault == "no pins":
        library.simulated_limit_pins(0)
    traffic = Traffic()
    found = train(traffic, name, directory)
    pinned = float(library.simulated_pinned_bytes())
    moved = traffic.take()
    wrong = [key for key, tensor in expected.items() if not torch.equal(tensor, found[key])]
    return wrong, {
        "pinned": pinned,
        "to_device": moved.to_device_bytes,
        "to_host": moved.to_host_bytes,
        "idle": moved.idle_seconds,
    }


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    find_compiler()


def late(first_us: int, other_us: int, fault: str = "") -> tuple[list[str], dict[str, float]]:
    ((wrong, figures),) = run_ranks(compare, 1, first_us, other_us, fault)
    return wrong, figures


@pytest.mark.parametrize(("first_us", "other_us"), [(0, LATE_US), pytest.param(300, 0, marks=pytest.mark.slow)])
def test_results_are_those_without_offload_whichever_stream_is_late(first_us: int, other_us: int) -> None:
    wrong, figures = late(first_us, other_us)
    assert wrong == []
    assert figures["pinned"] > 0
    assert figures["to_host"] > figures["to_device"] > 0  # the last input of a forward stays
    assert figures["idle"] > 0 or not other_us


@pytest.mark.slow
def test_muons_states_are_those_without_offload_with_a_late_stream() -> None:
    ((wrong, figures),) = run_ranks(compare, 1, 0, LATE_US, "", "muon")
    assert wrong == []
    assert figures["to_device"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_on_a_disk_are_those_without_offload_with_a_late_stream(
    tmp_path: Path, name: Literal["adamw", "muon"]
) -> None:
    ((wrong, figures),) = run_ranks(compare, 1, 0, LATE_US, "", name, tmp_path)
    assert wrong == []
    assert figures["pinned"] > 0
    assert figures["to_device"] > 0


@pytest.mark.slow
def test_a_disk_that_waits_for_no_copy_would_show(tmp_path: Path) -> None:
    ((wrong, _),) = run_ranks(compare, 1, 0, LATE_US, "the disk waits for nothing", "adamw", tmp_path)
    assert wrong


@pytest.mark.parametrize(
    "fault", ["no wait of the device", pytest.param("copies wait for nothing", marks=pytest.mark.slow)]
)
def test_a_missing_wait_would_show(fault: str) -> None:
    # Late enough that a busy machine is not later still.
    first_us, other_us = (0, 5 * LATE_US) if fault == "no wait of the device" else (5 * LATE_US, 0)
    wrong, _ = late(first_us, other_us, fault)
    assert wrong


@pytest.mark.slow
def test_memory_that_the_driver_does_not_lock_is_a_warning_and_changes_nothing() -> None:
    wrong, figures = run_ranks(without_pins, 1)[0]
    assert wrong == []
    assert figures["pinned"] == 0


def without_pins() -> tuple[list[str], dict[str, float]]:
    with pytest.warns(PinWarning, match="bytes of host memory are not page-locked"):
        return compare(0, LATE_US, "no pins")


def pin_inputs(widths: Sequence[int]) -> int:
    """Returns the bytes that are page-locked after windows of some widths."""
    library = load_device()
    device = torch.device("simulated", 0)
    decoder = Decoder(SHAPE)
    decoder.init_weights(0)
    decoder.to(device)
    apply_wrappers(decoder, "block", offload=ActivationOffload(Traffic()))
    for width in widths:
        ids = (torch.arange(width) % 61)[None].to(device)
        decoder(ids).float().logsumexp(-1).mean().backward()
    return int(library.simulated_pinned_bytes())


@pytest.mark.slow
def test_windows_of_many_widths_lock_no_more_memory_than_the_widest() -> None:
    (widest,) = run_ranks(pin_inputs, 1, [32])
    (mixed,) = run_ranks(pin_inputs, 1, [8, 16, 12, 32, 4, 24, 32, 20])
    assert 0 < mixed <= widest
