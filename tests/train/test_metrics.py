"""Sums of a validation, weighted by tokens, whatever each rank holds of them."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import BYTES, TOKENS, HeadResult, ObjectiveSums
from genesis.train.metrics import SumsOverRanks
from genesis_callbacks.testing import run_ranks


def result(loss_sum: float | torch.Tensor) -> HeadResult:
    return HeadResult({TOKENS: torch.as_tensor(loss_sum)}, {"largest": torch.as_tensor(1.0)})


def measure(sums: SumsOverRanks) -> dict[str, float]:
    return CrossEntropy().measure(ObjectiveSums(*sums.compute()))


@given(st.lists(st.tuples(st.floats(0, 1e4, width=32), st.integers(1, 10_000)), min_size=1, max_size=8))
def test_a_mean_is_the_sum_of_losses_over_the_sum_of_tokens(parts: list[tuple[float, int]]) -> None:
    sums = SumsOverRanks()
    for loss_sum, count in parts:
        sums.update(result(loss_sum), {TOKENS: count, BYTES: 2 * count})
    total, number = math.fsum(part[0] for part in parts), sum(part[1] for part in parts)
    measured = measure(sums)
    assert measured["loss"] == pytest.approx(total / number, rel=1e-12)
    assert measured["bits_per_byte"] == pytest.approx(total / number / 2 / math.log(2), rel=1e-12)
    assert measured["perplexity"] == float(torch.tensor(measured["loss"], dtype=torch.float64).exp())
    assert sums.compute()[1] == {"largest": len(parts)}


def test_sums_do_not_lose_small_parts_to_large_ones() -> None:
    sums = SumsOverRanks()
    for loss_sum in (2.0**24, *[1.0] * 100):
        sums.update(result(loss_sum), {TOKENS: 1, BYTES: 0})
    assert sums.compute()[0] == {TOKENS: 2**24 + 100}
    assert math.isnan(measure(sums)["bits_per_byte"])  # without a tokenizer


def test_after_a_reset_the_past_is_forgotten() -> None:
    sums = SumsOverRanks()
    sums.update(result(3.0), {TOKENS: 2, BYTES: 1})
    sums.reset()
    sums.update(result(8.0), {TOKENS: 2, BYTES: 1})
    assert sums.compute() == ({TOKENS: 8.0}, {"largest": 1.0}, {TOKENS: 2, BYTES: 1})


def test_a_loss_with_a_graph_is_added_without_it() -> None:
    sums = SumsOverRanks()
    for _ in range(2):
        sums.update(result(torch.ones((), requires_grad=True) * 2), {TOKENS: 1, BYTES: 1})
    assert not sums.terms.requires_grad


def _compute_on_rank() -> dict[str, float]:
    rank, sums = dist.get_rank(), SumsOverRanks()
    # Rank 0: 1 token of loss 10; rank 1: 9 tokens of loss 1 each.
    sums.update(result((10.0, 9.0)[rank]), {TOKENS: (1, 9)[rank], BYTES: (4, 16)[rank]})
    return measure(sums)


def test_ranks_with_uneven_tokens_compute_the_global_figures() -> None:
    for measured in run_ranks(_compute_on_rank, 2):
        assert measured["loss"] == pytest.approx(1.9, rel=1e-12)
        assert measured["bits_per_byte"] == pytest.approx(19 / 20 / math.log(2), rel=1e-12)
