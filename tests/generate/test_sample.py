"""Which tokens are drawn: by exact shares, the same alone and in any batch, whatever the other rows' options are."""

import math
import random

import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.generate.sample import RowSampler
from genesis.generate.sampling_options import SamplingOptions

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 2.0, -30.0])
GREEDY = SamplingOptions(temperature=0.0)
VARIED = [
    GREEDY,
    SamplingOptions(),
    SamplingOptions(0.7),
    SamplingOptions(1.3, 20),
    SamplingOptions(0.9, None, 0.8),
    SamplingOptions(2.0, 300, 0.95),
    SamplingOptions(1.0, 1),
    SamplingOptions(1.0, None, 1e-6),
    SamplingOptions(0.8, min_p=0.3),
    SamplingOptions(1.2, 3, 0.9, min_p=0.2),
]


def draw(logits: Tensor, options: list[SamplingOptions] | SamplingOptions, uniforms: list[float]) -> list[int]:
    """Draws for each uniform number, from the same logits if there is but one row of them."""
    if isinstance(options, SamplingOptions):
        options = [options] * len(uniforms)
    rows = logits.expand(len(uniforms), -1) if logits.ndim == 1 else logits
    sampler = RowSampler(options, rows.shape[1], CPU)
    tokens: list[int] = sampler.draw(rows, torch.tensor(uniforms, dtype=torch.float64)).tolist()
    return tokens


def spread(number: int) -> list[float]:
    """Returns numbers that stand for as many equal parts of the interval from 0 to 1."""
    return [(index + 0.5) / number for index in range(number)]


