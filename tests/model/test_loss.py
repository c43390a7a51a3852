"""The loss: equal to the float64 reference, whatever the chunks, the dtype, autocast and the labels."""

import importlib.util
import resource
import sys
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import genesis.model.loss
from genesis.model.loss import IGNORE_INDEX, chunk_tokens, split_tokens, sum_cross_entropy
from genesis_callbacks.testing import run_ranks


def reference(hidden, weight, labels):
    """Each token's own softmax, in float64: loss and both gradients."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for vector, label in zip(hidden.flatten(0, -2), labels.flatten().tolist(), strict=True):
        if label != IGNORE_INDEX:
            logits = weight @ vector
            loss = loss + logits.logsumexp(0) - logits[label]
    (loss + 0.0 * hidden.sum() + 0.0 * weight.sum()).backward()
    return loss.detach(), hidden.grad, weight.grad


def make_problem(shape=(3, 20), dim=16, vocab_size=50, dtype=torch.float32, share_ignored=0.2):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, dim, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab_size, dim, dtype=dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, shape)
    labels[torch.rand(shape) < share_ignored] = IGNORE_INDEX
    return hidden, weight, labels


def relative_error(ours, wanted):
    return ((ours.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("vocab_size", [50, 9001], ids=["one_chunk", "three_chunks"])
def test_loss_and_gradients_equal_the_float64_reference(vocab_size):
    shape = (2, chunk_tokens(vocab_size, torch.device("cpu")) + 44) if vocab_size > 1000 else (3, 20)
    hidden, weight, labels = make_problem(shape, dim=4, vocab_size=vocab_size)
    wanted = reference(hidden, weight, labels)
    loss = sum_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    for ours, theirs in zip((loss, hidden.grad, weight.grad), wanted, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_upstream_factor_scales_the_gradients():
    hidden, weight, labels = make_problem()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    (sum_cross_entropy(hidden, weight, labels) * -0.125).backward()
    assert relative_error(hidden.grad, -0.125 * hidden_grad) < 1e-6
    assert relative_error(weight.grad, -0.125 * weight_grad) < 1e-6


def test_only_ignored_labels_give_zero_loss_and_zero_gradients():
    hidden, weight, labels = make_problem(share_ignored=1.1)
    loss = sum_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_ignored_tokens_get_no_gradient():
    hidden, weight, labels = make_problem(share_ignored=0.5)
    sum_cross_entropy(hidden, weight, labels).backward()
    assert not hidden.grad[labels == IGNORE_INDEX].any()
    assert hidden.grad[labels != IGNORE_INDEX].any(dim=-1).all()


def test_bfloat16_is_summed_in_float32():
    """Thousands of terms of size nine: a bfloat16 sum would keep three digits."""
    hidden, weight, labels = make_problem((4, 512), dtype=torch.bfloat16, share_ignored=0.0)
    wanted, hidden_grad, weight_grad = reference(hidden, weight, labels)
    loss = sum_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss, wanted) < 1e-4
    assert relative_error(hidden.grad, hidden_grad) < 1e-2
    assert relative_error(weight.grad, weight_grad) < 1e-2


def test_autocast_multiplies_in_bfloat16_and_gives_float32_gradients():
    hidden, weight, labels = make_problem((2, 200))
    wanted, hidden_grad, weight_grad = reference(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss = sum_cross_entropy(hidden, weight, labels)
        loss.backward()  # in the region, as a training step of several micro-batches may
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert relative_error(loss, wanted) < 1e-3
    assert relative_error(hidden.grad, hidden_grad) < 1e-2
    assert relative_error(weight.grad, weight_grad) < 1e-2


def test_weight_alone_and_hidden_alone_may_need_a_gradient():
    hidden, weight, labels = make_problem()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    sum_cross_entropy(hidden.detach(), weight, labels).backward()
    assert hidden.grad is None
    assert relative_error(weight.grad, weight_grad) < 1e-6
    sum_cross_entropy(hidden, weight.detach(), labels).backward()
    assert relative_error(hidden.grad, hidden_grad) < 1e-6


def test_without_gradients_the_loss_is_the_same():
    hidden, weight, labels = make_problem()
    with torch.no_grad():
        loss = sum_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    assert loss == sum_cross_entropy(hidden, weight, labels)


def test_an_evaluation_multiplies_once():
    hidden, weight, labels = make_problem((4, 500), vocab_size=9001)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sum_cross_entropy(hidden, weight, labels)
    assert counter.get_total_flops() == 2 * 2000 * 16 * 9001


def test_second_backward_is_refused():
    loss = sum_cross_entropy(*make_problem())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def peak_growth_bytes():
    """Resident memory that one forward and backward adds, in a process of its own."""
    num_tokens, dim, vocab_size = 8192, 8, 16_384
    hidden, weight = torch.randn(num_tokens, dim, requires_grad=True), torch.randn(vocab_size, dim, requires_grad=True)
    labels = torch.randint(0, vocab_size, (num_tokens,))
    sum_cross_entropy(hidden[:8], weight, labels[:8]).backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sum_cross_entropy(hidden, weight, labels).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.slow
def test_peak_memory_is_less_than_half_of_the_logits():
    logits_bytes = 8192 * 16_384 * 4
    (growth,) = run_ranks(peak_growth_bytes, 1)
    assert growth < logits_bytes / 2


def test_no_installed_package_changes_the_loss(monkeypatch):
    """A kernel that is installed is not used: what a run computes follows from its recipe."""
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    spec = importlib.util.spec_from_file_location("another_loss", genesis.model.loss.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert not [name for name in vars(fresh) if "liger" in name]


def test_chunks_on_a_gpu_have_equally_many_tokens_and_those_on_a_cpu_stay():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    most = chunk_tokens(49_152, gpu)
    assert split_tokens(most, 49_152, gpu) == most
    assert split_tokens(3 * most + 2, 49_152, gpu) == -(-(3 * most + 2) // 4)
    assert split_tokens(1000, 9001, cpu) == chunk_tokens(9001, cpu)
