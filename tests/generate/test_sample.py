"""Which tokens may be drawn."""

import pytest
import torch

from genesis.errors import UserError
from genesis.generate.sample import SamplingOptions, sample_token, token_probabilities

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 2.0, -30.0])


def slow_probabilities(logits, options):
    """Walks down the tokens from the most likely."""
    weights = [torch.exp(logit.double() / options.temperature).item() for logit in logits]
    total = sum(weights)
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: options.top_k]
    kept_total = sum(weights[token] for token in ranked)
    probs, reached = [0.0] * len(weights), 0.0
    for token in ranked:
        if reached >= options.top_p * kept_total:
            break
        probs[token] = weights[token]
        reached += weights[token]
    assert total >= reached
    return torch.tensor([prob / sum(probs) for prob in probs])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 0.01])
def test_probabilities_equal_the_slow_ones(temperature, top_k, top_p):
    options = SamplingOptions(temperature, top_k, top_p)
    ours = token_probabilities(LOGITS, options)
    assert torch.allclose(ours, slow_probabilities(LOGITS, options).float(), atol=1e-6)


def test_temperature_zero_takes_the_first_of_the_most_likely():
    probs = token_probabilities(LOGITS, SamplingOptions(temperature=0.0))
    assert probs.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_draws_follow_the_probabilities():
    options, generator = SamplingOptions(temperature=1.5, top_k=4), torch.Generator().manual_seed(0)
    draws = torch.tensor([sample_token(LOGITS, options, generator) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=6) / len(draws)
    assert (shares - token_probabilities(LOGITS, options)).abs().max() < 0.03


def test_the_same_seed_draws_the_same():
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return [sample_token(LOGITS, SamplingOptions(), generator) for _ in range(50)]

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_an_option_out_of_range_is_refused_by_name(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SamplingOptions(**options)


def test_a_tiny_temperature_takes_the_most_likely_token():
    probs = token_probabilities(LOGITS - torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0]), SamplingOptions(1e-40))
    assert probs.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
