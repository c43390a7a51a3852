"""On a real GPU: digests, copies, attention and products are those of the CPU; runs resume bit for bit."""

import warnings
from typing import Literal

import pytest
import torch
from torch import Tensor

from genesis.base.device import find_missing_compiler, has_bfloat16
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.expert_products import suits_grouped
from genesis.model.experts import Experts
from genesis.model.loss import IGNORE_INDEX, sum_cross_entropy, token_losses
from genesis.model.norm import RMSNorm
from genesis.operations.doctor.probe import Probe, SkippedError
from genesis.operations.doctor.training import VARIANTS, train_on_all, watch_waits
from genesis.optim import build_optimizer
from genesis_callbacks.checkpoint.device_proof import prove_device
from tests.algorithms import algorithm_of
from tests.killed_run import kill_alone

pytestmark = [pytest.mark.cuda, pytest.mark.process]


def check(probe: Probe) -> None:
    """Fails with what the doctor's part found wrong."""
    assert probe.findings.checks
    assert [check for check in probe.findings.checks if not check["passed"]] == []


def test_digests_and_pinned_copies_are_those_of_the_cpu(kind: str) -> None:
    report = prove_device(torch.device(kind, 0))
    assert report.failures == ()
    assert report.path.has_digests
    assert report.path.has_pinning


# ---- kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_the_loss_in_one_kernel_is_that_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    if find_missing_compiler(kind) is not None:
        pytest.skip("torch.compile finds no compiler")
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(rows, 64, generator=generator).to(dtype) for rows in (700, 1000)]
    labels = torch.randint(1000, (700,), generator=generator)
    labels[::5] = IGNORE_INDEX

    def run(device: str, num_tokens: int) -> list[Tensor]:
        found = []
        for loss in (sum_cross_entropy, token_losses):
            hidden, weight = (
                tensor.to(device, copy=True).requires_grad_() for tensor in (given[0][:num_tokens], given[1])
            )
            losses = loss(hidden, weight, labels[:num_tokens].to(device))
            found += [losses, *torch.autograd.grad(losses.sum(), (hidden, weight))]
        return [tensor.detach().cpu().double() for tensor in found]

    for num_tokens in (700, 333):  # the second without another compilation
        for one, other in zip(run(kind, num_tokens), run("cpu", num_tokens), strict=True):
            # TF32 and bfloat16 round the products.
            assert (one - other).norm() < 1e-2 * other.norm()
    again = run(kind, 333)
    assert all(torch.equal(one, other) for one, other in zip(again, run(kind, 333), strict=True))


def test_norms_of_queries_take_the_fused_kernel_under_autocast(kind: str) -> None:
    norm, x = RMSNorm(64, 1e-6).to(kind), torch.randn(2, 8, 4, 64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), torch.autocast(kind, torch.bfloat16):
        warnings.simplefilter("error")  # torch warns of separate operations
        out = norm(x.to(kind, torch.bfloat16))
    assert out.dtype == torch.float32
    expected = norm.cpu()(x.bfloat16().float())
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gradients_that_the_kernel_scales_are_multiplied_ones(kind: str, name: Literal["adamw", "muon"]) -> None:
    def update(*, in_kernel: bool) -> dict[str, Tensor]:
        decoder = Decoder(
            DecoderConfig(dim=64, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=64, max_seq_len=8, vocab_size=64)
        )
        decoder.init_weights(0)
        decoder.to(kind)
        optimizer = build_optimizer(decoder, algorithm_of(name, lr=1e-2))
        generator = torch.Generator().manual_seed(0)
        for parameter in decoder.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(kind)
            if not in_kernel:
                parameter.grad *= 0.3
        if in_kernel:
            optimizer.scale_gradients(0.3)
        optimizer.step()
        found = {key: parameter.detach() for key, parameter in decoder.named_parameters()}
        return found | {f"{key}.grad": p.grad for key, p in decoder.named_parameters() if p.grad is not None}

    expected = update(in_kernel=False)
    for key, tensor in update(in_kernel=True).items():
        torch.testing.assert_close(tensor, expected[key], rtol=2e-6, atol=2e-6, msg=key)


