"""A mixture trains alike under every strategy; its balance bias follows the window over all ranks, and is restored."""

import csv
import math
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from genesis.base.errors import UserError
from genesis.data.window import IGNORE_INDEX
from genesis.model.balance import RouterCollapseWarning
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.mixture import Mixture, MixtureConfig, find_routers
from genesis.strategies import Sharded, expert_parallel
from genesis.strategies.expert_parallel import Exchange, Flight
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import CheckpointError, SaveFailedError
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.simulated_ranks import cut_on
from tests.train.support import (
    COMPILE_SECONDS,
    TINY,
    KeepGradients,
    build_module,
    build_strategy,
    build_trainer,
    loader,
    rows_of_step,
    whole,
)
from tests.train.test_part_statistics import Kill
from tests.train.test_step import PoisonOneRank

MIXTURE = MixtureConfig(
    num_experts=8, top_k=2, ffn_dim=16, shared_ffn_dim=16, has_shared_gate=True, scores="sigmoid", num_dense_layers=1,
    dense_ffn_dim=48, has_balance_bias=True, balance_bias_rate=0.1, balance_loss=0.1, z_loss=0.1,
)  # fmt: skip
MIXED = replace(TINY, ffn_dim=None, feed_forward=MIXTURE)
PART = "blocks.1.feed_forward"
BIAS = f"decoder.{PART}.router.balance_bias"
STEPS = 6
EMPTY, POISONED = 2, 3


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def reference(step: int) -> tuple[dict[str, Tensor], dict[str, float], Tensor]:
    """Returns gradient, log and loads of one big batch, in float64."""
    model = Decoder(MIXED)
    model.init_weights(0)
    model.double()
    rows = rows_of_step(step)
    counted = rows.labels != IGNORE_INDEX
    logits, statistics = model(rows.input_ids, document_ids=rows.document_ids, has_statistics=True, counted=counted)
    num_valid = int(counted.sum())
    loss = cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    auxiliary = statistics[PART].loss_sum
    ((loss + auxiliary) / num_valid).backward()
    gradients = {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    load = statistics[PART].counts["load_tokens"].double()
    assert int(load.sum()) == 2 * num_valid
    return (
        gradients,
        {
            "train/loss": float(loss.detach()) / num_valid,
            "train/auxiliary_loss": float(auxiliary.detach()) / num_valid,
            "train/expert_imbalance": float(load.max() / load.mean()),
            "train/grad_norm": math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values())),
            f"parts/{PART}.imbalance": float(load.max() / load.mean()),
            f"parts/{PART}.router_entropy": float(statistics[PART].counts["router_entropy_nats"]) / num_valid,
            **{f"parts/{PART}.load_tokens.{index}": float(count) for index, count in enumerate(load)},
        },
        load,
    )


