"""Models of transformers under the strategies: killed and resumed bit for bit, and equal on one rank and two."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from genesis.export.importing import save_weights
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import build_model
from genesis.optim import AdamW
from genesis.strategies.wrap import ShardOptions, apply_wrappers
from genesis.tokenizer.open import open_tokenizer
from genesis.train.adapter_base import build_scope, find_adapter_base
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.model.foreign.models import configure, describe, make_theirs, wrap
from tests.train.support import build_strategy, build_trainer, whole
from tests.train.test_ladder import STEPS, KillAll

LORA = {"rank": 3, "alpha": 6.0}


def make_base(kind: str, directory: Path, corpus: Path, dtype: torch.dtype = torch.float32) -> Path:
    theirs = make_theirs(configure(kind))
    directory.mkdir()
    state = {name: tensor.contiguous() for name, tensor in wrap(theirs).to(dtype).state_dict().items()}
    return save_weights(state, describe(theirs.config), open_tokenizer(corpus), directory / "checkpoints")


def climb(
    directory: str, kind: str, base: str, corpus: str, strategy: str, mode: str, adapter: Any, *callbacks: Any
) -> dict[str, Any]:
    """Fits from the latest checkpoint in `directory`, or from the base, and returns what that came to."""
    config = None if adapter is None else AdapterConfig(**adapter)
    module = GenesisModule(describe(configure(kind)), AdamW(lr=3e-3), adapter=config)
    module.is_restored, scope = True, {}
    if config is not None:
        found = find_adapter_base(base, None)
        module.base_format = found.format
        scope = {"scope": build_scope(found, has_magnitudes=config.dora, also_train=())}
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(
        run_dir=directory,
        every_n_steps=1,
        keep_last=2,
        mode=mode,  # type: ignore[arg-type]
        restore="weights",
        **scope,
    )
    trainer = build_trainer(
        build_strategy(strategy),
        int(os.environ["WORLD_SIZE"]),
        STEPS,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), checkpoint, CheckpointVerification(), *callbacks],
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data, ckpt_path=checkpoint.latest() or Path(base))
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "failed": checkpoint.statistics.num_failed,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "world_size", "adapter", "dtype"),
    [
        ("gemma3_text", "replicated", 1, None, torch.float32),
        ("gpt_oss", "checkpointing", 2, None, torch.float32),
        ("phi3", "full", 2, LORA, torch.bfloat16),
        ("olmo3", "zero1", 2, None, torch.float32),
        ("granite", "compiled_shards", 2, LORA, torch.float32),
    ],
)
def test_a_killed_model_of_transformers_climbs_on_bit_for_bit(
    tmp_path: Path, tiny_corpus: Path, kind: str, strategy: str, world_size: int, adapter: Any, dtype: torch.dtype
) -> None:
    base, run_dir = make_base(kind, tmp_path / "base", tiny_corpus, dtype), tmp_path / "run"
    shared = (kind, str(base), str(tiny_corpus), strategy)
    straight = run_ranks(climb, world_size, str(tmp_path / "straight"), *shared, "sync", adapter)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, str(run_dir), *shared, "process", adapter, KillAll())
    resumed = run_ranks(climb, world_size, str(run_dir), *shared, "process", adapter)
    for one, other in zip(straight, resumed, strict=True):
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
        assert one["failed"] == other["failed"] == 0


def list_gathered(kind: str) -> tuple[set[str], set[str]]:
    """Returns the parameters that a rank holds whole between a forward and its backward, and all of towers."""
    with torch.device("meta"):
        model = build_model(describe(configure(kind)))
    options: dict[str, Any] = {"reshard_after_forward": True, "blocks_per_unit": 1, "max_gathers_in_flight": 2}
    options |= {"precision": MixedPrecisionPolicy(cast_forward_inputs=False), "cpu_offload": 0.0}
    apply_wrappers(model, shard=ShardOptions(init_device_mesh("cpu", (2,)), **options))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.fill_buffers()
    model(torch.zeros(1, 8, dtype=torch.int64))
    gathered = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    return gathered, {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_no_rank_gathers_a_tower_that_text_does_not_reach(kind: str) -> None:
    for gathered, of_towers in run_ranks(list_gathered, 2, kind):
        assert any("embed_tokens" in name for name in gathered)  # the root stays for the backward
        assert of_towers
        assert not gathered & of_towers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("gemma3_text", "checkpointing"),
        ("gemma3_text", "half_offload"),
        ("gemma3_text", "zero1"),
        ("gemma3_text", "compiled_shards"),
        ("gemma3", "checkpointing"),
    ],
)
def test_two_ranks_train_a_model_of_transformers_like_one(
    tmp_path: Path, tiny_corpus: Path, kind: str, strategy: str
) -> None:
    base = make_base(kind, tmp_path / "base", tiny_corpus)
    shared = (kind, str(base), str(tiny_corpus))
    alone = run_ranks(climb, 1, str(tmp_path / "alone"), *shared, "replicated", "sync", None)[0]
    sharded = run_ranks(climb, 2, str(tmp_path / strategy), *shared, strategy, "sync", None)[0]
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(sharded["weights"][name], tensor, rtol=1e-4, atol=1e-4)
