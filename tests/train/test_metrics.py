"""Metrics weighted by tokens, whatever each rank holds of them."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from genesis.train.metrics import BitsPerByte, Perplexity, TokenLoss
from genesis_callbacks.testing import run_ranks


@given(st.lists(st.tuples(st.floats(0, 1e4, width=32), st.integers(1, 10_000)), min_size=1, max_size=8))
def test_a_mean_is_the_sum_of_losses_over_the_sum_of_tokens(parts: list[tuple[float, int]]) -> None:
    loss, perplexity, bits = TokenLoss(), Perplexity(), BitsPerByte()
    for loss_sum, count in parts:
        for metric in (loss, perplexity, bits):
            metric.update(torch.tensor(loss_sum), count)
    total, number = math.fsum(part[0] for part in parts), sum(part[1] for part in parts)
    assert float(loss.compute()) == pytest.approx(total / number, rel=1e-12)
    assert float(bits.compute()) == pytest.approx(total / number / math.log(2), rel=1e-12)
    assert float(perplexity.compute()) == pytest.approx(float(torch.tensor(total / number, dtype=torch.float64).exp()))


def test_sums_do_not_lose_small_parts_to_large_ones() -> None:
    loss = TokenLoss()
    loss.update(torch.tensor(2.0**24), 1)
    for _ in range(100):
        loss.update(torch.tensor(1.0), 1)
    assert float(loss.loss_sum) == 2**24 + 100


def test_after_a_reset_the_past_is_forgotten_and_no_token_is_no_number() -> None:
    loss = TokenLoss()
    loss.update(torch.tensor(3.0), 2)
    loss.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert math.isnan(float(loss.compute()))
    loss.update(torch.tensor(8.0), 2)
    assert float(loss.compute()) == 4.0


def test_a_loss_with_a_graph_is_added_without_it() -> None:
    weight = torch.ones((), requires_grad=True)
    loss = TokenLoss()
    loss.update(weight * 2, 1)
    assert not loss.loss_sum.requires_grad


def _compute_on_rank() -> tuple[float, float]:
    rank = dist.get_rank()
    loss, bits = TokenLoss(), BitsPerByte()
    # Rank 0: 1 token of loss 10; rank 1: 9 tokens of loss 1 each.
    loss.update(torch.tensor((10.0, 9.0)[rank]), (1, 9)[rank])
    bits.update(torch.tensor((10.0, 9.0)[rank]), (4, 16)[rank])
    return float(loss.compute()), float(bits.compute())


def test_ranks_with_uneven_tokens_compute_the_global_figures() -> None:
    for loss, bits in run_ranks(_compute_on_rank, 2):
        assert loss == pytest.approx(1.9, rel=1e-12)
        assert bits == pytest.approx(19 / 20 / math.log(2), rel=1e-12)
