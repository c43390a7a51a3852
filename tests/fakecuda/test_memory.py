"""The peak of a step's memory on a GPU, for strategies and precisions: a golden number for each."""

from functools import partial
from typing import Any, Final

import pytest
import torch

from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.loss import sum_cross_entropy
from tests.fakecuda.client import FakeDevice
from tests.fakecuda.combinations import Combination
from tests.fakecuda.memory import CountLiveBytes, LiveBytes
from tests.fakecuda.test_fits import run
from tests.golden.files import read_golden
from tests.operations.plan.measure import measure_allocated_peak

GOLDEN: Final = "fakecuda/peak-memory.txt"
TOLERANCE: Final = 0.01
_CHECKPOINTED: Final = {"activation_checkpointing": "block"}
CASES: Final[dict[str, tuple[Combination, dict[str, Any]]]] = {
    "replicated, bf16-mixed": (Combination(), {}),
    "replicated, 32-true": (Combination(precision="32-true"), {}),
    "replicated, bf16-mixed, activation checkpointing": (Combination(), _CHECKPOINTED),
    "replicated, 32-true, activation checkpointing": (Combination(precision="32-true"), _CHECKPOINTED),
    "sharded, bf16-mixed, 2 ranks": (Combination("full", num_ranks=2), {}),
    "sharded, 32-true, 2 ranks": (Combination("full", "32-true", num_ranks=2), {}),
    "sharded, bf16-mixed, 2 ranks, activation checkpointing": (Combination("full", num_ranks=2), _CHECKPOINTED),
}


def read_numbers(text: str) -> dict[str, int]:
    """Returns the bytes of each case in the golden text."""
    rows = (line.rsplit(": ", 1) for line in text.splitlines())
    return {name: int(count.removesuffix(" bytes").replace(",", "")) for name, count in rows}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.xdist_group("fakecuda")
def test_the_peak_memory_of_a_step_is_the_golden_one(fake_device: FakeDevice) -> None:
    """It fails with the name of each strategy whose step takes over 1% more memory than before."""
    found = {}
    for name, (combination, options) in CASES.items():
        given = {"strategy_options": options} if options else {}  # without, another test asks for the same fit
        result = run(fake_device, combination, shape={"num_layers": 4}, **given)
        found[name] = result["peak_bytes"]
        assert found[name] > sum(count for what, count in result["memory"].items() if what.endswith("cuda")), name
    golden = read_numbers(read_golden(GOLDEN, "".join(f"{name}: {count:,} bytes\n" for name, count in found.items())))
    assert golden.keys() == found.keys()
    grown = list_grown(golden, found)
    assert not grown, f"the peak memory of a step has grown by more than {TOLERANCE:.0%}: {grown}"
    fallen = [name for name, count in found.items() if count < golden[name] * (1 - TOLERANCE)]
    assert not fallen, f"the peak memory of a step has fallen, `make golden` records it: {fallen}"
    for name in ("replicated, bf16-mixed", "replicated, 32-true", "sharded, bf16-mixed, 2 ranks"):
        assert found[f"{name}, activation checkpointing"] < found[name], name


def list_grown(golden: dict[str, int], found: dict[str, int]) -> list[str]:
    return [
        f"{name}: {golden[name]:,} to {count:,} bytes"
        for name, count in found.items()
        if count > golden[name] * (1 + TOLERANCE)
    ]


def test_a_case_that_takes_more_than_a_hundredth_more_is_named() -> None:
    golden = {"replicated": 100_000, "sharded": 100_000}
    assert list_grown(golden, {"replicated": 101_000, "sharded": 101_001}) == ["sharded: 100,000 to 101,001 bytes"]
    assert read_numbers("sharded, 2 ranks: 101,001 bytes\n") == {"sharded, 2 ranks": 101_001}


def train_a_step(decoder: Decoder, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    decoder(ids, head=lambda hidden, weight: sum_cross_entropy(hidden, weight, ids)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_peak_of_live_tensors_is_that_of_the_allocator() -> None:
    """On the CPU, where an independent count exists."""
    torch.manual_seed(1)
    config = DecoderConfig(
        dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=192, max_seq_len=96, vocab_size=512
    )
    decoder = Decoder(config)
    decoder.init_weights(0)
    optimizer = torch.optim.AdamW(decoder.parameters())
    ids = torch.randint(config.vocab_size, (4, config.max_seq_len))
    train_a_step(decoder, optimizer, ids)
    by_allocator = measure_allocated_peak(partial(train_a_step, decoder, optimizer, ids))
    live = LiveBytes("cpu", rounded_to=1)
    live.note([ids, *decoder.state_dict().values(), [list(state.values()) for state in optimizer.state.values()]])
    before = live.now
    with CountLiveBytes(live):
        train_a_step(decoder, optimizer, ids)
    assert live.peak - before == pytest.approx(by_allocator, rel=0.02)


def test_bytes_are_counted_once_for_all_views_and_no_longer_than_they_live() -> None:
    live = LiveBytes("cpu")
    with CountLiveBytes(live):
        first = torch.zeros(1000)
        view = first[10:].view(-1, 10)
        assert live.now == 4096  # in multiples of 512
        second = first + 1
        assert live.now == 8192
        del second, first
        assert (live.now, live.peak) == (4096, 8192), "the view keeps its storage"
        live.reset_peak()
        view.untyped_storage().resize_(8000)
        live.note_storage(view.untyped_storage(), is_known=True)
        assert (live.now, live.peak) == (8192, 8192)
        del view
    assert live.now == 0
