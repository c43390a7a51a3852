"""Adapters on experts under every strategy: gradients of one big batch, and runs that go on bit for bit."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from genesis.base.errors import UserError
from genesis.data.window import IGNORE_INDEX
from genesis.export.importing import save_weights
from genesis.model.adapter import AdapterConfig, BaseFormat, attach_adapters, fill_trained, is_adapter_tensor
from genesis.model.decoder import Decoder
from genesis.optim import AdamW
from genesis.tokenizer.open import open_tokenizer
from genesis.train.adapter_base import build_scope, find_adapter_base
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import find_latest, verify
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.train.support import (
    COMPILE_SECONDS,
    KeepGradients,
    build_strategy,
    build_trainer,
    loader,
    rows_of_step,
    whole,
)
from tests.train.test_mixture_training import MIXED, slow
from tests.train.test_part_statistics import Kill

LORA = AdapterConfig(rank=3, alpha=6.0, include_experts=("*",), exclude=("*.key",))
STEPS = 5


def draw_adapters(names: list[str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns values for adapters that add something, by their names."""
    found = {}
    for index, name in enumerate(sorted(names)):
        generator = torch.Generator().manual_seed(index)
        found[name] = torch.randn(tuple(tensors[name].shape), generator=generator) * 0.2
    return found