def one_step(strategy: str, precision: str) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keep, module = KeepGradients(), build_module(MIXED)
    trainer = build_trainer(
        build_strategy(strategy), world_size, 1, [keep, TokenCounters()], precision=precision, gradient_clip_val=0.0
    )
    trainer.fit(module, loader(1, rank, world_size))
    tensors = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return {
        "gradients": keep.gradients,
        "log": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "tensors": tensors,
    }


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("single", 1), ("replicated", 2), ("full", 2),
        slow("grad_op", 2), slow("hybrid", 4), slow("two_blocks", 2), slow("reduced_each", 2), slow("offload", 2),
        slow("half_experts", 2),
        slow("zero1", 2), slow("checkpointing", 2), slow("compiled", 2), slow("compiled_shards", 2),
        slow("experts_2", 2), slow("experts_2", 4), slow("experts_4", 4), slow("experts_hybrid", 4),
        slow("experts_each", 2), slow("experts_compiled", 2), slow("experts_2_compiled", 2), slow("host_compiled", 2),
        slow("experts_4_compiled", 4),
    ],
)  # fmt: skip
def test_gradients_log_and_bias_are_those_of_one_big_batch(strategy: str, world_size: int) -> None:
    gradients, logged, load = reference(0)
    for found in run_ranks(one_step, world_size, strategy, "32-true", timeout_seconds=COMPILE_SECONDS):
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in found["gradients"].items():
            assert (gradient.double() - gradients[name]).abs().max() < 1e-6, name
        for name, value in logged.items():
            assert found["log"][name] == pytest.approx(value, rel=0 if "load" in name else 1e-5), name
        step = (load.mean() - load).sign()
        expected = (0.1 * (step - step.mean())).float()
        assert torch.equal(found["tensors"][BIAS], expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "full", "compiled_shards", "experts_2"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_router_is_trained_in_float32_under_any_precision(strategy: str, precision: str) -> None:
    first, second = run_ranks(one_step, 2, strategy, precision, timeout_seconds=COMPILE_SECONDS)
    router = f"decoder.{PART}.router.weight"
    assert first["gradients"][router].dtype == first["tensors"][router].dtype == torch.float32
    is_rounded = first["gradients"][router] == first["gradients"][router].bfloat16()
    assert is_rounded.float().mean() < 0.1
    exact, _, _ = reference(0)
    for name, gradient in first["gradients"].items():
        # Some tokens see other experts where activations are rounded.
        assert (gradient.double() - exact[name]).norm() < 0.5 * exact[name].norm() + 1e-3, name
    assert all(torch.equal(first["tensors"][name], tensor) for name, tensor in second["tensors"].items())


def train(
    run_dir: str,
    corpus: str,
    strategy: str,
    kill_at_step: int,
    name: str = "adamw",
    dropout: float = 0.1,
) -> dict[str, Any]:
    """Trains to the last step, from the newest checkpoint if there is one.

    Args:
        run_dir: The run.
        corpus: The corpus; without one, the rows of the tests, and two windows are skipped.
        strategy: The strategy.
        kill_at_step: The step at whose start the rank is killed.
        name: The optimizer.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    decoder = replace(MIXED, dropout=0.1, vocab_size=320 if corpus else MIXED.vocab_size)
    module = GenesisModule(decoder, algorithm_of(name, lr=1e-2))
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, every_n_steps=1 if corpus else 4, keep_last=None, mode="sync")
    biases = Biases()
    callbacks = [
        TokenCounters(), SkipAwareLR(total_updates=STEPS, warmup_updates=2),
        PoisonOneRank(-1 if corpus else POISONED, world_size - 1), checkpoint, biases, Kill(kill_at_step),
    ]  # fmt: skip
    trainer = build_trainer(build_strategy(strategy), world_size, STEPS, callbacks, gradient_clip_val=1.0)
    latest = checkpoint.latest()
    data: Any = loader(STEPS, rank, world_size, (EMPTY,))
    if corpus:
        data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    trainer.fit(module, data, ckpt_path=latest)
    tensors = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return {"tensors": tensors, "biases": [*biases.values, tensors[BIAS]]}


class Biases(pl.Callback):
    """Keeps the bias at the beginning of each step."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.values.append(whole(pl_module.get_parameter(BIAS)))


@pytest.mark.parametrize(
    ("strategy", "world_size", "name"),
    [
        slow("replicated", 1, "muon"), slow("replicated", 2, "adamw"), slow("full", 2, "muon"),
        slow("checkpointing", 2, "adamw"), slow("experts_2", 4, "adamw"), slow("experts_2", 2, "muon"),
        slow("host_experts", 2, "adamw"), slow("host_experts", 2, "muon"),
        slow("half_experts", 2, "muon"),
    ],
)  # fmt: skip
def test_a_killed_run_goes_on_bit_for_bit_with_its_bias(
    strategy: str, world_size: int, name: str, tiny_corpus: Path, tmp_path: Path
) -> None:
    straight, killed, corpus = str(tmp_path / "straight"), str(tmp_path / "killed"), str(tiny_corpus)
    expected = run_ranks(train, world_size, straight, corpus, strategy, -1, name)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(train, world_size, killed, corpus, strategy, 3, name)
    found = run_ranks(train, world_size, killed, corpus, strategy, -1, name)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours["biases"][0], theirs["biases"][3])
        assert bool(ours["biases"][0].ne(0).any())
        assert all(torch.equal(ours["tensors"][key], tensor) for key, tensor in theirs["tensors"].items())


