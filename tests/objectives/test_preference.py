"""DPO: values and gradients equal to a slow reference, whatever the layout of the answers and the missing pairs."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.pair_windows import CHOSEN_TOKENS, PAIRS
from genesis.data.window import AccumulationWindow
from genesis.model.adapter import adapters_off
from genesis.model.decoder import Decoder
from genesis.model.shares import share_context
from genesis.objectives.objective import ObjectiveSums, prepare
from genesis.objectives.preference import CPO, DPO, ORPO, PairObjective, SimPO, sum_answers
from genesis.objectives.reference import ReferenceIdentity, ReferenceLogProbs, read_log_probs, write_log_probs
from genesis.objectives.vocabulary import WHOLE, Vocabulary
from genesis.strategies.context_parallel import ContextExchange, ContextVocabulary
from genesis_callbacks.testing import run_ranks
from tests.objectives.support import make_adapted, make_decoder, make_pairs, slow_log_prob, window_of

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"beta": 0.3, "label_smoothing": 0.2},
    "normalised": {"beta": 2.0, "length_normalisation": True},
    "with_sft": {"sft_weight": 0.7, "label_smoothing": 0.1},
}
LOSSES: dict[str, dict[str, Any]] = {
    "robust": {"loss": "robust", "beta": 0.3, "label_smoothing": 0.2},
    "hinge": {"loss": "hinge", "beta": 0.2},
    "ipo": {"loss": "ipo", "beta": 0.2, "length_normalisation": True, "sft_weight": 0.5},
}


def table_of(reference: Decoder, pairs: list[Any]) -> ReferenceLogProbs:
    with torch.no_grad():
        rows = [[slow_log_prob(reference, side) for side in (pair.chosen, pair.rejected)] for pair in pairs]
    return ReferenceLogProbs(torch.tensor(rows, dtype=torch.float32))


def slow_pair_loss(given: dict[str, Any], rewards: list[Tensor]) -> Tensor:
    """DPO's loss of a pair as the papers write it."""
    beta, smoothing, margin = given.get("beta", 0.1), given.get("label_smoothing", 0.0), rewards[0] - rewards[1]
    right, wrong = -torch.log(torch.sigmoid(margin)), -torch.log(torch.sigmoid(-margin))
    return {
        "sigmoid": (1 - smoothing) * right + smoothing * wrong,
        "robust": ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing),
        "hinge": torch.clamp(1 - margin, min=0),
        "ipo": (margin / beta - 1 / (2 * beta)) ** 2,
    }[given.get("loss", "sigmoid")]


def slow_loss(policy: Decoder, reference: Decoder, pairs: list[Any], options: dict[str, Any]) -> Tensor:
    """The loss of all pairs as the papers write it, pair by pair."""
    beta = options.get("beta", 0.1)
    losses, sft, num_chosen = [], [], 0
    for pair in pairs:
        rewards = []
        for side in pair[1:3]:
            with torch.no_grad():
                given = slow_log_prob(reference, side)
            length = int(side.has_label.sum()) if options.get("length_normalisation") else 1
            own = slow_log_prob(policy, side)
            rewards.append(beta * (own - given) / length)
            if side is pair.chosen:
                sft.append(-own)
                num_chosen += int(side.has_label.sum())
        losses.append(slow_pair_loss(options, rewards))
    mean = torch.stack(losses).mean()
    return mean + options.get("sft_weight", 0.0) * torch.stack(sft).sum() / num_chosen


def run(
    objective: PairObjective, decoder: Decoder, window: AccumulationWindow, vocabulary: Vocabulary = WHOLE
) -> tuple[Tensor, ObjectiveSums]:
    """A step without a strategy: terms divided by the window's units, and the sums for the log."""
    counts = objective.count(window)
    sums, losses = ObjectiveSums(counts=counts), []
    for given in window.micro_batches:
        micro_batch = prepare(objective, decoder, given, vocabulary)
        result = decoder(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            document_offsets=micro_batch.document_offsets,
            head=objective.head(micro_batch, vocabulary),
        )
        losses += [value / counts[unit] for unit, value in result.terms.items()]
        values = ({name: float(value.detach()) for name, value in of_one.items()} for of_one in result)
        sums = sums + ObjectiveSums(*values)
    return reduce(add, losses), sums


