"""The mesh of all ranks and its views, and what manifests say of it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from genesis.model.decoder import DecoderConfig
from genesis.strategies.degrees import Degrees, groups_along, place_on
from genesis.strategies.mesh import WorldMesh
from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.checkpoint import find_latest, read_manifest
from genesis_callbacks.testing import run_ranks
from tests.simulated_ranks import cut_on
from tests.train.support import build_module, build_strategy, build_trainer, loader, run_in_turn

DECODER = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=48, max_seq_len=48, vocab_size=64)
DEGREES = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 4, "ep": 8}
WORLD_SIZE = 64


def read_views(degrees: Degrees, rank: int) -> None:
    """Compares what torch says about a rank's place and groups with the arithmetic."""
    mesh = WorldMesh(degrees, "cpu")
    views = [(mesh.data, degrees.data_axes()), (mesh.dense, degrees.dense_axes()), (mesh.sparse, degrees.sparse_axes())]
    for view, axes in views:
        assert dict(zip(view.mesh_dim_names, view.shape, strict=True)) == axes
        assert dict(zip(axes, view.get_coordinate(), strict=True)) == place_on(axes, rank)
        for name in axes:
            group = next(group for group in groups_along(axes, [name]) if rank in group)
            assert view[name].mesh.flatten().tolist() == list(group)
    uncut = next(group for group in groups_along(degrees.uncut_axes(), ["uncut"]) if rank in group)
    assert mesh.uncut["uncut"].mesh.flatten().tolist() == list(uncut)
    tokens = next(group for group in degrees.token_groups() if rank in group)
    assert mesh.tokens.mesh.flatten().tolist() == list(tokens)


def read_as_rank_of_many(rank: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    read_views(Degrees(**DEGREES).resolve(WORLD_SIZE), rank)
    read_views(Degrees(dp_replicate=4).resolve(WORLD_SIZE), rank)


@pytest.mark.parametrize("rank", [0, 37, 63])
def test_the_views_of_sixty_four_ranks_are_those_of_the_arithmetic(rank: int) -> None:
    run_ranks(read_as_rank_of_many, 1, rank)


def read_groups(degrees: dict[str, int]) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    resolved = Degrees(**degrees).resolve(world_size)
    read_views(resolved, rank)
    dense = WorldMesh(resolved, "cpu").dense
    return {name: dist.get_backend(dense.get_group(name)) for name in dense.mesh_dim_names}


def test_an_axis_of_one_rank_opens_no_connection() -> None:
    for backends in run_ranks(read_groups, 4, {"dp_replicate": 2, "tp": 2}):
        assert backends == {"pp": "fake", "dp_replicate": "gloo", "fsdp": "gloo", "tp": "gloo"}
    for backends in run_ranks(read_groups, 2, {}):
        assert backends == {"pp": "fake", "dp_replicate": "fake", "fsdp": "gloo", "tp": "fake"}


SHARES = ("share", "context", "mixer_share", "feed_forward_share", "exchange")


def list_replaced() -> list[set[str]]:
    """Returns what a strategy has replaced in a model, for no degrees, for degrees of 1, and for one of 2."""
    dist.destroy_process_group()  # the process stands for one of two ranks
    found: list[set[str]] = []
    axes = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    cases: list[dict[str, Any]] = [{}, dict.fromkeys(axes, 1), {"tensor_parallel": 2}]
    for options in cases:
        with cut_on(0, 2, DECODER, options) as decoder:
            modules = dict(decoder.named_modules())
            forwards = {name for name, module in modules.items() if "forward" in vars(module)}
            shares = {
                f"{n}.{key}" for n, one in modules.items() for key in SHARES if getattr(one, key, None) is not None
            }
            found.append(forwards | shares)
    return found


def test_degrees_of_one_replace_nothing_in_a_model() -> None:
    ((without, ones, shared),) = run_ranks(list_replaced, 1)
    assert without == ones == set()
    assert {"embedding", ".share", "blocks.0.mixer_share"} <= shared


MESHES = {
    "replicated": {"dp_replicate": 4},
    "full": {"dp_shard": 4},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2},
}


def train_one_step(run_dir: str, strategy: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, mode="sync")
    trainer = build_trainer(build_strategy(strategy), world_size, 1, [checkpoint])
    trainer.fit(build_module(), loader(1, rank, world_size))


@pytest.mark.slow
@pytest.mark.process
def test_the_manifest_has_the_degrees(tmp_path: Path) -> None:
    run_ranks(run_in_turn, 4, train_one_step, [(str(tmp_path / name), name) for name in MESHES])
    for name, mesh in MESHES.items():
        latest = find_latest(tmp_path / name)
        assert latest is not None
        assert read_manifest(latest).mesh == mesh
