"""The ladder under every strategy of ours: save, be killed in mid-run, resume, save over the retention limit."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.model.decoder import DecoderConfig
from genesis.model.float8 import Float8Options
from genesis.model.mixture import MixtureConfig
from genesis.optim import AdamW
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import find_latest, list_committed, verify
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_strategy, build_trainer, counters_of, whole

DECODER = DecoderConfig(
    vocab_size=320, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16, dropout=0.1
)
MIXTURE = replace(
    DECODER,
    ffn_dim=None,
    feed_forward=MixtureConfig(
        num_experts=4, top_k=2, ffn_dim=16, shared_ffn_dim=16, has_balance_bias=True, balance_bias_rate=0.1
    ),
)
STEPS = 6
KILLED_BEFORE = 4
KEPT = 2


class KillAll(pl.Callback):
    """Kills its rank, by SIGKILL, before a step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        if trainer.global_step + 1 == KILLED_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)


def climb(
    directory: str, corpus: str, strategy: str, mode: str, *callbacks: pl.Callback, decoder: DecoderConfig | None = None
) -> dict[str, Any]:
    """Fits from the latest checkpoint in `directory` and returns what that came to."""
    decoder = decoder or (MIXTURE if "experts" in strategy else DECODER)
    float8 = Float8Options() if "float8" in strategy else None
    module = GenesisModule(decoder, AdamW(lr=3e-3), float8=float8)
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=1, keep_last=KEPT, mode=mode)  # type: ignore[arg-type]
    trainer = build_trainer(
        build_strategy(strategy),
        int(os.environ["WORLD_SIZE"]),
        STEPS,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), checkpoint, CheckpointVerification(), *callbacks],
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data, ckpt_path=checkpoint.latest())
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.cursor.position,
        "restored": None if checkpoint.restore_report is None else checkpoint.restore_report.step,
        "failed": checkpoint.statistics.num_failed,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("single", 1),
        ("replicated", 1),
        ("replicated", 2),
        # Three addends and more do not sum alike in every order.
        ("replicated", 4),
        ("zero1", 2),
        ("zero1", 4),
        ("full", 4),
        ("full", 2),
        ("grad_op", 2),
        ("hybrid", 4),
        ("two_blocks", 2),
        ("offload", 2),
        ("half_offload", 2),
        ("checkpointing", 2),
        ("host_alone", 1),
        ("host_shards", 2),
        ("experts_2", 2),
        ("host_experts", 2),
        ("experts_2", 4),
    ],
)
def test_a_killed_run_climbs_on_bit_for_bit(tmp_path: Path, tiny_corpus: Path, strategy: str, world_size: int) -> None:
    corpus, run_dir = str(tiny_corpus), tmp_path / "run"
    straight = run_ranks(climb, world_size, str(tmp_path / "straight"), corpus, strategy, "sync")
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, str(run_dir), corpus, strategy, "process", KillAll())
    resumed = run_ranks(climb, world_size, str(run_dir), corpus, strategy, "process")
    check_resumed(straight, resumed)
    names = [path.name for path, _ in list_committed(run_dir)]
    assert names == [f"step-{step:08d}" for step in range(STEPS - KEPT + 1, STEPS + 1)]
    latest = find_latest(run_dir)
    assert latest is not None
    manifest = verify(latest, "deep")
    assert (manifest.counters["updates"], manifest.sequence, manifest.world_size) == (STEPS, STEPS, world_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "resumed"),
    [
        ("host_shards", "full"),
        ("full", "host_shards"),
        ("offload", "half_offload"),
        ("half_offload", "full"),
    ],
)
def test_offloaded_states_go_on_under_another_share(
    tmp_path: Path, tiny_corpus: Path, killed: str, resumed: str
) -> None:
    corpus, run_dir = str(tiny_corpus), tmp_path / "run"
    straight = run_ranks(climb, 2, str(tmp_path / "straight"), corpus, "full", "sync")
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, 2, str(run_dir), corpus, killed, "process", KillAll())
    check_resumed(straight, run_ranks(climb, 2, str(run_dir), corpus, resumed, "process"))


def check_resumed(straight: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """Checks that a killed run came to the same as one that was not killed."""
    for one, other in zip(straight, resumed, strict=True):
        # The orphaned writers may or may not have finished the save of the last step.
        assert other["restored"] in (KILLED_BEFORE - 2, KILLED_BEFORE - 1)
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
        assert (one["counters"], one["position"]) == (other["counters"], other["position"])
        assert one["failed"] == other["failed"] == 0