class Whole(pl.Callback):
    """Keeps parameters and optimizer states after the restore and at the end, whole."""

    def __init__(self) -> None:
        self.at_start: dict[str, Tensor] = {}
        self.at_end: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_start = self.read(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_end = self.read(trainer, pl_module)

    def read(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Tensor]:
        found = {name: whole(parameter) for name, parameter in pl_module.named_parameters()}
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        for parameter, state in trainer.optimizers[0].state.items():
            found |= {f"{names[parameter]}.{key}": whole(value) for key, value in state.items()}
        return found


def continue_to(
    step: int, run_dir: str, corpus: str, strategy: str, num_experts: int, name: str = "adamw"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Continues a run to a step, with saves by a process; returns what it began and what it ended with."""
    world_size = int(os.environ["WORLD_SIZE"])
    decoder = replace(MIXED, vocab_size=320, feed_forward=replace(MIXTURE, num_experts=num_experts))
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, every_n_steps=1, keep_last=2)
    state = Whole()
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=STEPS, warmup_updates=2), checkpoint, state]
    trainer = build_trainer(build_strategy(strategy), world_size, step, callbacks, gradient_clip_val=1.0)
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    trainer.fit(GenesisModule(decoder, algorithm_of(name, lr=1e-2)), data, ckpt_path=checkpoint.latest())
    return state.at_start, state.at_end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "strategies"),
    [
        (8, [("full", 2), ("experts_2", 2), ("experts_4", 4), ("host_experts", 2), ("single", 1)]),
        (6, [("experts_2", 4), ("experts_2", 2), ("full", 4), ("single", 1)]),  # a rank's 3 experts are cut by rows
    ],
)
def test_a_run_goes_on_under_other_numbers_of_ranks_that_share_the_experts(
    num_experts: int, strategies: list[tuple[str, int]], tiny_corpus: Path, tmp_path: Path
) -> None:
    corpus, last = str(tiny_corpus), len(strategies)
    ((_, alone),) = run_ranks(continue_to, 1, last, str(tmp_path / "alone"), corpus, "single", num_experts)
    before: dict[str, Tensor] = {}
    for step, (strategy, world_size) in enumerate(strategies, 1):
        ranks = run_ranks(continue_to, world_size, step, str(tmp_path / "moved"), corpus, strategy, num_experts)
        for restored, _ in ranks:
            assert before.keys() <= restored.keys()
            assert [name for name, one in before.items() if not torch.equal(restored[name], one)] == []
        before = ranks[0][1]
    assert sum(name.endswith("exp_avg_sq") for name in before) > 20
    assert before.keys() == alone.keys()
    for name, tensor in alone.items():
        assert (before[name] - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (TINY, "expert_parallel is 2, but the model has no experts: leave it at 1"),
        (
            replace(MIXED, feed_forward=replace(MIXTURE, num_experts=9)),
            "expert_parallel 2 does not divide num_experts 9, and every rank holds as many experts: choose",
        ),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(decoder: DecoderConfig, message: str) -> None:
    for found in run_ranks(refuse, 2, decoder):
        assert message in found


def refuse(decoder: DecoderConfig, optimizer: str = "adamw") -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = build_trainer(build_strategy("experts_2"), world_size, 1, [TokenCounters()])
    with pytest.raises(UserError) as caught:
        trainer.fit(GenesisModule(decoder, algorithm_of(optimizer)), loader(1, rank, world_size))
    return str(caught.value)


def refuse_of_six(decoder: DecoderConfig) -> str:
    dist.destroy_process_group()  # the process stands for one of six ranks
    with pytest.raises(UserError) as caught, cut_on(0, 6, decoder, {"expert_parallel": 2}):
        pass
    return str(caught.value)


@pytest.mark.parametrize(("dim", "stack"), [(32, "4 tensors of 16 by 32"), (48, "4 tensors of 16")])
def test_weights_and_biases_that_ranks_with_the_same_experts_cannot_share_are_refused(dim: int, stack: str) -> None:
    part = MixtureConfig(num_experts=8, top_k=2, ffn_dim=16, has_biases=True, gate_limit=7.0)
    (found,) = run_ranks(refuse_of_six, 1, replace(MIXED, dim=dim, feed_forward=part))
    assert f"3 ranks hold the same experts and cannot share a stack of {stack}: choose expert_parallel" in found


def log_an_empty_window(path: Path) -> None:
    trainer = build_trainer("auto", 1, 2, [TokenCounters()], logger=CSVLog(path))
    trainer.fit(build_module(MIXED), loader(2, 0, 1, (1,)))


def test_a_window_without_valid_tokens_logs_no_balance_and_no_value_that_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    run_ranks(log_an_empty_window, 1, path)
    first, empty = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    assert float(first["train/expert_imbalance"]) >= 1.0
    assert empty["train/expert_imbalance"] == empty[f"parts/{PART}.router_entropy"] == ""
    assert "nan" not in {*first.values(), *empty.values()}


class Watch:
    """Notes in which order a mixture sends rows, computes its shared expert, and waits for the rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        for name, owner, method in (
            ("send", Exchange, "send"),
            ("shared", Mixture, "_run_shared"),
            ("wait", Flight, "finish"),
        ):
            monkeypatch.setattr(owner, method, self.noting(name, getattr(owner, method)))

    def noting(self, name: str, method: Any) -> Any:
        def run(*arguments: Any) -> Any:
            self.order.append(name)
            return method(*arguments)

        return run


def order_of_dispatch() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        one_step("experts_2", "32-true")
        return watch.order[:3]


def test_the_shared_expert_computes_while_rows_travel() -> None:
    assert run_ranks(order_of_dispatch, 2) == [["send", "shared", "wait"]] * 2


@pytest.mark.slow
def test_muon_refuses_matrices_of_experts_that_ranks_cut_before_the_first_step() -> None:
    decoder = replace(MIXED, feed_forward=replace(MIXTURE, num_experts=6))
    for message in run_ranks(refuse, 4, decoder, "muon"):
        assert message.startswith(
            "the optimizer is muon, which needs whole matrices, and with expert_parallel 2 always 2 ranks hold the "
            "same 3 experts"
        )
    for message in run_ranks(refuse_in_the_optimizer, 4, decoder):
        assert message.startswith(
            "the optimizer is muon, which needs whole matrices, and 2 ranks cut the matrices of 16 by 32 of the experts"
        )


def refuse_in_the_optimizer(decoder: DecoderConfig) -> str:
    """Returns what the optimizer says to those who shard experts without a strategy's check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sharded, "check_options", lambda *_: None)
        return refuse(decoder, "muon")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("experts_2", 2), ("experts_2", 4), ("full", 2)])
def test_muon_updates_shared_experts_as_one_process_does(
    strategy: str, world_size: int, tiny_corpus: Path, tmp_path: Path
) -> None:
    corpus = str(tiny_corpus)
    ((_, alone),) = run_ranks(continue_to, 1, 2, str(tmp_path / "alone"), corpus, "single", 8, "muon")
    for _, found in run_ranks(continue_to, world_size, 2, str(tmp_path / "shared"), corpus, strategy, 8, "muon"):
        assert found.keys() == alone.keys()
        for name, tensor in alone.items():
            # Muon multiplies in bfloat16, and moves a matrix by its learning rate, 2e-2, in each of two steps.
            assert (found[name] - tensor).abs().max() < 1e-3, name


@pytest.mark.slow
def test_a_skipped_window_leaves_the_bias_alone(tmp_path: Path) -> None:
    for rank in run_ranks(train, 2, str(tmp_path / "run"), "", "replicated", -1):
        steps = [not torch.equal(a, b) for a, b in zip(rank["biases"], rank["biases"][1:], strict=False)]
        assert [step for step, is_moved in enumerate(steps) if not is_moved] == [EMPTY, POISONED]


class Drift(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1:
            pl_module.get_parameter(BIAS).data[3] += 1e-3


def drift(run_dir: str) -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, every_n_steps=1, mode="sync")
    trainer = build_trainer(build_strategy("replicated"), world_size, 1, [TokenCounters(), checkpoint, Drift()])
    with pytest.raises((SaveFailedError, CheckpointError)) as caught:
        trainer.fit(build_module(MIXED), loader(1, rank, world_size))
    return str(caught.value)


def one_step_of_a_late_rank(strategy: str) -> None:
    """Runs a step in which rows and gradients of one rank come late, while the other rank compiles what takes them."""
    exchange = expert_parallel.all_to_all_single_autograd
    if os.environ["RANK"] == "1":

        def come_late(*arguments: Any) -> Any:
            time.sleep(1.0)  # the fault itself: where it is too short, the test passes without having shown anything
            rows = exchange(*arguments)
            if rows.requires_grad:
                rows.register_hook(lambda _: time.sleep(1.0))  # their gradients as well
            return rows

        expert_parallel.all_to_all_single_autograd = come_late
    one_step(strategy, "32-true")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["experts_compiled", "experts_2"])
def test_ranks_that_compile_wait_for_a_late_one_and_go_on(strategy: str) -> None:
    run_ranks(one_step_of_a_late_rank, 2, strategy, timeout_seconds=COMPILE_SECONDS)


@pytest.mark.slow
def test_a_bias_that_differs_between_ranks_is_never_saved(tmp_path: Path) -> None:
    for message in run_ranks(drift, 2, str(tmp_path)):
        assert "balance_bias: rank 1 holds other values than rank 0: the replicas have drifted apart" in message


def test_a_router_that_collapses_is_named_once_with_its_layer() -> None:
    module = build_module(replace(MIXED, feed_forward=replace(MIXTURE, balance_bias_rate=1e-6)))

    class Collapse(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            for router in find_routers(pl_module).values():
                assert router.balance_bias is not None
                router.balance_bias.data[:2] = 100.0

    trainer = build_trainer("auto", 1, 2, [TokenCounters(), Collapse()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(2, 0, 1))
    (warning,) = [w for w in caught if issubclass(w.category, RouterCollapseWarning)]
    assert str(warning.message).startswith(
        f"the router of {PART} has collapsed at step 1: of 8 experts only about 2.0 are used, with top_k 2; set"
    )
