"""Reward models: loss, gradients and figures equal a slow reference, whatever the layout of the answers."""

from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.pair_windows import ENDS, build_pair_window
from genesis.data.pairs import Pair
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.recipe import build_decoder_config, dump_decoder_config
from genesis.model.scores import score_text
from genesis.objectives import DPO, RewardModel
from genesis.objectives.objective import ObjectiveSums
from genesis.objectives.run_options import RunOptions
from genesis.objectives.vocabulary import WHOLE
from tests.objectives.support import FORMAT, make_pairs
from tests.train.support import TINY

SCORER = replace(TINY, num_scores=1)
MARGINS = (0, 3, 1, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"margin_scale": 0.0},
    "margins": {},
    "centred": {"center_rewards_coefficient": 0.3, "margin_scale": 0.5},
}


def make_scorer(seed: int = 0) -> Decoder:
    decoder = Decoder(SCORER)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return decoder


def make_rated_pairs() -> list[Pair]:
    return [pair._replace(value=margin) for pair, margin in zip(make_pairs(4), MARGINS, strict=True)]


def slow_score(decoder: Decoder, tokens: Any) -> Tensor:
    """The score of a text, computed from it alone."""
    hidden = decoder(torch.from_numpy(tokens)[None], head=lambda hidden, weight: hidden)
    return (hidden[0, -1] * decoder.output.weight[0]).sum()


def slow_loss(decoder: Decoder, pairs: list[Pair], options: dict[str, Any]) -> Tensor:
    """The loss of all pairs as the papers write it, pair by pair."""
    losses = []
    for pair in pairs:
        chosen, rejected = (slow_score(decoder, answer.tokens) for answer in (pair.chosen, pair.rejected))
        margin = options.get("margin_scale", 1.0) * pair.value
        loss = -torch.log(torch.sigmoid(chosen - rejected - margin))
        losses.append(loss + options.get("center_rewards_coefficient", 0.0) * (chosen + rejected) ** 2)
    return torch.stack(losses).mean()


def step(
    objective: RewardModel, decoder: Decoder, pairs: list[Pair], micro_batch_size: int, *, is_padded: bool, missing: int
) -> tuple[Tensor, dict[str, float]]:
    """Returns the loss of a window without a strategy, and what is logged."""
    given = [*pairs, *[None] * missing]
    window = build_pair_window(given, FORMAT, micro_batch_size, 4, is_padded=is_padded, has_ends=True)
    counts = objective.count(window)
    sums, losses = ObjectiveSums(counts=counts), []
    for micro_batch in window.micro_batches:
        result = decoder(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            document_offsets=micro_batch.document_offsets,
            head=objective.head(micro_batch, WHOLE),
        )
        losses += [value / counts[unit] for unit, value in result.terms.items()]
        sums = sums + ObjectiveSums(
            *({name: float(value.detach()) for name, value in of_one.items()} for of_one in result)
        )
    return reduce(add, losses), objective.measure(sums)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("micro_batch_size", "is_padded", "missing"), [(4, False, 0), (2, False, 2), (2, True, 0), (3, True, 2)]
)
def test_loss_and_gradients_equal_the_slow_reference(
    name: str, micro_batch_size: int, is_padded: bool, missing: int
) -> None:
    pairs, decoder, twin = make_rated_pairs(), make_scorer(), make_scorer().double()
    wanted = slow_loss(twin, pairs, OPTIONS[name])
    wanted.backward()
    loss, logged = step(
        *(RewardModel(**OPTIONS[name]), decoder, pairs, micro_batch_size), is_padded=is_padded, missing=missing
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
    assert logged["loss"] == pytest.approx(float(wanted.detach()), abs=1e-5)
    due = dict(twin.named_parameters())
    for parameter_name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), due[parameter_name].grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        scores = torch.stack(
            [slow_score(twin, answer.tokens) for pair in pairs for answer in (pair.chosen, pair.rejected)]
        ).view(-1, 2)
    differences = scores[:, 0] - scores[:, 1]
    assert logged["rewards_chosen"] == pytest.approx(float(scores[:, 0].mean()), abs=1e-5)
    assert logged["rewards_rejected"] == pytest.approx(float(scores[:, 1].mean()), abs=1e-5)
    assert logged["reward_margin"] == pytest.approx(float(differences.mean()), abs=1e-5)
    assert logged["reward_accuracy"] == float((differences > 0).double().mean())


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_last_token_of_an_answer_is_read_and_is_the_place_of_its_score(is_padded: bool) -> None:
    pairs = make_pairs(3)
    window = build_pair_window([*pairs, None], FORMAT, 4, 4, is_padded=is_padded, has_ends=True)
    (micro_batch,) = window.micro_batches
    ends = micro_batch.extra[ENDS]
    tokens = micro_batch.input_ids.flatten()[ends].tolist()
    assert tokens[:6] == [int(answer.tokens[-1]) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    assert ends[6:].tolist() == [0, 0]  # of a pair that a validation set lacks
    plain = build_pair_window([*pairs, None], FORMAT, 4, 4, is_padded=is_padded)
    assert window.num_valid_tokens == plain.num_valid_tokens  # a label is the next token, as everywhere


def test_the_score_of_a_text_does_not_depend_on_its_neighbours() -> None:
    decoder, tokens = make_scorer().eval(), np.arange(1, 9)
    assert score_text(decoder, tokens.tolist()) == pytest.approx(float(slow_score(decoder, tokens).detach()), abs=1e-6)
    assert score_text(decoder, [5]) == pytest.approx(float(slow_score(decoder, np.array([5])).detach()), abs=1e-6)


def test_a_reward_model_has_one_score_and_never_a_tied_one() -> None:
    config = DecoderConfig(dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, max_seq_len=8, num_scores=1)
    assert not config.has_tied_embeddings
    assert build_decoder_config(dump_decoder_config(config), "the recipe") == config
    assert "num_scores" not in dump_decoder_config(TINY)
    assert Decoder(config).output.weight.shape == (1, 32)
    with pytest.raises(UserError, match="num_scores is 2: it must be 1, or null"):
        replace(TINY, num_scores=2)


@pytest.mark.parametrize(
    ("decoder", "objective", "line"),
    [
        (TINY, RewardModel, "RewardModel trains a model that scores texts, and this one writes them: start from"),
        (SCORER, DPO, r"the model scores texts \(model\.decoder\.num_scores\), and DPO trains one that writes them"),
    ],
)
def test_a_model_that_writes_and_one_that_scores_are_not_confused(decoder: Any, objective: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        RunOptions(decoder, objective)


@pytest.mark.parametrize("name", ["center_rewards_coefficient", "margin_scale"])
def test_values_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is -1: it must be a number of at least 0"):
        RewardModel(**{name: -1.0})