def slow_probabilities(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Walks down the tokens from the most likely."""
    weights = [torch.exp((logit.double() - logits.max().double()) / options.temperature).item() for logit in logits]
    weights = [weight if weight >= options.min_p else 0.0 for weight in weights]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: options.top_k]
    kept_total = sum(weights[token] for token in ranked)
    probs, reached = [0.0] * len(weights), 0.0
    for token in ranked:
        if reached >= options.top_p * kept_total:
            break
        probs[token] = weights[token]
        reached += weights[token]
    return torch.tensor([prob / sum(probs) for prob in probs], dtype=torch.float64)


def count(tokens: list[int], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=vocab_size).double()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 0.01])
def test_each_token_has_the_share_of_the_slow_probabilities(
    temperature: float, top_k: int | None, top_p: float
) -> None:
    options, number = SamplingOptions(temperature, top_k, top_p), 20_000
    shares = count(draw(LOGITS, options, spread(number)), len(LOGITS)) / number
    # Equal parts: each share is right up to one part at either end.
    torch.testing.assert_close(shares, slow_probabilities(LOGITS, options), rtol=0, atol=2 / number)


@pytest.mark.parametrize("options", VARIED[1:])
def test_draws_of_a_seed_pass_a_chi_square_test(options: SamplingOptions) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 2
    generator, number = torch.Generator().manual_seed(2), 10_000
    uniforms = torch.rand(number, dtype=torch.float64, generator=generator).tolist()
    counts = count(draw(logits, options, uniforms), len(logits))
    expected = slow_probabilities(logits, options) * number
    assert counts[expected == 0].sum() == 0
    is_common = expected >= 5
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    wanted = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    statistic = float(((observed - wanted).square() / wanted).sum())
    # Wilson and Hilferty: the cube root is nearly normal; 4 deviations are passed by chance once in 30,000.
    assert degrees == 0 or (statistic / degrees) ** (1 / 3) < 1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 1000, 65_537])
def test_a_row_draws_alone_what_it_draws_in_any_batch(vocab_size: int) -> None:
    chooser = random.Random(vocab_size)
    num_rows = 24 if vocab_size < 2000 else 6
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 3
    options = [chooser.choice(VARIED) for _ in range(num_rows)]
    uniforms = [chooser.random() for _ in range(num_rows)]
    together = draw(logits, options, uniforms)
    order = random.Random(5).sample(range(num_rows), num_rows)
    mixed = draw(logits[order], [options[row] for row in order], [uniforms[row] for row in order])
    assert mixed == [together[row] for row in order]
    for row in range(num_rows):
        assert draw(logits[row : row + 1], [options[row]], [uniforms[row]]) == together[row : row + 1]


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    assert draw(LOGITS, GREEDY, [0.9]) == [1]
    many = torch.zeros(50_000)
    many[[7, 49_999, 30_000]] = 1.0
    assert draw(many, GREEDY, [0.9]) == [7]
    assert draw(many[7:].flip(0), GREEDY, [0.9]) == [0]


def test_of_equal_tokens_top_k_keeps_the_lower_ids() -> None:
    level = torch.zeros(1000)
    assert set(draw(level, SamplingOptions(top_k=3), spread(300))) == {0, 1, 2}
    assert set(draw(level, SamplingOptions(top_p=0.0049), spread(300))) == {0, 1, 2, 3, 4}
    assert set(draw(level, SamplingOptions(top_p=0.005), spread(300))) == {0, 1, 2, 3, 4}
    assert set(draw(level, SamplingOptions(top_k=10, top_p=0.25), spread(300))) == {0, 1, 2}


def test_a_token_at_minus_infinity_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for options in (SamplingOptions(), SamplingOptions(top_k=4), SamplingOptions(top_p=0.999), SamplingOptions(5.0, 5)):
        drawn = draw(logits, options, [0.0, *spread(100), 1 - 2**-53])
        assert count(drawn, 5).tolist() == [0.0, 51.0, 0.0, 51.0, 0.0]
    assert draw(logits, GREEDY, [0.0]) == [1]


@pytest.mark.parametrize("options", VARIED)
def test_the_ends_of_the_interval_draw_tokens_of_the_vocabulary(options: SamplingOptions) -> None:
    for vocab_size in (1, 3, 65_536):
        logits = torch.linspace(-5, 5, vocab_size)
        drawn = draw(logits, options, [0.0, 1 - 2**-53])
        assert all(0 <= token < vocab_size for token in drawn)
    assert draw(torch.zeros(4), SamplingOptions(), [0.0, 1 - 2**-53]) == [0, 3]
    assert draw(torch.tensor([0.0, 0.0, -100.0]), SamplingOptions(), [1 - 2**-53]) == [1]


def test_more_than_the_vocabulary_is_the_whole_of_it() -> None:
    whole = count(draw(LOGITS, SamplingOptions(1.5), spread(500)), 6)
    for top_k in (6, 7, 2**31 - 1):
        ranked = count(draw(LOGITS, SamplingOptions(1.5, top_k), spread(500)), 6)
        torch.testing.assert_close(ranked, whole, rtol=0, atol=1)  # in another order, of which parts may end elsewhere


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("options", VARIED)
def test_a_row_without_numbers_leaves_the_others_as_they_are(options: SamplingOptions, wrong: float) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(6))
    wanted = draw(logits, options, [0.2, 0.5, 0.8])
    logits[1, 17] = wrong
    found = draw(logits, options, [0.2, 0.5, 0.8])
    assert found[::2] == wanted[::2]
    assert 0 <= found[1] < 200
    logits[1] = wrong
    assert draw(logits, options, [0.2, 0.5, 0.8])[::2] == wanted[::2]


def test_nothing_is_drawn_where_every_row_is_greedy() -> None:
    sampler = RowSampler([GREEDY, GREEDY], 6, CPU)
    assert not sampler.needs_uniforms
    assert sampler.draw(LOGITS.expand(2, -1), None).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_takes_the_most_likely_token(temperature: float) -> None:
    logits = LOGITS - torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    assert draw(logits, SamplingOptions(temperature), spread(5)) == [1] * 5
    assert draw(logits, SamplingOptions(temperature, 3, 0.9), spread(5)) == [1] * 5


def test_a_huge_temperature_makes_all_tokens_alike() -> None:
    assert count(draw(LOGITS, SamplingOptions(1e30), spread(600)), 6).tolist() == [100.0] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        SamplingOptions(**options)  # type: ignore[arg-type]