def test_experts_in_one_kernel_are_those_of_a_loop_also_without_rows(kind: str) -> None:
    """The first, a middle and the last expert get no row, and rows behind the last expert belong to none."""
    generator = torch.Generator().manual_seed(0)
    experts = Experts(num_experts=6, num_active=1, dim=128, ffn_dim=64).to(kind, torch.bfloat16)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 8)
    counts = torch.tensor([0, 40, 0, 1, 87, 0], device=kind)
    rows = torch.randn(160, 128, generator=generator).to(kind, torch.bfloat16)
    upstream = torch.randn(160, 128, generator=generator).to(kind, torch.bfloat16)
    if not suits_grouped(rows, torch.bfloat16, experts.gate):
        pytest.skip("the device has no fast kernel for all experts")

    def run(products: Literal["grouped", "loop"]) -> list[Tensor]:
        experts.products = products
        torch.full((1 << 24,), torch.nan, device=kind)  # what a kernel leaves unwritten is no zero
        own = rows.clone().requires_grad_()
        out = experts(own, counts)
        return [out, *torch.autograd.grad(out, [own, *experts.parameters()], upstream)]

    for one, other in zip(run("grouped"), run("loop"), strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=4e-2, rtol=4e-2)


def test_products_of_bfloat16_come_out_in_float32(kind: str) -> None:
    if kind != "cuda":
        pytest.skip("torch has out_dtype on CUDA only")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator).to(torch.bfloat16) for _ in range(2))
    wanted = a.double() @ b.double().t()
    found = torch.mm(a.to(kind), b.to(kind).t(), out_dtype=torch.float32)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=1e-3, rtol=1e-4)
    total = torch.ones(256, 256, device=kind)
    found = torch.addmm(total, a.to(kind), b.to(kind).t(), out_dtype=torch.float32)
    torch.testing.assert_close(found.cpu().double(), wanted + 1, atol=1e-3, rtol=1e-4)


def test_the_chunked_loss_and_its_gradients_are_those_of_the_cpu(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(700, 64, generator=generator), torch.randn(999, 64, generator=generator)
    labels = torch.randint(999, (700,), generator=generator)
    labels[::9] = -100

    def run(device: str) -> list[Tensor]:
        own = [tensor.to(device).requires_grad_() for tensor in (hidden, weight)]
        total = sum_cross_entropy(own[0], own[1], labels.to(device))
        return [tensor.cpu() for tensor in (total, *torch.autograd.grad(total, own))]

    torch.set_float32_matmul_precision("highest")
    for one, other in zip(run(kind), run("cpu"), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


# ---- fits


def test_steps_have_finite_losses(probe: Probe) -> None:
    watch_waits(probe)
    check(probe)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_run_that_is_killed_resumes_bit_for_bit(probe: Probe, mode: str) -> None:
    kill_alone(probe, mode)
    check(probe)


@pytest.mark.parametrize("variant", ["ddp", "fsdp2"])
def test_a_run_on_all_devices_resumes_bit_for_bit(probe: Probe, variant: str, all_devices: int) -> None:
    if variant == "ddp" and all_devices == 1:
        pytest.skip("there is one device: the test before this one has run it")
    if variant == "fsdp2" and probe.task.kind not in ("cuda", "xpu"):
        pytest.skip("torch.distributed has no backend for the device")
    kill_alone(probe, "process", variant, all_devices)
    check(probe)


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"ddp", "fsdp2"}))
def test_every_way_to_train_changes_the_parameters(probe: Probe, variant: str, kind: str) -> None:
    if variant == "bf16-true" and not has_bfloat16(kind):
        pytest.skip("the device has no bfloat16")
    try:
        train_on_all(probe, variant)
    except SkippedError as reason:
        pytest.skip(str(reason))
    check(probe)
