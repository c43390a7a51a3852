"""The proof at a fit's start, in real fits on the simulated device: it refuses kernels that add in any order."""

import os
import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from genesis.base.determinism import UNREPEATABLE
from genesis.base.errors import QuietExit, UserError
from genesis.model import attention
from genesis.model.key_blocks import KEY_BLOCK
from genesis.operations.doctor import fits
from genesis.operations.doctor.fits import SIZES, KeepLosses, Size, build_strategy, random_windows
from genesis.operations.doctor.probe import Task
from genesis.optim import AdamW
from genesis.train import module as module_file
from genesis.train.module import GenesisModule
from genesis.train.repeat_proof import LOSS, check_repeats, repeat_pass
from genesis_callbacks import SkipAwareLR, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.fakecuda.compiler import find_compiler
from tests.train.support import COMPILE_SECONDS, TINY, build_trainer, whole
from tests.train.support import build_strategy as build_ranks_strategy


class AddsInAnyOrder(torch.autograd.Function):
    """Causal attention whose backward adds the queries' gradient over blocks of keys in a random order.

    So do the kernels that add by atomics, such as the backward of flash attention by default.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return AddsInAnyOrder.weights(query, key) @ value

    @staticmethod
    def weights(query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors
        (grad,) = gradients
        weights = AddsInAnyOrder.weights(query, key)
        by_weight = grad @ value.mT
        scores = weights * (by_weight - (weights * by_weight).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
        grad_query = torch.zeros_like(query)
        blocks = list(range(0, key.shape[-2], KEY_BLOCK))
        random.SystemRandom().shuffle(blocks)
        for start in blocks:
            part = slice(start, start + KEY_BLOCK)
            grad_query += scores[..., part] @ key[..., part, :]
        return grad_query, scores.mT @ query, weights.mT @ grad


def attend_in_any_order(query: Tensor, key: Tensor, value: Tensor, metadata: Any, sinks: Tensor | None) -> Tensor:
    assert sinks is None
    groups = query.shape[2] // key.shape[2]
    heads = (query, key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2))
    out: Tensor = AddsInAnyOrder.apply(*(part.transpose(1, 2) for part in heads))  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)


def fit(seq_len: int, is_planted: bool, deterministic: bool, directory: str) -> tuple[str | None, list[str], int]:
    """Returns what refused a fit of two steps on the simulated device, the lines that it logged, and its steps."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "callbacks" / "tests"))
    import simulated  # noqa: PLC0415  # it lies outside of this package, and only ranks may load it

    simulated.load()
    dist.destroy_process_group()  # gloo has no backend for the device, and one process needs no group
    warnings.simplefilter("ignore")
    if is_planted:
        attention.attend = attend_in_any_order
    lines: list[str] = []
    module_file.rank_zero_info = lambda line: lines.append(str(line))  # type: ignore[assignment]
    size = Size(replace(SIZES["tiny"].decoder, max_seq_len=seq_len), 1)
    module, losses = GenesisModule(size.decoder), KeepLosses()
    task = Task("simulated", "tiny", directory)
    trainer = fits.build_trainer(task, build_strategy(), 2, [losses], deterministic=deterministic)
    try:
        trainer.fit(module, datamodule=random_windows(size))
    except UserError as error:
        return str(error), lines, trainer.global_step
    return None, lines, trainer.global_step


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    find_compiler()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("is_planted", [False, True])
def test_a_kernel_that_adds_in_any_order_is_refused_at_2048_tokens_and_a_sound_one_is_not(
    tmp_path: Path, is_planted: bool
) -> None:
    ((refused, lines, num_steps),) = run_ranks(fit, 1, 2048, is_planted, True, str(tmp_path))
    if is_planted:
        assert refused is not None
        assert "blocks.1.attention.query.weight" in refused
        assert "--trainer.deterministic false" in refused
        assert num_steps == 0
    else:
        assert refused is None
        assert num_steps == 2
        assert any("computed again" in line for line in lines)


@pytest.mark.process
@pytest.mark.slow
def test_two_blocks_of_keys_prove_nothing(tmp_path: Path) -> None:
    """The sum of two parts is the same in any order: a proof on sequences that short passes with the planted kernel."""
    ((refused, _, num_steps),) = run_ranks(fit, 1, 2 * KEY_BLOCK, True, True, str(tmp_path))
    assert refused is None
    assert num_steps == 2


@pytest.mark.process
@pytest.mark.slow
def test_a_run_without_deterministic_kernels_trains_and_one_line_says_what_it_lost(tmp_path: Path) -> None:
    ((refused, lines, num_steps),) = run_ranks(fit, 1, 512, True, False, str(tmp_path))
    assert refused is None
    assert num_steps == 2
    assert lines.count(UNREPEATABLE) == 1
    assert not any("computed again" in line for line in lines)


def train_on_ranks(strategy: str, is_proved: bool, wrong_rank: int | None) -> dict[str, Tensor] | str:
    """Returns the weights after three steps with dropout, or the line with which this rank refused to train."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    warnings.simplefilter("ignore")
    module_file.is_proof_needed = lambda device: is_proved
    if rank == wrong_rank:
        attention.attend = attend_in_any_order
    # Long rows, so that the planted kernel shows; one micro-batch has several rows.
    decoder = replace(TINY, dropout=0.1, max_seq_len=1024)
    module = GenesisModule(decoder, AdamW(lr=1e-2))
    trainer = build_trainer(build_ranks_strategy(strategy), world_size, 3, [TokenCounters(), SkipAwareLR()])
    size = Size(decoder, 1)
    try:
        trainer.fit(module, datamodule=random_windows(size, rank))
    except (UserError, QuietExit) as refused:
        return str(refused)
    assert module._must_repeat is False
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "full", "compiled_shards"])
def test_the_proof_changes_no_bit_of_a_run_on_several_ranks(strategy: str) -> None:
    plain = run_ranks(train_on_ranks, 2, strategy, False, None)
    proved = run_ranks(train_on_ranks, 2, strategy, True, None, timeout_seconds=COMPILE_SECONDS)
    for one, other in zip(plain, proved, strict=True):
        assert isinstance(one, dict)
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.process
@pytest.mark.slow
def test_one_rank_that_does_not_repeat_ends_all_ranks_with_one_line() -> None:
    first, second = run_ranks(train_on_ranks, 2, "replicated", True, 1)
    assert isinstance(first, str)
    assert first.startswith("rank 1: cpu (cpu) gave other bits")
    assert second == "2"  # its exit status: the first rank has printed the reason


def test_what_differs_first_in_the_backward_is_named() -> None:
    layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("first", "second", "third")})
    passes = iter((0.0, 1e-6))

    def run() -> Tensor:
        layers.zero_grad()
        x = layers["first"](torch.ones(4))
        x = x + next(passes) * x.detach()  # only the layers before and after it see another input
        loss: Tensor = layers["third"](layers["second"](x)).sum()
        loss.backward()
        return torch.ones(())

    found = repeat_pass(run, dict(layers.named_parameters()))
    assert found.names == (LOSS, "first.weight", "second.weight", "third.weight")
    assert found.differing == ("second.weight", "third.weight")
    with pytest.raises(UserError, match=r"2 of 4 differ, first third\.weight"):
        check_repeats(found, torch.device("cpu"))