def gradients_of(decoder: Decoder, loss: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone() for name, parameter in decoder.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("micro_batch_size", "is_padded"), [(4, False), (2, False), (4, True)])
def test_loss_and_gradients_equal_the_slow_reference(options: str, micro_batch_size: int, is_padded: bool) -> None:
    check_dpo(OPTIONS[options], micro_batch_size, is_padded=is_padded)


@pytest.mark.parametrize("loss", LOSSES)
def test_other_losses_of_pairs_equal_the_slow_reference(loss: str) -> None:
    check_dpo(LOSSES[loss], 2, is_padded=True)


def check_dpo(given: dict[str, Any], micro_batch_size: int, *, is_padded: bool) -> None:
    pairs, policy, reference = make_pairs(4), make_decoder(0), make_decoder(1)
    objective = DPO(**given)
    objective.log_probs = table_of(reference, pairs)
    wanted = slow_loss(policy, reference, pairs, given)
    check_equal(objective, policy, wanted, window_of(pairs, micro_batch_size, is_padded=is_padded))


def slow_mean(policy: Decoder, answer: Any) -> Tensor:
    return slow_log_prob(policy, answer) / int(answer.has_label.sum())


def slow_odds(mean: Tensor) -> Tensor:
    return mean.exp() / (1 - mean.exp())


