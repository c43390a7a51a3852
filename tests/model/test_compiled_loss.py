"""A chunk of the loss in one function, as on accelerators: the values and gradients of the operators on the CPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import genesis.model.loss
from genesis.model import device_proofs
from genesis.model.device_proofs import LOSS_PROOF
from genesis.model.loss import (
    IGNORE_INDEX,
    chunk_tokens,
    lose_rows_with_gradient,
    split_tokens,
    sum_cross_entropy,
    token_losses,
)
from tests.commands import REPOSITORY

VOCAB_SIZE, DIM = 50, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU compute the loss as an accelerator does, without the compiler."""
    monkeypatch.setattr(genesis.model.loss, "_is_fused", lambda kind: True)
    monkeypatch.setattr(genesis.model.loss, "_compile", lambda function: function)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Makes the CPU compute the loss as an accelerator does, by torch.compile's own generated code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(genesis.model.loss, "_is_fused", lambda kind: True)
    torch.compiler.reset()
    genesis.model.loss._compile.cache_clear()
    yield
    genesis.model.loss._compile.cache_clear()
    torch.compiler.reset()


def compute(
    num_tokens: int, dtype: torch.dtype, *, share_ignored: float = 0.3, is_frozen: bool = False
) -> list[Tensor]:
    """Returns both losses with the gradients of hidden states and output weight."""
    generator = torch.Generator().manual_seed(num_tokens)
    labels = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator)
    labels[torch.rand(num_tokens, generator=generator) < share_ignored] = IGNORE_INDEX
    given = [torch.randn(rows, DIM, generator=generator).to(dtype) for rows in (num_tokens, VOCAB_SIZE)]
    found = []
    for loss in (sum_cross_entropy, token_losses):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in given)
        weight.requires_grad_(not is_frozen)
        losses = loss(hidden, weight, labels)
        # In float16 a gradient of a rare id is 0 without the factor, as a gradient scaler brings it.
        (losses * torch.linspace(1.0, 9.0, losses.numel())).sum().backward()
        assert losses.dtype == torch.float32
        assert (weight.grad is None) == is_frozen
        found += [losses.detach(), hidden.grad, weight.grad]
    return [tensor for tensor in found if tensor is not None]


def assert_near(ours: list[Tensor], eager: list[Tensor]) -> None:
    for one, other in zip(ours, eager, strict=True):
        assert one.dtype == other.dtype
        # Within float32's rounding; a value between two narrow numbers may become either of them.
        rounding = 1e-6 if one.dtype == torch.float32 else 1e-3
        difference = (one.double() - other.double()).norm()
        assert difference <= rounding * other.double().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_one_function_for_a_chunk_gives_the_values_and_gradients_of_the_operators(
    dtype: torch.dtype, is_frozen: bool, request: pytest.FixtureRequest
) -> None:
    eager = compute(70, dtype, is_frozen=is_frozen)
    request.getfixturevalue("fused")
    assert_near(compute(70, dtype, is_frozen=is_frozen), eager)


def test_only_ignored_labels_give_zero_and_no_gradient(fused: None) -> None:
    assert not any(bool(tensor.any()) for tensor in compute(7, torch.float32, share_ignored=1.1))


