"""Preferences, answers and distillation on mixtures: losses and gradients equal to slow references, with balance."""

from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.data.loader import build_window
from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis.model.decoder import Decoder
from genesis.model.statistics import list_auxiliary_losses
from genesis.objectives.distillation import Distillation
from genesis.objectives.objective import Objective
from genesis.objectives.preference import DPO
from genesis.objectives.teacher import Teacher
from genesis.objectives.vocabulary import WHOLE
from genesis.strategies.micro_batches import train_in_turn
from tests.linear_faults import DOCUMENT_FAULTS
from tests.mixtures import LINEAR, MIXTURES, build_sharp, mix
from tests.objectives.support import FORMAT, make_adapted, make_pairs, window_of
from tests.objectives.test_preference import slow_loss, table_of
from tests.train.support import TINY

OPTIONS: dict[str, Any] = {"beta": 0.3, "label_smoothing": 0.1, "sft_weight": 0.7}


def take_step(
    decoder: Decoder, objective: Objective, window: AccumulationWindow
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns the terms of a window for each unit, and the gradients, as every strategy computes them."""
    counts = objective.count(window)
    decoder.train().zero_grad()
    result = train_in_turn(
        decoder,
        window.micro_batches,
        objective,
        {unit: 1 / count for unit, count in counts.items()},
        vocabulary=WHOLE,
        backward=lambda loss, _: loss.backward(),
    )
    result.to_backward.backward()
    terms = {unit: float(value) / counts[unit] for unit, value in result.sums.terms.items()}
    return terms, gradients_of(decoder)


def gradients_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


def auxiliary_loss(decoder: Decoder, window: AccumulationWindow) -> Tensor:
    """Returns what the routers add for each valid token, in which prompts and padding have no part."""
    total = torch.zeros(())
    for rows in window.micro_batches:
        counted = rows.labels != IGNORE_INDEX
        _, statistics = decoder(rows.input_ids, document_ids=rows.document_ids, has_statistics=True, counted=counted)
        total = total + sum(list_auxiliary_losses(statistics))
    return total / window.num_valid_tokens


def check_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) < 1e-4 * float(gradient.norm()) + 1e-6 * largest, name


@pytest.mark.parametrize(("micro_batch_size", "is_padded"), [(4, False), (2, True)], ids=["joined", "padded"])
@pytest.mark.parametrize("name", MIXTURES)
def test_preferences_equal_the_slow_reference(name: str, micro_batch_size: int, is_padded: bool) -> None:
    check_preferences(name, micro_batch_size, is_padded=is_padded)


@pytest.mark.parametrize("fault", DOCUMENT_FAULTS)
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_layer_that_mixes_documents_would_be_seen(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    DOCUMENT_FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError, match="the loss differs"):
        check_preferences(name, micro_batch_size=4, is_padded=False)
    with pytest.raises(AssertionError, match="the loss differs"):
        check_distillation(name)


def check_preferences(name: str, micro_batch_size: int, *, is_padded: bool) -> None:
    policy, reference = (build_sharp(mix(TINY, name), seed) for seed in (0, 1))
    pairs = make_pairs(4)
    window = window_of(pairs, micro_batch_size, is_padded=is_padded)
    objective = DPO(**OPTIONS)
    objective.log_probs = table_of(reference, pairs)
    terms, found = take_step(policy, objective, window)
    policy.zero_grad()
    wanted = slow_loss(policy, reference, pairs, OPTIONS)
    (wanted + auxiliary_loss(policy, window)).backward()
    assert sum(terms.values()) == pytest.approx(wanted.item(), rel=1e-5), "the loss differs"
    check_gradients(found, gradients_of(policy))
    assert not any(name.endswith("balance_bias") for name in found)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_reference_of_adapters_is_the_base_with_its_experts(name: str) -> None:
    base, pairs = build_sharp(mix(TINY, name)), make_pairs(4)
    policy = make_adapted(base)
    window = window_of(pairs, 2)
    terms, found = take_step(policy, DPO(**OPTIONS), window)
    policy.zero_grad()
    wanted = slow_loss(policy, base, pairs, OPTIONS)
    (wanted + auxiliary_loss(policy, window)).backward()
    assert sum(terms.values()) == pytest.approx(wanted.item(), rel=1e-5)
    assert all("lora" in name for name in found)
    check_gradients(found, gradients_of(policy))


@pytest.mark.parametrize("name", MIXTURES)
def test_distillation_from_a_mixture_equals_the_slow_reference(name: str) -> None:
    check_distillation(name)


def check_distillation(name: str) -> None:
    student, teacher = build_sharp(mix(TINY, name)), build_sharp(mix(TINY, name), 1)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(1, TINY.vocab_size, (4, FORMAT.seq_len + 1), generator=generator).numpy()
    ends = torch.zeros((4, FORMAT.seq_len), dtype=torch.bool)
    ends[:, 6] = True
    window = build_window(rows, FORMAT, 2, 4, ends.numpy())
    objective = Distillation(teacher="a teacher", temperature=2.0, teacher_share=0.6)
    objective.loaded_teacher = Teacher(teacher, vocab_size=TINY.vocab_size, top_k=TINY.vocab_size, temperature=2.0)
    terms, found = take_step(student, objective, window)

    student.zero_grad()
    losses = []
    for row in range(4):
        (micro_batch, at) = (window.micro_batches[row // 2], row % 2)
        for start, end in ((0, 7), (7, FORMAT.seq_len)):  # each document alone
            ids = micro_batch.input_ids[at : at + 1, start:end]
            logits = student(ids)[0]
            log_p, log_q = (teacher(ids)[0] / 2.0).log_softmax(-1), (logits / 2.0).log_softmax(-1)
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
            labels = micro_batch.labels[at, start:end]
            for token, label in enumerate(labels.tolist()):
                if label != IGNORE_INDEX:
                    own = -logits.log_softmax(-1)[token, label]
                    losses.append(0.4 * own + 0.6 * 4.0 * divergence[token])
    assert len(losses) == window.num_valid_tokens
    wanted = torch.stack(losses).mean()
    (wanted + auxiliary_loss(student, window)).backward()
    assert terms["tokens"] == pytest.approx(wanted.item(), rel=1e-5), "the loss differs"
    check_gradients(found, gradients_of(student))
