"""Optimizer states in the host's memory: the results are those without offload, bit for bit, in pieces of any size."""

import copy
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from genesis.base.errors import UserError
from genesis.optim import GroupedOptimizer, OptimizerOptions, build_optimizer
from genesis.optim.offload import NUM_BUFFERS, Piece, StateOffload, check_room, choose
from genesis.optim.piece_memory import Passage
from genesis.optim.transfers import Traffic
from genesis_callbacks.testing import run_ranks
from tests.optim.test_optimizer import ADAMW, MUON, _decoder, _train, _whole

CPU = torch.device("cpu")
PAGE = 4096


def build(
    model: nn.Module,
    share: float,
    piece_bytes: int = PAGE,
    options: OptimizerOptions = ADAMW,
    directory: Path | None = None,
) -> tuple[GroupedOptimizer, Traffic]:
    optimizer, traffic = build_optimizer(model, options), Traffic()
    if share:
        optimizer.offload_states(share, CPU, traffic, piece_bytes=piece_bytes, directory=directory)
    return optimizer, traffic


def values(model: nn.Module, optimizer: GroupedOptimizer) -> dict[str, Tensor]:
    found = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": _whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "piece_bytes"), [(0.3, PAGE), (1.0, PAGE), (1.0, 3 * PAGE), (1.0, 1 << 20)])