class FillAdapters(pl.Callback):
    """Gives adapters values before the first step, whatever shards them."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        decoder: Any = pl_module.decoder
        tensors = dict(decoder.named_parameters())
        fill_trained(decoder, draw_adapters([name for name in tensors if is_adapter_tensor(name)], tensors))


def reference() -> dict[str, Tensor]:
    """Returns the gradients of one big batch, in float64."""
    model = Decoder(MIXED)
    attach_adapters(model, LORA)
    model.init_weights(0)
    tensors = dict(model.named_parameters())
    fill_trained(model, draw_adapters([name for name in tensors if is_adapter_tensor(name)], tensors))
    model.double()
    rows = rows_of_step(0)
    counted = rows.labels != IGNORE_INDEX
    logits, statistics = model(rows.input_ids, document_ids=rows.document_ids, has_statistics=True, counted=counted)
    loss = cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    auxiliary = statistics["blocks.1.feed_forward"].loss_sum
    ((loss + auxiliary) / int(counted.sum())).backward()
    return {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_step(strategy: str, dtype: torch.dtype, precision: str) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keep, module = KeepGradients(), GenesisModule(MIXED, AdamW(lr=1e-2), adapter=LORA)
    module.base_format = BaseFormat(dtype)
    frozen: dict[str, Tensor] = {}

    class KeepBase(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            frozen.update({n: whole(p) for n, p in pl_module.named_parameters() if not is_adapter_tensor(n)})

    trainer = build_trainer(
        build_strategy(strategy),
        world_size,
        1,
        [KeepBase(), FillAdapters(), keep, TokenCounters()],
        precision=precision,
        gradient_clip_val=0.0,
    )
    trainer.fit(module, loader(1, rank, world_size))
    after = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return {
        "gradients": keep.gradients,
        "changed": [name for name, tensor in frozen.items() if not torch.equal(after[name], tensor)],
        "loss": float(trainer.callback_metrics["train/loss"]),
    }


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        slow("single", 1), slow("replicated", 2), slow("zero1", 2), slow("full", 2), slow("full", 4),
        slow("grad_op", 2), slow("hybrid", 4), slow("two_blocks", 2), slow("reduced_each", 2), slow("offload", 2),
        slow("checkpointing", 2), slow("compiled", 2), slow("compiled_shards", 2), slow("host_shards", 2),
        slow("experts_2", 2), slow("experts_2", 4), slow("experts_4", 4), slow("experts_hybrid", 4),
        slow("experts_each", 2), slow("experts_compiled", 2), slow("host_experts", 2),
    ],
)  # fmt: skip
def test_gradients_of_adapters_are_those_of_one_big_batch(strategy: str, world_size: int) -> None:
    gradients = reference()
    assert sum("experts" in name for name in gradients) == 4  # a layer with experts, two targets
    assert all(is_adapter_tensor(name) for name in gradients)
    for found in run_ranks(one_step, world_size, strategy, torch.float32, "32-true", timeout_seconds=COMPILE_SECONDS):
        assert found["changed"] == []
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 1e-5
            # Compiled blocks sum in another order.
            bound = 3e-6 if "compiled" in strategy else 1e-6
            assert (found["gradients"][name].double() - gradient).abs().max() < bound, name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "full", "experts_2"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_base_in_bfloat16_has_float32_adapters_with_nearly_the_same_gradients(strategy: str, precision: str) -> None:
    gradients = reference()
    world_size = 1 if strategy == "single" else 2
    for found in run_ranks(one_step, world_size, strategy, torch.bfloat16, precision):
        assert found["changed"] == []
        for name, gradient in found["gradients"].items():
            assert gradient.dtype == torch.float32
            # Some tokens see other experts where activations are rounded.
            assert (gradient.double() - gradients[name]).norm() < 0.5 * gradients[name].norm() + 1e-3, name


# ---- runs beside a base

DECODER = replace(MIXED, vocab_size=320, dropout=0.1)


def make_base(directory: Path, corpus: Path, dtype: torch.dtype = torch.float32) -> Path:
    decoder = Decoder(DECODER)
    decoder.init_weights(0)
    directory.mkdir()
    tokenizer = open_tokenizer(corpus)
    return save_weights(decoder.to(dtype).state_dict(), DECODER, tokenizer, directory / "checkpoints")


def train(run_dir: str, base: str, corpus: str, strategy: str, kill_at_step: int, name: str = "adamw") -> Any:
    """Trains to the last step beside the base, from the newest checkpoint if there is one."""
    found = find_adapter_base(base, None)
    module = GenesisModule(DECODER, algorithm_of(name, lr=1e-2), adapter=LORA)
    module.is_restored, module.base_format = True, found.format
    checkpoint = AsyncProcessCheckpoint(
        run_dir=run_dir,
        every_n_steps=1,
        keep_last=None,
        mode="sync",
        restore="weights",
        scope=build_scope(found, has_magnitudes=False, also_train=()),
    )
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=STEPS, warmup_updates=2), checkpoint, Kill(kill_at_step)]
    trainer = build_trainer(
        build_strategy(strategy), int(os.environ["WORLD_SIZE"]), STEPS, callbacks, gradient_clip_val=1.0
    )
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    trainer.fit(module, data, ckpt_path=checkpoint.latest() or found.path)
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "world_size", "name", "dtype"),
    [
        slow("replicated", 1, "adamw", torch.float32), slow("replicated", 2, "adamw", torch.bfloat16),
        slow("full", 2, "muon", torch.float32), slow("checkpointing", 2, "adamw", torch.bfloat16),
        slow("experts_2", 2, "adamw", torch.bfloat16), slow("experts_2", 4, "adamw", torch.float32),
        slow("experts_2", 2, "muon", torch.float32), slow("host_experts", 2, "adamw", torch.float32),
    ],
)  # fmt: skip
def test_killed_adapters_of_experts_go_on_bit_for_bit_and_the_base_is_never_written(
    strategy: str, world_size: int, name: str, dtype: torch.dtype, tiny_corpus: Path, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", tiny_corpus, dtype)
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.rglob("*") if path.is_file()}
    shared = (str(base), str(tiny_corpus), strategy)
    expected = run_ranks(train, world_size, str(tmp_path / "straight"), *shared, -1, name)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(train, world_size, str(tmp_path / "killed"), *shared, 3, name)
    found = run_ranks(train, world_size, str(tmp_path / "killed"), *shared, -1, name)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
        assert all(bool(t.any()) for key, t in ours.items() if key.endswith("lora_B") and "experts" in key)
    latest = find_latest(tmp_path / "killed")
    assert latest is not None
    manifest = verify(latest, "deep")
    assert manifest.base is not None
    assert manifest.base.manifest_hash == read_committed_hash(base)
    held = {key for key in manifest.own_tensors if key.startswith("model.")}
    assert all(is_adapter_tensor(key) for key in held)
    assert sum("experts" in key for key in held) == 4
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.rglob("*") if path.is_file()}
    assert after == files


@pytest.mark.slow
def test_adapter_checkpoints_move_between_any_numbers_of_ranks_that_share_the_experts(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    base, run = make_base(tmp_path / "base", tiny_corpus), str(tmp_path / "run")
    shared = (str(base), str(tiny_corpus))
    expected = run_ranks(train, 1, run, *shared, "single", -1)[0]
    for strategy, world_size in (("experts_2", 2), ("experts_4", 4), ("experts_2", 4), ("full", 2), ("single", 1)):
        for found in run_ranks(train, world_size, run, *shared, strategy, -1):  # the run has ended
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_run_that_moves_between_layouts_at_each_step_trains_what_one_process_trains(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", tiny_corpus)
    shared = (str(base), str(tiny_corpus))
    expected = run_ranks(train_without_dropout, 1, str(tmp_path / "one"), *shared, "single", -1)[0]
    run = str(tmp_path / "moved")
    for kill_at_step, (strategy, world_size) in zip(
        (1, 3, -1), (("single", 1), ("experts_2", 2), ("single", 1)), strict=True
    ):
        if kill_at_step >= 0:
            with pytest.raises(AssertionError, match="died without a word"):
                run_ranks(train_without_dropout, world_size, run, *shared, strategy, kill_at_step)
        else:
            (found,) = run_ranks(train_without_dropout, world_size, run, *shared, strategy, -1)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def train_without_dropout(*arguments: Any) -> Any:
    global DECODER
    DECODER = replace(DECODER, dropout=0.0)
    return train(*arguments)


def refuse(decoder: Any) -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = GenesisModule(decoder, AdamW(), adapter=LORA)
    trainer = build_trainer(build_strategy("experts_2"), world_size, 1, [TokenCounters()])
    with pytest.raises(UserError) as caught:
        trainer.fit(module, loader(1, rank, world_size))
    return str(caught.value)


def test_experts_with_adapters_that_ranks_cannot_share_are_refused() -> None:
    assert MIXED.feed_forward is not None
    nine = replace(MIXED, feed_forward=replace(MIXED.feed_forward, num_experts=9))  # type: ignore[type-var]
    for found in run_ranks(refuse, 2, nine):
        assert "expert_parallel 2 does not divide num_experts 9" in found
