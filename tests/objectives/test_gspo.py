"""The loss of GSPO: equal to a slow reference and to TRL's, with its gradients."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.objectives.gspo import GSPO
from genesis.objectives.objective import HeadResult, ObjectiveSums
from genesis.objectives.policy_gradient import ADVANTAGE, ANSWERS, REFERENCE
from genesis.objectives.vocabulary import WHOLE

V, D, S = 23, 12, 9
LENGTHS, PROMPTS = (5, 1, 3, 7), (3, 4, 2, 1)
ADVANTAGES = (1.3, -0.7, 0.0, -1.1)
CLIP = {"clip_low": 0.05, "clip_high": 0.08}


def make_case(temperature: float = 1.0, shift: float = 0.2) -> tuple[Tensor, Tensor, MicroBatch]:
    """Returns hidden states, an output weight and answers whose old log-probabilities are others than the new ones."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(len(LENGTHS), S, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) * 0.5
    labels = torch.full((len(LENGTHS), S), IGNORE_INDEX)
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        labels[row, start : start + length] = torch.randint(V, (length,), generator=generator)
    old = [
        sum(slow_log_prob(hidden[row, s], weight, int(labels[row, s]), temperature) for s in range(start, start + size))
        for row, (start, size) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    noise = torch.linspace(-shift, shift, len(LENGTHS)) * torch.tensor(LENGTHS)
    spread = torch.tensor([0.4, 0.4, 0.0, 0.4])
    extra = {
        ADVANTAGE: torch.tensor(ADVANTAGES),
        "old_log_prob": torch.stack(old).float() + noise,
        "reward": torch.tensor([2.0, 0.0, 1.0, 0.0]),
        "spread": spread,
        "is_finished": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "is_first": torch.zeros(4),
        "num_asked": torch.ones(4),
        "temperature": torch.tensor([temperature]),
    }
    documents = torch.zeros(labels.shape, dtype=torch.int32)
    return hidden, weight, MicroBatch(torch.zeros_like(labels), labels, documents, extra=extra)


def slow_log_prob(hidden: Tensor, weight: Tensor, label: int, temperature: float) -> Tensor:
    return torch.log_softmax(weight.double() @ hidden.double() / temperature, 0)[label]


def slow_loss(hidden: Tensor, weight: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Returns the mean of the clipped loss over the answers, token by token in float64."""
    temperature, losses = float(micro_batch.extra["temperature"]), []
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        tokens = range(start, start + length)
        new = sum(slow_log_prob(hidden[row, s], weight, int(micro_batch.labels[row, s]), temperature) for s in tokens)
        ratio = torch.exp((new - micro_batch.extra["old_log_prob"][row].double()) / length)
        advantage = ADVANTAGES[row]
        held = min(max(ratio.item(), 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"]) * advantage
        losses.append(-(ratio * advantage if (ratio * advantage).item() <= held else torch.tensor(held)))
    return sum(losses, start=torch.zeros((), dtype=torch.float64)) / len(losses)


def run_head(hidden: Tensor, weight: Tensor, micro_batch: MicroBatch, kl: float = 0.0) -> HeadResult:
    return GSPO(**CLIP, kl=kl).head(micro_batch, WHOLE)(hidden, weight)


@pytest.mark.parametrize(("temperature", "shift"), [(1.0, 0.2), (0.7, 0.2), (1.0, 0.01)])
def test_loss_and_gradients_equal_a_slow_reference(temperature: float, shift: float) -> None:
    hidden, weight, micro_batch = make_case(temperature, shift)
    own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    slow = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    loss = run_head(*own, micro_batch).terms[ANSWERS] / len(LENGTHS)
    expected = slow_loss(*slow, micro_batch)
    loss.backward()
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-5
    for one, other in zip(own, slow, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert bool(other.grad.any())
        assert float((one.grad.double() - other.grad).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradients_equal_those_of_trl(kl: float) -> None:
    from trl import GRPOTrainer  # noqa: PLC0415  # seconds, for this test alone

    hidden, weight, micro_batch = make_case()
    own = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    mask = micro_batch.labels != IGNORE_INDEX
    targets = micro_batch.labels.masked_fill(~mask, 0)
    reference = (hidden @ weight.t()).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    reference = (reference + torch.linspace(-0.5, 0.5, mask.numel()).view(mask.shape)).masked_fill(~mask, 0.0)
    given = replace(micro_batch, extra={**micro_batch.extra, REFERENCE: reference})
    loss = run_head(*own, given, kl).terms[ANSWERS] / len(LENGTHS)
    loss.backward()
    other = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]

    def log_probs(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, None]:
        every = torch.log_softmax(other[0] @ other[1].t(), -1)
        return every.gather(-1, targets.unsqueeze(-1)).squeeze(-1), torch.zeros(mask.shape), None

    now = log_probs()[0].detach()
    # TRL keeps the old log-probabilities by token; only their sum counts for the ratio of a sequence.
    shift = (micro_batch.extra["old_log_prob"] - (now * mask).sum(1)) / torch.tensor(LENGTHS)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=log_probs,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence",
        beta=kl,
        loss_type="grpo",
        epsilon_low=CLIP["clip_low"],
        epsilon_high=CLIP["clip_high"],
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        use_vllm=False,
        model=torch.nn.Identity(),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(reduce=lambda tensor, reduction: tensor, gather=lambda tensor: tensor),
        _metrics={"train": {name: [] for name in TRL_METRICS}},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "completion_ids": targets,
        "completion_mask": mask.long(),
        "advantages": micro_batch.extra[ADVANTAGE],
        "ref_per_token_logps": reference,
        "old_per_token_logps": now + shift.unsqueeze(1),
    }
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    theirs.backward()
    assert abs(loss.item() - theirs.item()) < 1e-5
    for one, two in zip(own, other, strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert float((one.grad - two.grad).abs().max()) < 1e-5


TRL_METRICS = (
    "entropy",
    "kl",
    *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")),
)


def test_the_log_has_the_means_of_the_answers() -> None:
    hidden, weight, micro_batch = make_case()
    result = run_head(hidden, weight, micro_batch)
    window = AccumulationWindow((micro_batch,), sum(LENGTHS), 40, 4)
    counts = GSPO().count(window)
    assert counts == {ANSWERS: 4, "tokens": 16, "bytes": 40}
    sums = ObjectiveSums(
        {name: float(value) for name, value in result.terms.items()},
        {name: float(value) for name, value in result.figures.items()},
        counts,
    )
    measured = GSPO().measure(sums)
    assert measured["reward"] == 0.75
    assert measured["reward_spread"] == pytest.approx(0.3)
    assert measured["no_signal"] == 0.25
    assert measured["finished"] == 0.75
    assert measured["answer_tokens"] == 4.0
    # The first ratio is exp(0.2) with an advantage above 0, the last exp(-0.2) with one below 0.
    assert measured["clipped"] == 0.5
    assert measured["ratio"] == pytest.approx(float(torch.exp(-torch.linspace(-0.2, 0.2, 4)).mean()), abs=1e-5)
    assert measured["entropy"] > 0


@pytest.mark.parametrize("options", [{"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": -1.0}, {"kl": -0.1}])
def test_a_clipping_range_without_a_meaning_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        GSPO(**options)
