"""Policy gradients: every choice equals a slow reference and, where TRL has it, TRL's trainer."""

import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.objectives import GRPO, GSPO
from genesis.objectives.grpo import PRESETS
from genesis.objectives.objective import ObjectiveSums
from genesis.objectives.policy_gradient import (
    ADVANTAGE,
    ANSWERS,
    IS_FIRST,
    LEARNED_ANSWERS,
    LEARNED_TOKENS,
    LONGEST,
    NUM_ASKED,
    OLD_LOG_PROB,
    OLD_TOKEN_LOG_PROB,
    REFERENCE,
    REWARD_OF,
    SPREAD_OF,
    TEMPERATURE,
    compare_rewards,
    lose_answers,
    measure_spread,
)
from genesis.objectives.vocabulary import WHOLE
from tests.objectives.test_gspo import LENGTHS, TRL_METRICS, make_case, slow_log_prob

MOST = 8
IS_WHOLE = (1.0, 1.0, 0.0, 1.0)
OPTIONS: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS),
    {"preset": "grpo", "normalisation": "token", "kl": 0.3},
    {"preset": "dr_grpo", "kl": 0.3, "cut_answers": "mask"},
    {"preset": "dapo", "kl": 0.3, "cut_answers": "mask"},
    {"preset": "gspo", "normalisation": "constant", "clip": "none"},
    {"preset": "cispo", "ratio": "sequence", "normalisation": "sequence", "cut_answers": "mask"},
    {"preset": "cispo", "clip_low": 0.1, "clip_high": 0.05},
    {"preset": "rloo", "kl": 0.3},
    {"preset": "rloo", "clip": "none", "cut_answers": "mask"},
]


def make_answers(temperature: float = 1.0) -> tuple[Tensor, Tensor, MicroBatch]:
    """Returns answers whose tokens had other log-probabilities when they were written, on both sides of every clip."""
    hidden, weight, micro_batch = make_case(temperature)
    mask = micro_batch.labels != IGNORE_INDEX
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(5)) * 0.4
    old, reference = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for row, place in mask.nonzero():
        now = slow_log_prob(hidden[row, place], weight, int(micro_batch.labels[row, place]), temperature)
        old[row, place], reference[row, place] = now + noise[row, place], now - 0.5 * noise[row, place]
    extra = {
        **micro_batch.extra,
        OLD_TOKEN_LOG_PROB: old,
        OLD_LOG_PROB: old.sum(1),
        REFERENCE: reference,
        LONGEST: torch.tensor([float(MOST)]),
    }
    return hidden, weight, replace(micro_batch, extra=extra)


def slow_loss(hidden: Tensor, weight: Tensor, micro_batch: MicroBatch, given: dict[str, Any]) -> Tensor:
    """Returns the loss in float64, token by token and answer by answer, by the formulas of the papers."""
    choices, kl = PRESETS[given["preset"]], given.get("kl", 0.0)
    choices = replace(choices, **{name: value for name, value in given.items() if hasattr(choices, name)})
    masks = given.get("cut_answers") == "mask"
    extra, of_answers, num_tokens = micro_batch.extra, [], 0
    for row, labels in enumerate(micro_batch.labels):
        if masks and not IS_WHOLE[row]:
            continue
        places = (labels != IGNORE_INDEX).nonzero().squeeze(1).tolist()
        num_tokens += len(places)
        new = [slow_log_prob(hidden[row, s], weight, int(labels[s]), float(extra[TEMPERATURE])) for s in places]
        old = [float(extra[OLD_TOKEN_LOG_PROB][row, s]) for s in places]
        whole = sum(n - o for n, o in zip(new, old, strict=True))
        advantage, losses, penalties = float(extra[ADVANTAGE][row]), [], []
        for log_prob, before, place in zip(new, old, places, strict=True):
            exponent = {"token": log_prob - before, "sequence": whole / len(places), "product": whole}[choices.ratio]
            ratio = torch.exp(exponent)
            bounded = min(max(ratio.item(), 1 - choices.clip_low), 1 + choices.clip_high)
            if choices.clip == "none":
                losses.append(-ratio * advantage)
            elif choices.clip == "cispo":
                losses.append(-bounded * advantage * log_prob)
            else:
                is_free = (ratio * advantage).item() <= bounded * advantage
                losses.append(-ratio * advantage if is_free else torch.tensor(-bounded * advantage).double())
            log_ratio = float(extra[REFERENCE][row, place]) - log_prob
            penalties.append(kl * (torch.exp(log_ratio) - log_ratio - 1))
        of_answers.append((torch.stack(losses), torch.stack(penalties)))
    sums = [(losses + penalties).sum() for losses, penalties in of_answers]
    if choices.normalisation == "token":
        return torch.stack(sums).sum() / num_tokens
    if choices.normalisation == "constant":
        return torch.stack(sums).sum() / (MOST * len(of_answers))
    return torch.stack([(losses + penalties).mean() for losses, penalties in of_answers]).mean()