def test_updates_are_those_without_offload_bit_for_bit(
    options: OptimizerOptions, dtype: torch.dtype, share: float, piece_bytes: int
) -> None:
    plain, moved = _decoder().to(dtype), _decoder().to(dtype)
    optimizer, (offloaded, traffic) = build_optimizer(plain, options), build(moved, share, piece_bytes, options)
    _train(plain, [optimizer], range(4))
    _train(moved, [offloaded], range(4))
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []
    num_bytes = sum(value.nbytes for state in offloaded.state.values() for value in state.values() if value.ndim)
    taken = traffic.take()
    assert taken.to_device_bytes == taken.to_host_bytes  # all that came went back
    assert taken.to_host_bytes / 4 >= share * num_bytes
    assert taken.to_host_bytes / 4 <= (num_bytes + 64 * len(offloaded.state) * 2 if share == 1.0 else 0.9 * num_bytes)


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_parameters_without_a_gradient_keep_their_moments(options: OptimizerOptions) -> None:
    plain, moved = _decoder(), _decoder()
    optimizer, (offloaded, _) = build_optimizer(plain, options), build(moved, 1.0, options=options)
    for model, one in ((plain, optimizer), (moved, offloaded)):
        _train(model, [one], range(2))
        one.zero_grad()
        _train(model, [], range(2, 3))  # gradients, for the step below
        for name, parameter in model.named_parameters():
            if "blocks.0" in name:
                parameter.grad = None
        one.step()
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_scaled_gradients_move_offloaded_states_as_any_others(
    options: OptimizerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genesis.optim.optimizer.is_host", lambda kind: False)  # AdamW's kernel scales
    plain, moved = _decoder(), _decoder()
    optimizer, (offloaded, _) = build_optimizer(plain, options), build(moved, 1.0, options=options)
    for model, one in ((plain, optimizer), (moved, offloaded)):
        _train(model, [], range(1))
        one.scale_gradients(0.3)
        one.step()
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_states_move_between_any_shares(options: OptimizerOptions) -> None:
    straight = _decoder()
    expected, _ = build(straight, 0.0, options=options)
    _train(straight, [expected], range(1))
    model = _decoder()
    optimizer, _ = build(model, 0.0, options=options)
    _train(model, [optimizer], range(1))
    for step, share in enumerate((1.0, 0.5, 0.0, 1.0, 0.2), start=1):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer, _ = build(model, share, options=options)
        optimizer.load_state_dict(state)  # torch's, which makes new groups, and tensors on the parameter's device
        for one in (expected, optimizer):
            for group in one.param_groups:
                group["lr"] = 1e-2 / step
        _train(straight, [expected], range(step, step + 1))
        _train(model, [optimizer], range(step, step + 1))
    assert differences(values(straight, expected), values(model, optimizer)) == []


def test_moments_that_a_restore_has_dropped_are_zeros_again() -> None:
    model, fresh = _decoder(), _decoder()
    optimizer, _ = build(model, 1.0)
    _train(model, [optimizer], range(3))
    model.load_state_dict(fresh.state_dict())
    optimizer.state.clear()
    other, _ = build(fresh, 0.0)
    _train(model, [optimizer], range(2))
    _train(fresh, [other], range(2))
    assert differences(values(fresh, other), values(model, optimizer)) == []


def test_muon_without_nesterov_is_the_same() -> None:
    plain, moved = _decoder(), _decoder()
    optimizer, (offloaded, _) = build_optimizer(plain, MUON), build(moved, 0.7, options=MUON)
    for model, one in ((plain, optimizer), (moved, offloaded)):
        for group in one.param_groups:
            if group["algorithm"] == "muon":
                group["nesterov"] = False
        _train(model, [one], range(3))
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []


@pytest.mark.parametrize("cut", [7, 16, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_has_the_same_bits_wherever_a_tensor_is_cut(dtype: torch.dtype, cut: int) -> None:
    generator = torch.Generator().manual_seed(0)
    buffer, gradient = (torch.randn(40_003, generator=generator).to(dtype) for _ in range(2))
    for weight in (0.05, 0.95):
        parts = buffer.clone()
        torch._foreach_lerp_(list(parts.split(cut)), list(gradient.split(cut)), weight)
        assert torch.equal(parts, torch.lerp(buffer, gradient, weight))


def shard(share: float, options: OptimizerOptions, directory: Path | None = None) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    model = _decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, _ = build(model, share, options=options, directory=directory)
    _train(model, [optimizer], range(4))
    held = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert all(isinstance(value, DTensor) for value in held)
    return values(model, optimizer)


@pytest.mark.parametrize("options", [ADAMW, pytest.param(MUON, marks=pytest.mark.slow)], ids=["adamw", "muon"])
def test_sharded_states_are_those_without_offload(options: OptimizerOptions) -> None:
    plain, moved = run_ranks(shard, 2, 0.0, options), run_ranks(shard, 2, 0.7, options)
    assert [differences(one, other) for one, other in zip(plain, moved, strict=True)] == [[], []]


# ---- what is chosen, and refusals


def test_the_largest_parameters_are_moved_until_the_share_is_reached() -> None:
    assert choose([5, 1, 4], 0.0) == []
    assert choose([5, 1, 4], 0.5) == [0]
    assert choose([5, 1, 4], 0.6) == [0, 2]
    assert choose([5, 1, 4], 1.0) == [0, 1, 2]


def test_a_host_without_memory_is_refused_before_the_first_step() -> None:
    with pytest.raises(
        UserError, match=r"optimizer_offload 0\.5 needs 2\.0 GiB .* and 1\.0 GiB are available: lower it"
    ):
        check_room(2 << 30, 1 << 30, 0.5)


@pytest.mark.parametrize("options", [OptimizerOptions(weight_decay=0.0), OptimizerOptions(eps=0.1)])
def test_other_options_give_the_same(options: OptimizerOptions) -> None:
    plain, moved = _decoder(), _decoder()
    optimizer, offloaded = build_optimizer(plain, options), build_optimizer(moved, options)
    offloaded.offload_states(1.0, CPU, Traffic(), piece_bytes=PAGE)
    _train(plain, [optimizer], range(2))
    _train(moved, [offloaded], range(2))
    assert differences(values(plain, optimizer), values(moved, offloaded)) == []


class Asked(NamedTuple):
    """What a step asked for, in the place of its mark."""

    what: str
    number: int

    def synchronize(self) -> None:
        """Returns at once: on the CPU a copy has ended."""


def test_a_piece_comes_while_the_one_before_it_is_updated_and_goes_while_the_next_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the order in which a step asks for copies and updates, and by the marks that each of them waits for."""
    asked: list[Asked] = []
    waits: list[Asked | None] = []
    behind: list[Asked | None] = []
    fetch, store, update = StateOffload._fetch, StateOffload._store, StateOffload._update

    def ask(what: str, number: int) -> Asked:
        asked.append(Asked(what, number))
        return asked[-1]

    def ask_fetch(self: StateOffload, passage: Passage, number: int, buffer: Any, after: Any) -> Any:
        behind.append(after)
        return *fetch(self, passage, number, buffer, None)[:2], ask("fetch", number)

    def ask_store(self: StateOffload, piece: Piece, buffer: Any, on_host: list[Tensor], after: Any) -> Any:
        store(self, piece, buffer, on_host, None)
        return ask("store", self._pieces.index(piece))

    def ask_update(self: StateOffload, piece: Piece, *rest: Any) -> None:
        ask("update", self._pieces.index(piece))
        update(self, piece, *rest)

    monkeypatch.setattr(StateOffload, "_fetch", ask_fetch)
    monkeypatch.setattr(StateOffload, "_store", ask_store)
    monkeypatch.setattr(StateOffload, "_update", ask_update)
    monkeypatch.setattr(Traffic, "wait_for", lambda self, mark, device: waits.append(mark))
    model = _decoder()
    optimizer, _ = build(model, 1.0)
    _train(model, [optimizer], range(1))
    count = len(behind)
    assert count > NUM_BUFFERS + 1
    expected = [("fetch", 0)]
    for number in range(count):
        expected += [("fetch", number + 1)] * (number + 1 < count) + [("update", number), ("store", number)]
    assert asked == expected
    assert waits == [*(("fetch", number) for number in range(count)), ("store", count - 1)]
    # A copy waits for the last piece in its buffer alone, which is not the one that is updated meanwhile.
    stored = [("store", number) for number in range(count - NUM_BUFFERS)]
    assert behind == [None] * NUM_BUFFERS + stored
