"""Preferences, answers and distillation with adapters on routed experts: equal to slow references, adapters alone."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.adapter import adapters_off
from genesis.model.decoder import Decoder
from genesis.objectives.distillation import Distillation
from genesis.objectives.gspo import GSPO
from genesis.objectives.policy_gradient import ADVANTAGE, OLD_LOG_PROB
from genesis.objectives.preference import DPO
from genesis.objectives.teacher import Teacher
from tests.mixtures import MIXTURES, build_sharp, mix
from tests.objectives.support import make_adapted, make_pairs, window_of
from tests.objectives.test_mixtures import OPTIONS, auxiliary_loss, check_gradients, gradients_of, take_step
from tests.objectives.test_preference import slow_loss
from tests.train.support import TINY

NAMES = [name for name, fields in MIXTURES.items() if "feed_forward" in fields]
ALL = ("*",)
LENGTHS, PROMPTS = (5, 1, 3, 7), (3, 4, 2, 1)
GSPO_OPTIONS: dict[str, float] = {"clip_low": 0.05, "clip_high": 0.08, "kl": 0.3}

CASES = [pytest.param(name, marks=[] if name == NAMES[0] else [pytest.mark.slow]) for name in NAMES]


def check_only_adapters_learn(found: dict[str, Tensor]) -> None:
    assert all("lora" in name for name in found)
    learning = [name for name, gradient in found.items() if "experts" in name and bool(gradient.any())]
    assert any("gate_up_adapter" in name for name in learning)
    assert any("down_adapter" in name for name in learning)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_of_preferences_is_the_base_without_the_adapters_of_its_experts(name: str) -> None:
    base, pairs = build_sharp(mix(TINY, name)), make_pairs(4)
    policy = make_adapted(base, include_experts=ALL)
    window = window_of(pairs, 2)
    terms, found = take_step(policy, DPO(**OPTIONS), window)
    policy.zero_grad()
    wanted = slow_loss(policy, base, pairs, OPTIONS)
    (wanted + auxiliary_loss(policy, window)).backward()
    assert sum(terms.values()) == pytest.approx(wanted.item(), rel=1e-5)
    check_only_adapters_learn(found)
    check_gradients(found, gradients_of(policy))


def write_answers(old: Decoder) -> AccumulationWindow:
    """Returns answers in rows of one document each, whose weights have changed since `old` wrote them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, TINY.vocab_size, (len(LENGTHS), TINY.max_seq_len), generator=generator)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        labels[row, start : start + length] = ids[row, start + 1 : start + length + 1]
    with torch.no_grad():
        written = torch.stack([sum_log_probs(old, ids[row], labels[row]).sum() for row in range(len(ids))])
    noise = torch.tensor([-0.2, 0.01, 0.0, 0.2]) * torch.tensor(LENGTHS)
    extra = {
        ADVANTAGE: torch.tensor([1.3, -0.7, 0.4, -1.1]),
        OLD_LOG_PROB: written + noise,
        "reward": torch.tensor([2.0, 0.0, 1.0, 0.0]),
        "spread": torch.full((4,), 0.4),
        "is_finished": torch.ones(4),
        "is_first": torch.zeros(4),
        "num_asked": torch.ones(4),
        "temperature": torch.tensor([1.0]),
    }
    micro_batch = MicroBatch(ids, labels, torch.zeros(ids.shape, dtype=torch.int32), extra=extra)
    return AccumulationWindow((micro_batch,), num_valid_tokens=sum(LENGTHS), num_bytes=99, data_position=len(ids))


def sum_log_probs(decoder: Decoder, ids: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probability of each label of a row, by a forward of that row alone."""
    log_probs = decoder(ids[None])[0].log_softmax(-1)
    return torch.stack([log_probs[at, label] for at, label in enumerate(labels.tolist()) if label != IGNORE_INDEX])


def list_slow_losses(policy: Decoder, micro_batch: MicroBatch) -> Iterator[Tensor]:
    """Yields the loss of each answer: clipped, with the KL to the base."""
    for row, (ids, labels) in enumerate(zip(micro_batch.input_ids, micro_batch.labels, strict=True)):
        own = sum_log_probs(policy, ids, labels)
        with torch.no_grad(), adapters_off(policy):
            base = sum_log_probs(policy, ids, labels)
        ratio = ((own.sum() - micro_batch.extra[OLD_LOG_PROB][row]) / len(own)).exp()
        held = ratio.clamp(1 - GSPO_OPTIONS["clip_low"], 1 + GSPO_OPTIONS["clip_high"])
        advantage = micro_batch.extra[ADVANTAGE][row]
        divergence = ((base - own).exp() - (base - own) - 1).mean()
        yield -torch.minimum(ratio * advantage, held * advantage) + GSPO_OPTIONS["kl"] * divergence


@pytest.mark.parametrize("name", CASES)
def test_answers_of_adapted_experts_are_compared_with_the_base(name: str) -> None:
    base = build_sharp(mix(TINY, name))
    policy = make_adapted(base, include_experts=ALL)
    window = write_answers(policy)
    (micro_batch,) = window.micro_batches
    with torch.no_grad(), adapters_off(policy):
        torch.testing.assert_close(policy(micro_batch.input_ids), base(micro_batch.input_ids), rtol=0, atol=0)
    terms, found = take_step(policy, GSPO(**GSPO_OPTIONS), window)
    policy.zero_grad()
    wanted = torch.stack(list(list_slow_losses(policy, micro_batch))).mean()
    (wanted + auxiliary_loss(policy, window)).backward()
    assert terms["answers"] == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
    check_only_adapters_learn(found)
    check_gradients(found, gradients_of(policy))


@pytest.mark.parametrize("name", CASES)
def test_a_student_with_adapted_experts_learns_from_a_teacher_with_adapted_experts(name: str) -> None:
    student = make_adapted(build_sharp(mix(TINY, name)), include_experts=ALL)
    teacher = make_adapted(build_sharp(mix(TINY, name), 1), seed=5, include_experts=ALL)
    window = write_answers(student)
    (micro_batch,) = window.micro_batches
    objective = Distillation(teacher="a teacher", temperature=2.0, teacher_share=0.6)
    given: dict[str, Any] = {"vocab_size": TINY.vocab_size, "top_k": TINY.vocab_size, "temperature": 2.0}
    objective.loaded_teacher = Teacher(copy.deepcopy(teacher), **given)
    terms, found = take_step(student, objective, window)
    student.zero_grad()
    losses = []
    for ids, labels in zip(micro_batch.input_ids, micro_batch.labels, strict=True):
        with torch.no_grad():
            log_p = (teacher(ids[None])[0] / 2.0).log_softmax(-1)
        logits = student(ids[None])[0]
        divergence = (log_p.exp() * (log_p - (logits / 2.0).log_softmax(-1))).sum(-1)
        for at, label in enumerate(labels.tolist()):
            if label != IGNORE_INDEX:
                losses.append(0.4 * -logits.log_softmax(-1)[at, label] + 0.6 * 4.0 * divergence[at])
    wanted = torch.stack(losses).mean()
    (wanted + auxiliary_loss(student, window)).backward()
    assert terms["tokens"] == pytest.approx(wanted.item(), rel=1e-5)
    check_only_adapters_learn(found)
    check_gradients(found, gradients_of(student))
