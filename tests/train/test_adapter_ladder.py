"""Adapters under every strategy: equal on one rank and two, and killed and resumed bit for bit beside their base."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.export.importing import save_weights
from genesis.model.adapter import BASE_FORMATS, AdapterConfig, BaseFormat, is_adapter_tensor, list_nf4_weights
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.nf4 import quantise
from genesis.optim import AdamW
from genesis.tokenizer.open import open_tokenizer
from genesis.train.adapter_base import build_scope, find_adapter_base
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import find_latest, verify
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_strategy, build_trainer, counters_of, whole
from tests.train.test_ladder import DECODER, KILLED_BEFORE, STEPS, KillAll

LORA = {"rank": 3, "alpha": 6.0, "dropout": 0.2}
DORA_ALONE = {**LORA, "dora": True}
DORA = {**DORA_ALONE, "also_train": ("embedding",)}


def choose_shape(base: BaseFormat, shape: DecoderConfig = DECODER) -> DecoderConfig:
    if not base.is_nf4:
        return shape
    return replace(shape, dim=64, ffn_dim=None, feed_forward=MixtureConfig(num_experts=4, top_k=2, ffn_dim=64))


def make_base(
    directory: Path, corpus: Path, base: BaseFormat = BASE_FORMATS["float32"], shape: DecoderConfig = DECODER
) -> Path:
    shape = choose_shape(base, shape)
    decoder = Decoder(shape)
    decoder.init_weights(0)
    directory.mkdir()
    state = decoder.to(base.dtype).state_dict()
    for name in list_nf4_weights(decoder) if base.is_nf4 else ():
        held = quantise(state.pop(name))
        state |= {f"{name.removesuffix('.weight')}.{tensor}": values for tensor, values in held.items()}
    return save_weights(state, shape, open_tokenizer(corpus), directory / "checkpoints")


def climb(
    directory: str, base: str, corpus: str, strategy: str, mode: str, adapter: dict[str, Any], *callbacks: Any
) -> dict[str, Any]:
    """Fits from the latest checkpoint in `directory`, or from the base, and returns what that came to."""
    config = AdapterConfig(**adapter)
    found = find_adapter_base(base, None)
    # Ranks draw other masks than one rank does for the same rows.
    shape = choose_shape(found.format)
    decoder = shape if config.dropout else replace(shape, dropout=0.0)
    module = GenesisModule(decoder, AdamW(lr=3e-3), adapter=config)
    module.is_restored, module.base_format = True, found.format
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(
        run_dir=directory,
        every_n_steps=1,
        keep_last=2,
        mode=mode,  # type: ignore[arg-type]
        restore="weights",
        scope=build_scope(found, has_magnitudes=config.dora, also_train=config.also_train),
    )
    trainer = build_trainer(
        build_strategy(strategy),
        int(os.environ["WORLD_SIZE"]),
        STEPS,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), checkpoint, CheckpointVerification(), *callbacks],
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data, ckpt_path=checkpoint.latest() or found.path)
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.cursor.position,
        "restored": None if checkpoint.restore_report is None else checkpoint.restore_report.step,
        "failed": checkpoint.statistics.num_failed,
    }


@pytest.mark.parametrize(
    ("strategy", "world_size", "adapter", "base_format"),
    [
        pytest.param("replicated", 1, DORA, "float32", marks=pytest.mark.slow),
        pytest.param("replicated", 2, DORA, "float32", marks=pytest.mark.slow),
        pytest.param("zero1", 2, LORA, "float32", marks=pytest.mark.slow),
        pytest.param("full", 1, LORA, "float32", marks=pytest.mark.slow),
        pytest.param("full", 2, DORA, "float32", marks=pytest.mark.slow),
        pytest.param("full", 4, DORA, "float32", marks=pytest.mark.slow),
        pytest.param("full", 2, LORA, "bfloat16", marks=pytest.mark.slow),
        pytest.param("replicated", 1, LORA, "nf4", marks=pytest.mark.slow),
        pytest.param("full", 2, DORA_ALONE, "nf4", marks=pytest.mark.slow),
        pytest.param("checkpointing", 2, DORA, "float32", marks=pytest.mark.slow),
        pytest.param("offload", 2, LORA, "float32", marks=pytest.mark.slow),
        pytest.param("compiled_shards", 1, LORA, "float32", marks=pytest.mark.long),
        pytest.param("compiled_shards", 1, LORA, "nf4", marks=pytest.mark.long),
    ],
)
def test_killed_adapters_climb_on_bit_for_bit(
    tmp_path: Path, tiny_corpus: Path, strategy: str, world_size: int, adapter: dict[str, Any], base_format: str
) -> None:
    base, run_dir = make_base(tmp_path / "base", tiny_corpus, BASE_FORMATS[base_format]), tmp_path / "run"
    shared = (str(base), str(tiny_corpus), strategy)
    straight = run_ranks(climb, world_size, str(tmp_path / "straight"), *shared, "sync", adapter)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, str(run_dir), *shared, "process", adapter, KillAll())
    resumed = run_ranks(climb, world_size, str(run_dir), *shared, "process", adapter)
    for one, other in zip(straight, resumed, strict=True):
        # The orphaned writers may or may not have finished the save of the last step.
        assert (one["restored"], other["restored"] in (KILLED_BEFORE - 2, KILLED_BEFORE - 1)) == (0, True)
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
        assert any(bool(tensor.any()) for name, tensor in one["weights"].items() if name.endswith("lora_B"))
        assert (one["counters"], one["position"]) == (other["counters"], other["position"])
        assert one["failed"] == other["failed"] == 0
    latest = find_latest(run_dir)
    assert latest is not None
    manifest = verify(latest, "deep")
    assert manifest.base is not None
    assert manifest.base.manifest_hash == read_committed_hash(base)
    held = {name.removeprefix("model.decoder.") for name in manifest.own_tensors if name.startswith("model.")}
    extra = {"embedding.weight"} if adapter is DORA else set()
    assert {name for name in held if not is_adapter_tensor(name)} == extra


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param({"rank": 3}, marks=pytest.mark.slow, id="lora"),
        pytest.param({"rank": 3, "dora": True}, marks=pytest.mark.long, id="dora"),
    ],
)
def test_compiled_blocks_give_adapters_the_same_weights(
    tmp_path: Path, tiny_corpus: Path, adapter: dict[str, Any]
) -> None:
    base = make_base(tmp_path / "base", tiny_corpus)
    eager, compiled = (
        run_ranks(climb, 1, str(tmp_path / strategy), str(base), str(tiny_corpus), strategy, "sync", adapter)[0]
        for strategy in ("replicated", "compiled")
    )
    for name, tensor in eager["weights"].items():
        torch.testing.assert_close(compiled["weights"][name], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "replicated"])
def test_adapters_on_two_ranks_equal_those_on_one(tmp_path: Path, tiny_corpus: Path, strategy: str) -> None:
    base = make_base(tmp_path / "base", tiny_corpus)
    adapter = {"rank": 3, "dora": True}
    (one,) = run_ranks(climb, 1, str(tmp_path / "1"), str(base), str(tiny_corpus), strategy, "sync", adapter)
    two, _ = run_ranks(climb, 2, str(tmp_path / "2"), str(base), str(tiny_corpus), strategy, "sync", adapter)
    assert one["weights"].keys() == two["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
