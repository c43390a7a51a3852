"""Rated of `rated.py`: its loss and gradients are those of the definition."""

import torch
from torch.nn.functional import cross_entropy

from genesis.data.loader import VALUES
from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.objectives.objective import BYTES, TOKENS, ObjectiveSums
from genesis.objectives.vocabulary import WHOLE
from tests.extend.rated import Rated


def test_a_conversation_counts_by_its_rating() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.tensor([[1, 2, IGNORE_INDEX, 3, 4, 5]])
    ratings = torch.tensor([[5, 5, -1, 2, 2, 0]], dtype=torch.int32)
    batch = MicroBatch(labels, labels, torch.tensor([[0, 0, 1, 1, 1, 2]], dtype=torch.int32), extra={VALUES: ratings})
    objective = Rated(best=5)
    found = objective.head(batch, WHOLE)(hidden, weight)
    losses = cross_entropy(hidden[0] @ weight.T, labels[0].clamp_min(0), reduction="none")
    expected = (losses * torch.tensor([1.0, 1.0, 0.0, 0.4, 0.4, 0.0])).sum()
    torch.testing.assert_close(found.terms[TOKENS], expected)
    for one, other in zip(
        torch.autograd.grad(found.terms[TOKENS], (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    sums = ObjectiveSums({TOKENS: 4.0}, {"plain": 10.0}, {TOKENS: 5, BYTES: 9})
    assert objective.measure(sums) == {"loss": 0.8, "plain_loss": 2.0}