def count_units(micro_batch: MicroBatch, *, masks: bool) -> dict[str, int]:
    if not masks:
        return {}
    learned = [size for size, is_whole in zip(LENGTHS, IS_WHOLE, strict=True) if is_whole]
    return {LEARNED_ANSWERS: len(learned), LEARNED_TOKENS: sum(learned)}


def run_in(objective: GRPO | GSPO, hidden: Tensor, weight: Tensor, micro_batch: MicroBatch, *size: int) -> Tensor:
    """Returns the loss of a window in micro-batches of these sizes, each term divided by the window's count alone."""
    units = count_units(micro_batch, masks=objective.masks_cut_answers)
    window = AccumulationWindow((micro_batch,), sum(LENGTHS), 40, 4, units)
    counts, total, start = objective.count(window), torch.zeros(()), 0
    for rows in size:
        own = slice(start, start + rows)
        extra = {
            name: tensor[own] if len(tensor) == len(LENGTHS) else tensor for name, tensor in micro_batch.extra.items()
        }
        part = MicroBatch(micro_batch.input_ids[own], micro_batch.labels[own], None, extra=extra)
        for unit, term in objective.head(part, WHOLE)(hidden[own], weight).terms.items():
            total = total + term / counts[unit]
        start += rows
    return total


def assert_same_gradients(one: list[Tensor], other: list[Tensor]) -> None:
    for own, their in zip(one, other, strict=True):
        assert own.grad is not None
        assert their.grad is not None
        assert bool(their.grad.any())
        assert float((own.grad.double() - their.grad).abs().max()) < 1e-5


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_loss_and_gradients_equal_a_slow_reference_in_any_micro_batches(given: dict[str, Any]) -> None:
    hidden, weight, micro_batch = make_answers(0.7)
    slow = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    expected = slow_loss(*slow, micro_batch, given)
    expected.backward()
    for sizes in ((4,), (1, 3)):
        own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = run_in(GRPO(**given), *own, micro_batch, *sizes)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        assert_same_gradients(own, slow)


def test_gspo_is_the_preset_of_its_name_to_the_bit() -> None:
    hidden, weight, micro_batch = make_answers()
    own, preset = (run_in(objective, hidden, weight, micro_batch, 4) for objective in (GSPO(), GRPO("gspo")))
    assert torch.equal(own, preset)


# ---- TRL