def test_chunks_of_a_window_add_up_and_a_validation_multiplies_once(
    fused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compute(70, torch.float32)
    monkeypatch.setattr(genesis.model.loss, "split_tokens", lambda num_tokens, *_: 32)
    assert_near(compute(70, torch.float32), whole)
    with torch.no_grad():
        given = (torch.ones(70, DIM), torch.eye(VOCAB_SIZE, DIM), torch.arange(70) % VOCAB_SIZE)
        assert sum_cross_entropy(*given) == pytest.approx(float(token_losses(*given).sum()), rel=1e-6)


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_no_operator_of_the_function_adds_in_an_order_that_a_gpu_chooses() -> None:
    with Names() as names:
        lose_rows_with_gradient(torch.ones(3, 5), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert names.found
    assert not [name for name in names.found if "scatter" in name or "index_add" in name or "put" in name]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code_gives_the_same_and_serves_any_number_of_rows(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    eager = {num_tokens: compute(num_tokens, dtype) for num_tokens in (70, 33, 128)}
    request.getfixturevalue("compiled")
    assert_near(compute(70, dtype), eager[70])
    with torch.compiler.set_stance("fail_on_recompile"):  # a last chunk, a validation
        assert_near(compute(33, dtype), eager[33])
        assert_near(compute(128, dtype), eager[128])


@pytest.mark.parametrize("num_first", [33, 70])
def test_the_compiler_gets_one_hint_whichever_number_of_rows_comes_first(
    monkeypatch: pytest.MonkeyPatch, num_first: int
) -> None:
    """It decides by the hint how a row is summed: a resumed run may begin with another number than the run before."""
    hints: list[int] = []

    def keep_hint(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        shapes = torch._guards.detect_fake_mode(inputs).shape_env
        hints.extend(shapes.var_to_hint_override.values())
        return graph.forward

    monkeypatch.setattr(genesis.model.loss, "_is_fused", lambda kind: True)
    monkeypatch.setattr(genesis.model.loss, "_compile", lambda function: torch.compile(function, backend=keep_hint))
    torch.compiler.reset()
    hidden, weight = torch.ones(num_first, DIM, requires_grad=True), torch.ones(VOCAB_SIZE, DIM)
    sum_cross_entropy(hidden, weight, torch.zeros(num_first, dtype=torch.int64))
    assert {*hints} == {chunk_tokens(VOCAB_SIZE, hidden.device)}


def test_a_compiled_loss_that_is_wrong_or_has_no_compiler_runs_operator_by_operator(
    fused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(device_proofs, "find_missing_compiler", lambda kind: None)
    LOSS_PROOF.prove(cpu)
    monkeypatch.setattr(genesis.model.loss, "_lose", lambda logits, labels: (logits[:, :1].float(), logits.float()))
    with pytest.raises(RuntimeError, match="the loss in one kernel differs from the slower way"):
        LOSS_PROOF.prove(cpu)
    monkeypatch.setattr(device_proofs, "find_missing_compiler", lambda kind: "no compiler: gone")
    with pytest.raises(RuntimeError, match="no compiler: gone"):
        LOSS_PROOF.prove(cpu)


def test_the_failed_proof_of_the_loss_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genesis.model.loss, "_by_operators", set())
    monkeypatch.setattr(genesis.model.loss, "_lacks_compiler", lambda kind: False)
    assert genesis.model.loss._is_fused("cuda")
    LOSS_PROOF.take_slow(torch.device("cuda"))
    assert not genesis.model.loss._is_fused("cuda")


def test_without_a_compiler_the_operators_run_and_one_line_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genesis.model.loss, "find_missing_compiler", lambda kind: "torch.compile finds none: gone")
    genesis.model.loss._lacks_compiler.cache_clear()
    with pytest.warns(UserWarning, match="finds none: gone; the loss runs operator by operator on cuda, .* Triton"):
        assert not genesis.model.loss._is_fused("cuda")
    assert not genesis.model.loss._is_fused("cuda")  # without a second warning
    genesis.model.loss._lacks_compiler.cache_clear()
    assert not genesis.model.loss._is_fused("cpu")
    assert split_tokens(70, VOCAB_SIZE, torch.device("cpu")) > 70


@pytest.mark.slow
@pytest.mark.process
def test_a_compiler_that_is_missing_is_known_from_other_errors(tmp_path: Path) -> None:
    program = "from genesis.base.device import find_missing_compiler; print(find_missing_compiler('cpu'))"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for changes, expected in (({"CXX": "/none", "PATH": ""}, "torch.compile finds no compiler: "), ({}, "None")):
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, **changes},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.startswith(expected)
