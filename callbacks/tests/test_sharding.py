"""The engine over real ranks: any placement saves, any other restores, replicas are compared, failures reach all."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    CorruptCheckpointError,
    Ranks,
    SaveFailedError,
    SaveTarget,
    Snapshot,
    read_manifest,
    read_tensors,
    save_blocking,
)
from genesis_callbacks.checkpoint.restore import check_restored, restore_shards
from genesis_callbacks.testing import run_ranks

# World size, mesh, placements: full, hybrid (replicate + shard), two dims, uneven, columns.
LAYOUTS = {
    "one": (1, (1,), (Replicate(),)),
    "rows": (2, (2,), (Shard(0),)),
    "columns": (2, (2,), (Shard(1),)),
    "hybrid": (4, (2, 2), (Replicate(), Shard(0))),
    "grid": (4, (2, 2), (Shard(0), Shard(1))),
    "uneven": (4, (4,), (Shard(0),)),
}


def expected_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "model.matrix": torch.randn(7, 10, generator=generator),
        "model.few_rows": torch.randn(2, 6, generator=generator).bfloat16(),
        "model.cube": torch.randn(5, 4, 3, generator=generator, dtype=torch.float64),
    }


def build_parts(layout: str, *, is_filled: bool):
    _, mesh_shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", mesh_shape)
    live = {}
    for name, tensor in expected_tensors().items():
        source = tensor if is_filled else torch.zeros_like(tensor)
        live[name] = distribute_tensor(source, mesh, placements, src_data_rank=None)
    live["model.replicated"] = torch.arange(9.0) if is_filled else torch.zeros(9)
    return live, [part for name, tensor in live.items() for part in local_shards(name, tensor, "parameter")]


def save_layout(directory, layout):
    _, parts = build_parts(layout, is_filled=True)
    target = SaveTarget(directory, Ranks())
    before = dist.group.WORLD._get_sequence_number_for_group()
    for step in (1, 2):
        save_blocking(target, lambda step=step: Snapshot(step, {}, parts, {"rank": dist.get_rank()}))
    return dist.group.WORLD._get_sequence_number_for_group() - before


def restore_layout(path, layout):
    live, parts = build_parts(layout, is_filled=False)
    manifest = read_manifest(path)
    restore_shards(path, manifest, parts)
    check_restored(manifest, parts, Ranks())
    for name, tensor in expected_tensors().items():
        assert isinstance(live[name], DTensor)
        assert torch.equal(live[name].full_tensor(), tensor)
    assert torch.equal(live["model.replicated"], torch.arange(9.0))


@pytest.mark.parametrize(
    ("saver", "restorer"),
    [
        ("hybrid", "columns"),
        ("uneven", "grid"),
        *(
            pytest.param(saver, restorer, marks=pytest.mark.slow)
            for saver, restorer in (("grid", "rows"), ("rows", "uneven"), ("columns", "one"), ("one", "hybrid"))
        ),
    ],
)
def test_any_placement_restores_any_other(tmp_path, saver, restorer):
    collectives = run_ranks(save_layout, LAYOUTS[saver][0], tmp_path, saver)
    assert set(collectives) == {0}
    path = tmp_path / "step-00000002"
    for name, tensor in expected_tensors().items():
        assert torch.equal(read_tensors(path, [name])[name], tensor)
    run_ranks(restore_layout, LAYOUTS[restorer][0], path, restorer)


def save_drifted(directory, kind):
    tensor = torch.ones(4) + (dist.get_rank() == 1)
    parts = local_shards("model.x", tensor, kind)
    try:
        save_blocking(SaveTarget(directory, Ranks()), lambda: Snapshot(1, {}, parts, {}))
    except SaveFailedError as error:
        return str(error)
    return "saved"


def test_a_drifted_replica_is_named_on_every_rank(tmp_path):
    messages = run_ranks(save_drifted, 2, tmp_path, "parameter")
    assert len(set(messages)) == 1
    assert "model.x: rank 1 holds other values than rank 0" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == [".trash"]
    # DDP sends rank 0's buffers to all before the next forward: they may differ, and rank 0's count.
    assert run_ranks(save_drifted, 2, tmp_path, "buffer") == ["saved", "saved"]
    assert torch.equal(read_tensors(tmp_path / "step-00000001")["model.x"], torch.ones(4))


def fail_on_one_rank(directory):
    def take():
        if dist.get_rank() == 1:
            raise OSError("no snapshot here")
        return Snapshot(1, {}, local_shards("model.x", torch.ones(2), "parameter"), {})

    target = SaveTarget(directory, Ranks())
    with pytest.raises(SaveFailedError, match="reporting the tensors to save: rank 1: OSError: no snapshot here"):
        save_blocking(target, take)
    save_blocking(target, lambda: Snapshot(2, {}, local_shards("model.x", torch.ones(2), "parameter"), {}))


def test_a_failure_on_one_rank_fails_the_save_on_all_and_the_next_succeeds(tmp_path):
    run_ranks(fail_on_one_rank, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def restore_swapped(path):
    """Rank 1 maps its local shard wrongly: rows upside down."""
    _, parts = build_parts("rows", is_filled=False)
    manifest = read_manifest(path)
    restore_shards(path, manifest, parts)
    if dist.get_rank() == 1:
        matrix = next(local.data for local in parts if local.part.name == "model.matrix")
        matrix.copy_(matrix.flip(0))
    with pytest.raises(CorruptCheckpointError, match=r"saved with other values of 1 tensor.*model\.matrix: its digest"):
        check_restored(manifest, parts, Ranks())
    return os.environ["RANK"]


def test_a_wrongly_mapped_shard_is_caught_on_every_rank(tmp_path):
    run_ranks(save_layout, 2, tmp_path, "rows")
    assert run_ranks(restore_swapped, 2, tmp_path / "step-00000002") == ["0", "1"]