WITHOUT_REFERENCE: dict[str, tuple[PairObjective, float, Callable[[Decoder, Any], Tensor]]] = {
    "simpo": (
        SimPO(beta=1.5, gamma=0.4),
        0.0,
        lambda policy, pair: (
            -torch.log(torch.sigmoid(1.5 * (slow_mean(policy, pair.chosen) - slow_mean(policy, pair.rejected)) - 0.4))
        ),
    ),
    "cpo": (
        CPO(beta=0.3, sft_weight=0.6),
        0.6,
        lambda policy, pair: (
            -torch.log(torch.sigmoid(0.3 * (slow_log_prob(policy, pair.chosen) - slow_log_prob(policy, pair.rejected))))
        ),
    ),
    "orpo": (
        ORPO(weight=0.2),
        1.0,
        lambda policy, pair: (
            -0.2
            * torch.log(
                torch.sigmoid(
                    torch.log(slow_odds(slow_mean(policy, pair.chosen)) / slow_odds(slow_mean(policy, pair.rejected)))
                )
            )
        ),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_losses_without_a_reference_equal_those_of_the_papers(name: str) -> None:
    objective, sft_weight, lose = WITHOUT_REFERENCE[name]
    pairs, policy = make_pairs(4), make_decoder(0)
    wanted = torch.stack([lose(policy, pair) for pair in pairs]).mean()
    tokens = sum(int(pair.chosen.has_label.sum()) for pair in pairs)
    wanted = wanted - sft_weight * torch.stack([slow_log_prob(policy, pair.chosen) for pair in pairs]).sum() / tokens
    check_equal(objective, policy, wanted, window_of(pairs, 2))
    with_missing, _ = run(objective, policy, window_of(pairs, 3, num_missing=2))
    assert with_missing.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients_of(policy, with_missing).values())


def check_equal(objective: PairObjective, policy: Decoder, wanted: Tensor, window: AccumulationWindow) -> None:
    wanted_gradients = gradients_of(policy, wanted)
    loss, sums = run(objective, policy, window)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert objective.measure(sums)["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    gradients = gradients_of(policy, loss)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        error = (gradient - wanted_gradients[name]).norm() / wanted_gradients[name].norm()
        assert error < 1e-5, name


def share_answers(options: dict[str, Any]) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Computes the loss on ranks that share the tokens of each answer, with the sum of their gradients."""
    decoder, objective = make_adapted(make_decoder(0)), DPO(**options)
    assert dist.group.WORLD is not None
    exchange = ContextExchange(dist.group.WORLD)
    share_context(decoder, exchange)
    vocabulary = ContextVocabulary(exchange, WHOLE)
    loss, sums = run(objective, decoder, window_of(make_pairs(4), 2, is_padded=True), vocabulary)
    gradients = gradients_of(decoder, loss)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return float(loss), gradients, objective.measure(sums)


@pytest.mark.parametrize("options", ["with_sft", pytest.param("normalised", marks=pytest.mark.slow)])
def test_ranks_that_share_the_tokens_of_answers_compute_the_loss_and_figures_of_whole_ones(options: str) -> None:
    objective, policy = DPO(**OPTIONS[options]), make_adapted(make_decoder(0))
    wanted, sums = run(objective, policy, window_of(make_pairs(4), 4))
    wanted_gradients = gradients_of(policy, wanted)
    for loss, gradients, figures in run_ranks(share_answers, 2, OPTIONS[options]):
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        assert figures == pytest.approx(objective.measure(sums), rel=1e-5, abs=1e-6)
        assert gradients.keys() == wanted_gradients.keys()
        for name, gradient in gradients.items():
            assert (gradient - wanted_gradients[name]).norm() < 1e-5 * wanted_gradients[name].norm(), name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_reference_of_adapters_is_the_base_and_gradients_reach_the_adapters_alone(dora: bool) -> None:
    pairs, base = make_pairs(4), make_decoder(0)
    policy = make_adapted(base, dora=dora)
    wanted = slow_loss(policy, base, pairs, {})
    wanted_gradients = gradients_of(policy, wanted)
    loss, _ = run(DPO(), policy, window_of(pairs, 2))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    gradients = gradients_of(policy, loss)
    assert all("lora" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-4, atol=1e-6)


def test_switching_off_gives_the_base_exactly_and_switching_on_gives_the_adapters_back() -> None:
    (micro_batch,) = window_of(make_pairs(3), 3).micro_batches
    base = make_decoder(0)
    policy = make_adapted(base, dropout=0.5)
    before = sum_answers(policy, micro_batch, WHOLE)
    with adapters_off(policy):
        torch.testing.assert_close(
            sum_answers(policy, micro_batch, WHOLE), sum_answers(base, micro_batch, WHOLE), rtol=0, atol=0
        )
    torch.testing.assert_close(sum_answers(policy, micro_batch, WHOLE), before, rtol=0, atol=0)
    with pytest.raises(ZeroDivisionError), adapters_off(policy):
        _ = 1 / 0
    torch.testing.assert_close(sum_answers(policy, micro_batch, WHOLE), before, rtol=0, atol=0)


def test_the_reference_draws_no_dropout_and_leaves_the_policy_in_training() -> None:
    window = window_of(make_pairs(3), 3)
    policy = make_adapted(make_decoder(0), dropout=0.5).train()
    state = torch.get_rng_state()
    first = prepare(DPO(), policy, window.micro_batches[0], WHOLE)
    assert policy.training
    assert torch.equal(torch.get_rng_state(), state)
    second = prepare(DPO(), policy, window.micro_batches[0], WHOLE)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


def test_a_policy_that_is_its_reference_has_no_margin() -> None:
    pairs, base = make_pairs(5), make_decoder(0)
    objective = DPO(label_smoothing=0.1)
    objective.log_probs = table_of(base, pairs)
    _, sums = run(objective, base, window_of(pairs, 5))
    values = objective.measure(sums)
    assert values["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert abs(values["rewards_chosen"]) < 1e-5
    assert abs(values["reward_margin"]) < 1e-5


def test_the_log_has_means_over_pairs() -> None:
    pairs, policy, reference = make_pairs(6), make_decoder(0), make_decoder(1)
    objective = DPO(sft_weight=0.5)
    objective.log_probs = table_of(reference, pairs)
    _, sums = run(objective, policy, window_of(pairs, 2))
    values = objective.measure(sums)
    with torch.no_grad():
        own = torch.tensor([[slow_log_prob(policy, side) for side in pair[1:3]] for pair in pairs])
        given = torch.tensor([[slow_log_prob(reference, side) for side in pair[1:3]] for pair in pairs])
    rewards = 0.1 * (own - given)
    margins = rewards[:, 0] - rewards[:, 1]
    wanted = {
        "rewards_chosen": rewards[:, 0].mean(),
        "rewards_rejected": rewards[:, 1].mean(),
        "reward_margin": margins.mean(),
        "reward_accuracy": (margins > 0).float().mean(),
        "log_probs_chosen": own[:, 0].mean(),
        "log_probs_rejected": own[:, 1].mean(),
    }
    for name, value in wanted.items():
        assert values[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name
    assert values["loss"] == pytest.approx(values["preference_loss"] + 0.5 * values["sft_loss"])


@pytest.mark.parametrize("is_padded", [False, True], ids=["joined", "padded"])
def test_a_pair_that_is_missing_counts_nowhere(is_padded: bool) -> None:
    pairs, policy = make_pairs(3), make_decoder(0)
    objective = DPO(sft_weight=0.5)
    objective.log_probs = table_of(make_decoder(1), pairs)
    loss, sums = run(objective, policy, window_of(pairs, 3, is_padded=is_padded))
    gradients = gradients_of(policy, loss)
    other, other_sums = run(objective, policy, window_of(pairs, 5, is_padded=is_padded, num_missing=2))
    assert other_sums.counts == sums.counts
    assert objective.measure(other_sums) == pytest.approx(objective.measure(sums), rel=1e-5)
    for name, gradient in gradients_of(policy, other).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_padded", [False, True], ids=["joined", "padded"])
def test_a_window_without_pairs_keeps_the_graph_connected(is_padded: bool) -> None:
    policy = make_decoder(0)
    objective = DPO()
    objective.log_probs = table_of(policy, make_pairs(1))
    (micro_batch,) = window_of([], 2, is_padded=is_padded, num_missing=2).micro_batches
    micro_batch = prepare(objective, policy, micro_batch, WHOLE)
    head = objective.head(micro_batch, WHOLE)
    result = policy(micro_batch.input_ids, document_ids=micro_batch.document_ids, head=head)
    assert not any(gradient.any() for gradient in gradients_of(policy, result.terms[PAIRS]).values())


def test_units_are_pairs_and_the_tokens_of_chosen_answers() -> None:
    pairs = make_pairs(5)
    counts = DPO().count(window_of(pairs, 5))
    assert counts[PAIRS] == 5
    assert counts[CHOSEN_TOKENS] == sum(int(pair.chosen.has_label.sum()) for pair in pairs)
    assert counts["tokens"] == counts[CHOSEN_TOKENS] + sum(int(pair.rejected.has_label.sum()) for pair in pairs)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"beta": 0.0}, "beta is 0: it must be a number above 0"),
        ({"beta": math.nan}, "beta is nan"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5: it must be at least 0 and below 0.5"),
        ({"sft_weight": -1.0}, "sft_weight is -1"),
        ({"loss": "robust"}, "loss is robust, and label_smoothing is 0: give the share of wrong preferences, such as"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing is 0.1, and the loss hinge has none: leave it"),
        ({"loss": "ipo"}, "loss is ipo, whose square would grow with an answer's length: set length_normalisation"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        DPO(**options)


# The file of the reference's log-probabilities

IDENTITY = ReferenceIdentity("weights", "corpus", "32-true", 7)


def test_a_file_gives_back_what_was_written(tmp_path: Any) -> None:
    table = torch.randn(7, 2)
    write_log_probs(tmp_path / "reference" / IDENTITY.file_name, IDENTITY, table)
    found = read_log_probs(tmp_path / "reference" / IDENTITY.file_name, IDENTITY)
    assert isinstance(found, Tensor)
    assert torch.equal(found, table)
    pairs = torch.tensor([3, -1, 0])
    assert torch.equal(ReferenceLogProbs(found).read(pairs)[[0, 1, 4, 5]], table[[3, 0]].flatten())


@pytest.mark.parametrize("change", ["weights", "corpus", "precision", "num_pairs"])
def test_a_file_for_anything_else_is_never_accepted(tmp_path: Any, change: str) -> None:
    other = replace(IDENTITY, **{change: 8 if change == "num_pairs" else "other"})  # type: ignore[arg-type]
    path = tmp_path / IDENTITY.file_name
    write_log_probs(path, IDENTITY, torch.randn(7, 2))
    assert other.file_name != IDENTITY.file_name
    path.rename(tmp_path / other.file_name)
    assert "was made with another reference" in str(read_log_probs(tmp_path / other.file_name, other))


@pytest.mark.parametrize("place", [0, 31, 32, 87])
def test_a_flipped_bit_and_a_lost_byte_are_found(tmp_path: Any, place: int) -> None:
    path = tmp_path / IDENTITY.file_name
    write_log_probs(path, IDENTITY, torch.randn(7, 2))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert "is damaged" in str(read_log_probs(path, IDENTITY))
    data[place] ^= 1
    path.write_bytes(data[:-1])
    assert "is damaged" in str(read_log_probs(path, IDENTITY))
    path.unlink()
    assert "does not exist" in str(read_log_probs(path, IDENTITY))