TRL_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"loss_type": "grpo"}),
    ({"kl": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    ({"normalisation": "token"}, {"loss_type": "bnpo"}),
    ({"preset": "dr_grpo", "kl": 0.3}, {"loss_type": "dr_grpo", "beta": 0.3}),
    ({"preset": "dapo", "kl": 0.3}, {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3}),
    ({"preset": "dapo", "cut_answers": "mask"}, {"loss_type": "dapo", "epsilon_high": 0.28, "masks": True}),
    # TRL's bound is the highest ratio itself.
    ({"preset": "cispo", "clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    (
        {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.08},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    ),
]


def trl_log_probs(parts: list[Tensor], targets: Tensor) -> Tensor:
    return torch.log_softmax(parts[0] @ parts[1].t(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), TRL_CASES, ids=str)
def test_loss_and_gradients_equal_those_of_trls_grpo(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    hidden, weight, micro_batch = make_answers()
    own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    other = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = run_in(GRPO(**ours), *own, micro_batch, 1, 3)
    loss.backward()
    mask = micro_batch.labels != IGNORE_INDEX
    targets = micro_batch.labels.masked_fill(~mask, 0)
    learned = mask * torch.tensor(IS_WHOLE).unsqueeze(1) if theirs.pop("masks", False) else mask
    options = {"importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2} | theirs
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (trl_log_probs(other, targets), mask * 0.0, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False,
        max_completion_length=MOST,
        model=torch.nn.Identity(),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(
            reduce=lambda tensor, reduction: tensor, gather=lambda tensor: tensor, num_processes=1
        ),
        _metrics={"train": {name: [] for name in (*TRL_METRICS, "cispo_clip_ratio")}},
        **options,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "completion_ids": targets,
        "completion_mask": learned.long(),
        "advantages": micro_batch.extra[ADVANTAGE],
        "ref_per_token_logps": micro_batch.extra[REFERENCE],
        "old_per_token_logps": micro_batch.extra[OLD_TOKEN_LOG_PROB],
        "num_items_in_batch": learned.sum(),
    }
    wanted = import_module("trl").GRPOTrainer._compute_loss(trainer, None, inputs)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert_same_gradients(own, other)


@pytest.mark.slow
def test_loss_and_gradients_equal_those_of_trls_rloo() -> None:
    hidden, weight, micro_batch = make_answers()
    own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    other = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = run_in(GRPO("rloo"), *own, micro_batch, 3, 1)
    loss.backward()
    mask = micro_batch.labels != IGNORE_INDEX
    targets = micro_batch.labels.masked_fill(~mask, 0)
    ratio = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (trl_log_probs(other, targets), mask * 0.0, None),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        model=torch.nn.Identity(),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(reduce=lambda tensor, reduction: tensor, gather=lambda tensor: tensor),
        _metrics={"train": {name: [] for name in ("entropy", *(f"clip_ratio/{name}" for name in ratio))}},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "completion_ids": targets,
        "completion_mask": mask.long(),
        "advantages": micro_batch.extra[ADVANTAGE],
        "old_logps": micro_batch.extra[OLD_LOG_PROB],
    }
    wanted = import_module("trl").RLOOTrainer._compute_loss(trainer, None, inputs)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert_same_gradients(own, other)


# ---- advantages

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0], [0.1 + 0.2, 0.3, 0.3, 0.3], [5.0, 1.0, 1.0, 1.0]])


def test_advantages_equal_their_formulas() -> None:
    spreads = [measure_spread(group) for group in REWARDS]
    assert spreads[1] == 0.0
    centred, all_equal = REWARDS - REWARDS.mean(1, keepdims=True), REWARDS[1]
    of_groups = compare_rewards(REWARDS, "group_std")
    for group, wanted, spread in zip(of_groups, centred, spreads, strict=True):
        assert group == pytest.approx(wanted / (spread + 1e-4), abs=1e-12)
    assert compare_rewards(REWARDS, "group_mean") == pytest.approx(centred)
    others = np.array([[(sum(group) - one) / 3 for one in group] for group in REWARDS])
    assert compare_rewards(REWARDS, "leave_one_out") == pytest.approx(REWARDS - others)
    std = math.sqrt(((REWARDS - REWARDS.mean()) ** 2).sum() / (REWARDS.size - 1))
    assert compare_rewards(REWARDS, "batch_std") == pytest.approx((REWARDS - REWARDS.mean()) / (std + 1e-4))
    for form in ("group_std", "group_mean", "leave_one_out"):
        assert not compare_rewards(REWARDS, form)[1].any()  # type: ignore[arg-type]
    assert not compare_rewards(np.stack([all_equal, all_equal]), "batch_std").any()


def test_groups_of_equal_rewards_that_round_have_no_advantage() -> None:
    equal = np.full((2, 3), 0.1)
    for form in ("group_std", "group_mean", "leave_one_out", "batch_std"):
        assert not compare_rewards(equal, form).any()  # type: ignore[arg-type]


# ---- the log


