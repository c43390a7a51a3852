"""The loss of distillation: equal to the float64 reference, whatever K, T, a, the chunks, the dtype and the labels."""

import pytest
import torch

from genesis.model.loss import IGNORE_INDEX, chunk_tokens, sum_cross_entropy
from genesis.objectives.distillation_loss import read_classes, sum_distillation

VOCAB = 50


def make_problem(shape=(3, 20), dim=16, vocab_size=VOCAB, padding=0, spread=1.0, share_ignored=0.2):
    """A student and a teacher of another width, whose heads have `padding` rows beyond the tokenizer's ids."""
    torch.manual_seed(0)
    hidden = torch.randn(*shape, dim).requires_grad_()
    weight = (spread * torch.randn(vocab_size + padding, dim)).requires_grad_()
    teacher = (torch.randn(*shape, 2 * dim), spread * torch.randn(vocab_size + 2 * padding, 2 * dim))
    labels = torch.randint(0, vocab_size, shape)
    labels[torch.rand(shape) < share_ignored] = IGNORE_INDEX
    return hidden, weight, labels, teacher


def reference(hidden, weight, labels, teacher, *, top_k, temperature, share, vocab_size=VOCAB):
    """The definition with full logits in float64, one token at a time; loss and gradients by autograd."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    sums = torch.zeros(4, dtype=torch.float64)
    vectors = zip(hidden.flatten(0, -2), teacher[0].double().flatten(0, -2), labels.flatten().tolist(), strict=True)
    for student, of_teacher, label in vectors:
        if label == IGNORE_INDEX:
            continue
        log_p = ((teacher[1][:vocab_size].double() @ of_teacher) / temperature).log_softmax(0)
        log_q = ((weight @ student) / temperature).log_softmax(0)
        top = log_p.argsort(descending=True)[:top_k].tolist()
        others = [number for number in range(len(log_q)) if number not in top]
        rest = log_p[[number for number in others if number < vocab_size]].logsumexp(0)
        divergence = sum(log_p[i].exp() * (log_p[i] - log_q[i]) for i in top)
        if rest.exp() > 0:
            divergence = divergence + rest.exp() * (rest - log_q[others].logsumexp(0))
        cross_entropy = -(weight @ student).log_softmax(0)[label]
        loss = (1 - share) * cross_entropy + share * temperature**2 * divergence
        sums = sums + torch.stack([loss, cross_entropy, divergence, rest.exp()])
    (sums[0] + 0.0 * hidden.sum() + 0.0 * weight.sum()).backward()
    return sums.detach(), hidden.grad, weight.grad


def run(hidden, weight, labels, teacher, *, top_k, temperature, share, vocab_size=VOCAB, factor=1.0):
    classes = read_classes(*teacher, vocab_size=vocab_size, top_k=top_k, temperature=temperature)
    sums = sum_distillation(hidden, weight, labels, classes, temperature=temperature, share=share)
    (sums.loss * factor).backward()
    assert not any(figure.requires_grad for figure in sums[1:])
    return torch.stack([figure.detach() for figure in sums]), hidden.grad, weight.grad


def error(ours, wanted):
    return ((ours.double() - wanted).norm() / wanted.norm().clamp_min(1e-3)).item()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [1, 8, VOCAB - 1, VOCAB])
def test_loss_and_gradients_equal_the_float64_reference(top_k, temperature, share):
    settings = {"top_k": top_k, "temperature": temperature, "share": share}
    for padding in (0, 6):
        problem = make_problem(padding=padding)
        wanted = reference(*problem, **settings)
        for ours, theirs in zip(run(*problem, **settings), wanted, strict=True):
            assert error(ours, theirs) < 1e-5


def test_chunks_have_no_effect(monkeypatch):
    """With three chunks, the last of which is short."""
    tokens = chunk_tokens(9001, torch.device("cpu"))
    problem = make_problem((1, 2 * tokens + 44), dim=4, vocab_size=9001)
    settings = {"top_k": 16, "temperature": 2.0, "share": 0.5, "vocab_size": 9001}
    cut = run(*problem, **settings)
    hidden, weight, labels, teacher = problem
    hidden.grad = weight.grad = None
    monkeypatch.setattr("genesis.model.loss.MIN_CHUNK_TOKENS", 1 << 20)
    whole = run(hidden, weight, labels, teacher, **settings)
    for ours, theirs in zip(cut, whole, strict=True):
        assert error(ours, theirs.double()) < 1e-6


def test_a_rest_far_below_the_rest_keeps_its_digits():
    """Rests of e-40 and of e-200, which are 0 as 1 minus a sum in float32, and the latter also as a float32 number."""
    for spread, top_k in ((12.0, VOCAB - 1), (60.0, VOCAB - 1), (60.0, 8)):
        problem = make_problem(spread=spread)
        settings = {"top_k": top_k, "temperature": 1.0, "share": 0.5}
        wanted = reference(*problem, **settings)
        for ours, theirs in zip(run(*problem, **settings), wanted, strict=True):
            assert error(ours, theirs) < 1e-5


def test_a_student_equal_to_its_teacher_has_no_divergence():
    hidden, weight, labels, _ = make_problem()
    sums, hidden_grad, _ = run(
        *(hidden, weight, labels, (hidden.detach(), weight.detach())), top_k=8, temperature=2.0, share=1.0
    )
    assert sums[2].abs() < 1e-4
    assert hidden_grad.abs().max() < 1e-5


def test_without_the_teacher_the_loss_is_the_cross_entropy():
    hidden, weight, labels, teacher = make_problem()
    sums, hidden_grad, weight_grad = run(hidden, weight, labels, teacher, top_k=8, temperature=2.0, share=0.0)
    found = (sums[0], hidden_grad.clone(), weight_grad.clone())
    hidden.grad = weight.grad = None
    loss = sum_cross_entropy(hidden, weight, labels)
    loss.backward()
    for ours, theirs in zip(found, (loss, hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_upstream_factor_scales_the_gradients():
    problem = make_problem()
    settings = {"top_k": 8, "temperature": 2.0, "share": 0.5}
    wanted = reference(*problem, **settings)
    _, hidden_grad, weight_grad = run(*problem, **settings, factor=-0.125)
    assert error(hidden_grad, -0.125 * wanted[1]) < 1e-5
    assert error(weight_grad, -0.125 * wanted[2]) < 1e-5


def test_ignored_labels_give_nothing_even_beside_a_teacher_that_is_not_a_number():
    hidden, weight, labels, teacher = make_problem(share_ignored=0.5)
    classes = read_classes(*teacher, vocab_size=VOCAB, top_k=8, temperature=2.0)
    is_ignored = labels == IGNORE_INDEX
    classes.log_probs[is_ignored] = torch.nan
    sums = sum_distillation(hidden, weight, labels, classes, temperature=2.0, share=0.5)
    sums.loss.backward()
    assert all(figure.isfinite() for figure in sums)
    assert not hidden.grad[is_ignored].any()
    assert hidden.grad[~is_ignored].any(dim=-1).all()
    assert weight.grad.isfinite().all()
    nothing = sum_distillation(hidden, weight, labels.fill_(IGNORE_INDEX), classes, temperature=2.0, share=0.5)
    assert [figure.item() for figure in map(torch.Tensor.detach, nothing)] == [0.0] * 4


def test_a_teacher_that_is_not_a_number_is_not_hidden():
    hidden, weight, labels, teacher = make_problem(share_ignored=0.0)
    classes = read_classes(*teacher, vocab_size=VOCAB, top_k=8, temperature=2.0)
    classes.log_probs[0, 0] = torch.nan
    assert sum_distillation(hidden, weight, labels, classes, temperature=2.0, share=0.5).loss.isnan()


def test_a_frozen_output_weight_gets_no_gradient():
    hidden, weight, labels, teacher = make_problem()
    settings = {"top_k": 8, "temperature": 2.0, "share": 0.5}
    wanted = reference(hidden, weight, labels, teacher, **settings)
    _, hidden_grad, weight_grad = run(hidden, weight.detach(), labels, teacher, **settings)
    assert weight_grad is None
    assert error(hidden_grad, wanted[1]) < 1e-5


def test_autocast_multiplies_in_bfloat16_and_gives_float32_gradients():
    problem = make_problem((2, 200))
    settings = {"top_k": 8, "temperature": 2.0, "share": 0.5}
    wanted = reference(*problem, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(*problem, **settings)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, theirs) < 1e-2


def test_without_gradients_the_sums_are_the_same():
    hidden, weight, labels, teacher = make_problem()
    classes = read_classes(*teacher, vocab_size=VOCAB, top_k=8, temperature=2.0)
    with torch.no_grad():
        alone = sum_distillation(hidden, weight, labels, classes, temperature=2.0, share=0.5)
    assert torch.equal(
        torch.stack(alone), torch.stack(sum_distillation(hidden, weight, labels, classes, temperature=2.0, share=0.5))
    )
