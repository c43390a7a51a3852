"""The losses of single tokens: equal to the float64 reference with any gradient from above, chunk by chunk."""

import resource

import pytest
import torch

import genesis.model.loss as genesis_loss
from genesis.model.loss import IGNORE_INDEX, chunk_tokens, sum_cross_entropy, token_losses
from genesis_callbacks.testing import run_ranks
from tests.model.test_loss import make_problem, relative_error


def reference(hidden, weight, labels, factors):
    """Log-probabilities by float64 logits: the losses, and both gradients of their sum times `factors`."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_probs = (hidden.flatten(0, -2) @ weight.t()).log_softmax(-1)
    targets = labels.flatten()
    picked = -log_probs.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
    losses = torch.where(targets == IGNORE_INDEX, 0.0, picked)
    (losses * factors.double()).sum().backward()
    return losses.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("vocab_size", [50, 9001], ids=["one_chunk", "three_chunks"])
def test_losses_and_gradients_equal_the_float64_reference(vocab_size):
    shape = (2, chunk_tokens(vocab_size, torch.device("cpu")) + 44) if vocab_size > 1000 else (3, 20)
    hidden, weight, labels = make_problem(shape, dim=4, vocab_size=vocab_size)
    factors = torch.randn(labels.numel())
    wanted = reference(hidden, weight, labels, factors)
    losses = token_losses(hidden, weight, labels)
    (losses * factors).sum().backward()
    assert losses.shape == (labels.numel(),)
    assert losses.dtype == torch.float32
    for ours, theirs in zip((losses, hidden.grad, weight.grad), wanted, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_their_sum_is_the_summed_loss_in_value_and_gradient():
    hidden, weight, labels = make_problem()
    other, other_weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    token_losses(hidden, weight, labels).sum().backward()
    sum_cross_entropy(other, other_weight, labels).backward()
    assert relative_error(hidden.grad, other.grad.double()) < 1e-6
    assert relative_error(weight.grad, other_weight.grad.double()) < 1e-6


def test_ignored_tokens_have_no_loss_and_no_gradient():
    hidden, weight, labels = make_problem(share_ignored=0.5)
    losses = token_losses(hidden, weight, labels)
    losses.sum().backward()
    is_ignored = labels == IGNORE_INDEX
    assert not losses[is_ignored.flatten()].any()
    assert not hidden.grad[is_ignored].any()
    assert hidden.grad[~is_ignored].any(dim=-1).all()


def test_only_ignored_labels_keep_the_graph_connected():
    """Under sharding every rank runs every backward, also without a label."""
    hidden, weight, labels = make_problem(share_ignored=1.1)
    losses = token_losses(hidden, weight, labels)
    losses.sum().backward()
    assert not losses.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("is_inside", [True, False], ids=["backward_in_the_region", "backward_outside"])
def test_autocast_multiplies_in_bfloat16_and_gives_float32_gradients(is_inside):
    hidden, weight, labels = make_problem((2, 200))
    factors = torch.randn(400)
    wanted, hidden_grad, weight_grad = reference(hidden, weight, labels, factors)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (token_losses(hidden, weight, labels) * factors).sum()
        if is_inside:
            loss.backward()
    if not is_inside:
        loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert relative_error(hidden.grad, hidden_grad) < 1e-2
    assert relative_error(weight.grad, weight_grad) < 1e-2
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert relative_error(token_losses(hidden, weight, labels), wanted) < 1e-2


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, labels = make_problem()
    _, hidden_grad, _ = reference(hidden, weight, labels, torch.ones(60))
    token_losses(hidden, weight.detach(), labels).sum().backward()
    assert relative_error(hidden.grad, hidden_grad) < 1e-6


def test_a_form_for_devices_whose_labels_are_not_counted_gives_the_same():
    """On a GPU every token takes part, because counting the valid ones would be a wait."""
    hidden, weight, labels = make_problem(share_ignored=0.5)
    wanted = token_losses(hidden, weight, labels)
    (hidden_grad,) = torch.autograd.grad(wanted.sum(), hidden)
    losses = genesis_loss._apply_token_losses(hidden.flatten(0, -2), weight, labels.flatten(), torch.float32)
    (whole_grad,) = torch.autograd.grad(losses.sum(), hidden)
    assert torch.allclose(losses, wanted, atol=1e-6)
    assert torch.allclose(whole_grad, hidden_grad, atol=1e-6)


def peak_growth_bytes():
    """Resident memory that one forward and backward adds, in a process of its own."""
    num_tokens, dim, vocab_size = 8192, 8, 16_384
    hidden, weight = torch.randn(num_tokens, dim, requires_grad=True), torch.randn(vocab_size, dim, requires_grad=True)
    labels = torch.randint(0, vocab_size, (num_tokens,))
    token_losses(hidden[:8], weight, labels[:8]).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    token_losses(hidden, weight, labels).square().sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.slow
def test_peak_memory_is_less_than_half_of_the_logits():
    (growth,) = run_ranks(peak_growth_bytes, 1)
    assert growth < 8192 * 16_384 * 4 / 2