def test_the_log_has_rewards_by_name_masked_answers_and_the_first_ratio() -> None:
    hidden, weight, micro_batch = make_answers()
    extra = micro_batch.extra | {
        IS_FIRST: torch.ones(4),
        NUM_ASKED: torch.tensor([1.0, 1.0, 3.0, 1.0]),
        REWARD_OF + "right": torch.tensor([1.0, 0.0, 0.0, 1.0]),
        SPREAD_OF + "right": torch.tensor([0.5, 0.5, 0.0, 0.5]),
    }
    micro_batch = replace(micro_batch, extra=extra)
    objective = GRPO("dapo", cut_answers="mask")
    window = AccumulationWindow((micro_batch,), sum(LENGTHS), 40, 4, count_units(micro_batch, masks=True))
    result = objective.head(micro_batch, WHOLE)(hidden, weight)
    sums = ObjectiveSums(
        {name: float(value) for name, value in result.terms.items()},
        {name: float(value) for name, value in result.figures.items()},
        objective.count(window),
    )
    measured = objective.measure(sums)
    assert measured["reward_right"] == 0.5
    assert measured["reward_right_spread"] == pytest.approx(0.375)
    assert measured["reward_right_no_signal"] == 0.25
    assert measured["masked"] == 0.25
    assert measured["asked"] == 1.5
    mask = micro_batch.labels != IGNORE_INDEX
    now = (hidden @ weight.t()).log_softmax(-1).gather(-1, micro_batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    ratios = torch.exp(now - micro_batch.extra[OLD_TOKEN_LOG_PROB])
    lengths = torch.tensor(LENGTHS)
    of_answers = ((ratios - 1).abs() * mask).sum(1) / lengths
    assert measured["first_ratio_error"] == pytest.approx(float(of_answers.mean()), abs=1e-5)
    assert measured["ratio"] == pytest.approx(float(((ratios * mask).sum(1) / lengths).mean()), abs=1e-5)
    advantages = micro_batch.extra[ADVANTAGE].unsqueeze(1)
    stopped = ((ratios > 1.28) & (advantages > 0)) | ((ratios < 0.8) & (advantages < 0))
    assert 0 < measured["clipped"] == pytest.approx(float(((stopped & mask).sum(1) / lengths).mean()), abs=1e-6)


def test_answers_that_are_all_cut_and_masked_have_no_loss() -> None:
    hidden, weight, micro_batch = make_answers()
    cut = replace(micro_batch, extra=micro_batch.extra | {"is_finished": torch.zeros(4)})
    objective = GRPO("dapo", cut_answers="mask")
    result = objective.head(cut, WHOLE)(hidden, weight)
    counts = {ANSWERS: 4, "tokens": 16, "bytes": 40, LEARNED_ANSWERS: 0, LEARNED_TOKENS: 0}
    figures = {name: float(value) for name, value in result.figures.items()}
    measured = objective.measure(ObjectiveSums({LEARNED_TOKENS: float(result.terms[LEARNED_TOKENS])}, figures, counts))
    assert measured["loss"] == 0.0
    assert measured["masked"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.0}, "clip_low is 1.0; it must be above 0 and below 1"),
        ({"preset": "cispo", "clip_low": 1.5}, "clip_low is 1.5; it must be above 0 and at most 1"),
        ({"clip_high": math.inf}, "clip_high is inf; it must be a number above 0"),
        ({"kl": -0.1}, "kl is -0.1; it must be a number of at least 0"),
        ({"preset": "rloo", "normalisation": "token"}, "ratio is product, .* normalisation: sequence and clip"),
        ({"preset": "rloo", "clip": "cispo"}, "ratio is product, .* with clip cispo; set"),
        ({"advantage": "median"}, "advantage is 'median'; it must be one of group_std, group_mean"),
    ],
)
def test_choices_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPO(**options)


def test_a_ratio_beyond_float32_has_a_loss_and_no_gradient_where_it_is_clipped() -> None:
    log_probs = torch.tensor([100.0, 0.1], requires_grad=True)
    losses, _, is_clipped = lose_answers(
        log_probs, torch.zeros(2), torch.tensor([7, 7]), torch.ones(2), PRESETS["rloo"]
    )
    losses.sum().backward()
    assert is_clipped.tolist() == [True, False]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -math.exp(0.1)])
