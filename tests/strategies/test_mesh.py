import os
from pathlib import Path

import pytest

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.checkpoint import find_latest, read_manifest
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_strategy, build_trainer, loader


def train_one_step(run_dir: str, strategy: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, mode="sync")
    trainer = build_trainer(build_strategy(strategy), world_size, 1, [checkpoint])
    trainer.fit(build_module(), loader(1, rank, world_size))


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [("replicated", {}), ("full", {"data_parallel": 4}), ("hybrid", {"replicate": 2, "shard": 2})],
)
def test_the_manifest_has_the_mesh_that_the_parameters_live_on(
    tmp_path: Path, strategy: str, mesh: dict[str, int]
) -> None:
    run_ranks(train_one_step, 4, str(tmp_path), strategy)
    latest = find_latest(tmp_path)
    assert latest is not None
    assert read_manifest(latest).mesh == mesh
