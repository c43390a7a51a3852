"""Cuts a model for many simulated ranks by the real strategy, and plans, commits and restores its checkpoint.

    python -m tests.simulated_ranks MODEL RANKS [AXIS=DEGREE ...]

A process with torch's fake process group stands for one rank of each pipeline stage: the strategy cuts the model there,
on the meta device, and the names, shapes and placements are what it leaves. The blocks of the other ranks of a stage
follow from the placements by arithmetic, which is compared with what torch says for ranks that are asked.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.recipe import read_decoder_config
from genesis.strategies import Sharded
from genesis.strategies.layout import lay_out
from genesis.strategies.mesh import WorldMesh
from genesis_callbacks.base.local_shards import TensorShard
from genesis_callbacks.base.manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest
from genesis_callbacks.checkpoint import Retention
from genesis_callbacks.checkpoint.job import CommitOrder, RankReceipt, WriteJob, _gather, _leave_receipt, commit_save
from genesis_callbacks.checkpoint.plan import SavePlan, plan_save
from genesis_callbacks.checkpoint.tiling import check_tiling
from genesis_callbacks.checkpoint.write import SHARD_NAME

_MODELS = Path(__file__).parents[1] / "configs" / "model"
_SEVENTY_BILLION = DecoderConfig(
    dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672, max_seq_len=8192, vocab_size=128256,
    has_tied_embeddings=False,
)  # fmt: skip
_SLOTS = ("exp_avg", "exp_avg_sq")
_ARCHIVE_BYTES = 600  # what `torch.save` adds to the elements of a chunk
Block = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Placed:
    """Where the ranks of a stage have a parameter.

    Args:
        shape: Of the whole parameter.
        ranks: The ranks of the stage, as their mesh has them.
        placements: For each dimension of the mesh.
    """

    shape: tuple[int, ...]
    ranks: NDArray[np.int64]
    placements: tuple[Any, ...]

    def find_blocks(self) -> dict[int, Block]:
        """Returns what each rank holds of the parameter."""
        dims = range(self.ranks.ndim)
        # A strided shard cuts what the axes inside of it have left.
        if any(type(placement).__name__ == "_StridedShard" for placement in self.placements):
            dims = dims[::-1]
        blocks = {}
        for place, rank in np.ndenumerate(self.ranks):
            offsets, sizes = [0] * len(self.shape), list(self.shape)
            for dim in dims:
                placement = self.placements[dim]
                if not isinstance(placement, Replicate):
                    cut = placement.dim
                    length = math.ceil(sizes[cut] / self.ranks.shape[dim])  # as `torch.chunk` cuts
                    start = min(place[dim] * length, sizes[cut])
                    offsets[cut], sizes[cut] = offsets[cut] + start, min(length, sizes[cut] - start)
            blocks[int(rank)] = (tuple(offsets), tuple(sizes))
        return blocks


def cut_decoder(rank: int, num_ranks: int, config: DecoderConfig, options: dict[str, Any]) -> tuple[Decoder, Sharded]:
    """Returns a model on the meta device as `Sharded` leaves it to one of many ranks, of which this process is one."""
    strategy = Sharded(**options)
    strategy.parallel_devices = [torch.device("cpu")] * num_ranks
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_global_rank(rank)
    degrees = strategy._plan_degrees()
    strategy._mesh = WorldMesh(degrees, "cpu")
    strategy._layout = lay_out(degrees, rank, gradient_divisor=1)
    with torch.device("meta"):
        decoder = Decoder(config)
    strategy.apply_to(decoder)
    return decoder, strategy


@contextmanager
def cut_on(rank: int, num_ranks: int, config: DecoderConfig, options: dict[str, Any]) -> Iterator[Decoder]:
    """Yields what `cut_decoder` returns, in a process that is one of many ranks by torch's fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield cut_decoder(rank, num_ranks, config, options)[0]
    finally:
        dist.destroy_process_group()


def place_parameters(config: DecoderConfig, num_ranks: int, options: dict[str, Any]) -> list[dict[str, Placed]]:
    """Returns where the ranks of each pipeline stage have the parameters of the model."""
    num_stages = options.get("pipeline_parallel", 1)
    stages = []
    for stage in range(num_stages):
        with cut_on(stage * num_ranks // num_stages, num_ranks, config, options) as decoder:
            placed = {}
            for name, parameter in decoder.named_parameters():
                assert isinstance(parameter, DTensor)
                ranks = parameter.device_mesh.mesh.numpy().astype(np.int64)
                placed[name] = Placed(tuple(parameter.shape), ranks, parameter.placements)
            stages.append(placed)
    return stages


def report_parts(stages: Sequence[dict[str, Placed]], num_ranks: int) -> list[list[TensorShard]]:
    """Returns the parts of the model and of AdamW's state that each rank reports for the plan of a save."""
    reports: list[list[TensorShard]] = [[] for _ in range(num_ranks)]
    for placed in stages:
        for name, parameter in placed.items():
            state, shape, dtype = f"optimizer.0.decoder.{name}", parameter.shape, torch.float32
            for rank, (offsets, sizes) in parameter.find_blocks().items():
                if math.prod(sizes):
                    reports[rank].append(
                        TensorShard(f"model.decoder.{name}", "parameter", shape, dtype, offsets, sizes)
                    )
                    reports[rank] += [
                        TensorShard(f"{state}.{slot}", "optimizer", shape, dtype, offsets, sizes) for slot in _SLOTS
                    ]
                reports[rank].append(TensorShard(f"{state}.step", "optimizer", (), dtype, (), ()))
    return reports


def write_hole(staging: Path, plan: SavePlan, rank: int) -> RankReceipt:
    """Returns the receipt of a rank whose shard is a hole of the right size."""
    num_bytes = plan.count_bytes(plan.blocks_of(rank)) + _ARCHIVE_BYTES
    ends = np.cumsum(num_bytes)
    size = int(ends[-1]) if len(ends) else 0
    name = SHARD_NAME.format(rank=rank)
    with (staging / name).open("wb") as file:
        file.truncate(size)
    places = np.stack([ends - num_bytes, num_bytes, ends - num_bytes + _ARCHIVE_BYTES], axis=1)
    return RankReceipt(FileRecord(name, size, "0" * 64, rank), (), plan.held[rank].astype(np.uint64), places, {})


def commit_holes(directory: Path, plan: SavePlan) -> tuple[Path, dict[str, float]]:
    """Commits a save of all ranks by their receipts; returns the checkpoint, and figures of rank 0's work."""
    staging = directory / "step-00000001.staging-x"
    staging.mkdir()
    num_ranks = len(plan.held)
    own, *others = (write_hole(staging, plan, rank) for rank in range(num_ranks))
    for rank, receipt in enumerate(others, 1):
        _leave_receipt(staging, rank, receipt)
    del others
    receipt_bytes = sum((staging / f"receipt-{rank}").stat().st_size for rank in range(1, num_ranks))
    order = CommitOrder(Manifest(1, 1, {}, num_ranks, {}, {}, {}, {}, None), plan, Retention(), 0, frozenset())
    job = WriteJob(staging, 0, (), {}, {}, "blake3", 60.0, order)
    begin = time.process_time()
    receipts = _gather(job, own, num_ranks, lambda: False)
    for rank in range(1, num_ranks):
        (staging / f"receipt-{rank}").unlink()
    commit_save(staging, order, receipts, may_retain=lambda: False)
    seconds = time.process_time() - begin
    path = directory / "step-00000001"
    begin = time.process_time()
    read_manifest(path)
    return path, {
        "receipts_mb": receipt_bytes / 1e6,
        "commit_processor_s": seconds,
        "manifest_mb": (path / MANIFEST_NAME).stat().st_size / 1e6,
        "dcp_metadata_mb": (path / ".metadata").stat().st_size / 1e6,
        "read_manifest_processor_s": time.process_time() - begin,
    }


def count_overlap(offsets: Any, sizes: Any, block: Block) -> int:
    """Returns how many elements of a block lie in chunks, `[chunk, dim]` each."""
    low = np.maximum(offsets, np.array(block[0], dtype=np.int64))
    high = np.minimum(offsets + sizes, np.array(block[0], dtype=np.int64) + np.array(block[1], dtype=np.int64))
    return int(np.maximum(high - low, 0).prod(axis=1).sum())


def check_restore(manifest: Manifest, stages: Sequence[dict[str, Placed]]) -> int:
    """Checks that what ranks would read of a checkpoint is each of their blocks once; returns the number of blocks.

    The saved chunks tile each tensor and so do the blocks of the ranks, so that a block whose overlaps with the chunks
    have as many elements as it is read whole, and no element of it twice.
    """
    num_blocks = 0
    for placed in stages:
        for name, parameter in placed.items():
            record = manifest.tensors[f"model.decoder.{name}"]
            assert record.shape == parameter.shape
            offsets = np.array([chunk.offsets for chunk in record.chunks], dtype=np.int64)
            sizes = np.array([chunk.sizes for chunk in record.chunks], dtype=np.int64)
            blocks = {block for block in parameter.find_blocks().values() if math.prod(block[1])}
            check_tiling(name, record.shape, sorted(blocks))
            for block in blocks:
                assert count_overlap(offsets, sizes, block) == math.prod(block[1]), (name, block)
            num_blocks += len(blocks)
    return num_blocks


def restore_options(num_ranks: int) -> dict[str, Any]:
    """Returns the strategy of a restore on fewer ranks: two share the matrices, if there are several."""
    return {"tensor_parallel": 2} if num_ranks > 1 else {}


def simulate(config: DecoderConfig, num_ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a save by many ranks and of restores on 8 and 1."""
    begin = time.process_time()
    stages = place_parameters(config, num_ranks, options)
    cut = time.process_time() - begin
    reports = report_parts(stages, num_ranks)
    names = {name for placed in stages for name in placed}
    with torch.device("meta"):
        assert names == {name for name, _ in Decoder(config).named_parameters()}
    begin = time.process_time()
    plan = plan_save(reports)
    figures: dict[str, Any] = {
        "ranks": num_ranks,
        "options": options,
        "parameters": sum(math.prod(shape) for shape in {n: p.shape for it in stages for n, p in it.items()}.values()),
        "tensors": len(plan.tensors),
        "cut_processor_s": cut,
        "parts_reported": sum(map(len, reports)),
        "chunks_written": sum(map(len, plan.written)),
        "plan_processor_s": time.process_time() - begin,
    }
    del reports
    loads = [int(plan.count_bytes(plan.blocks_of(rank)).sum()) for rank in range(num_ranks)]
    figures |= {"rank_gb_least": min(loads) / 1e9, "rank_gb_most": max(loads) / 1e9}
    figures["peak_mb_before_commit"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    with TemporaryDirectory() as directory:
        path, of_commit = commit_holes(Path(directory), plan)
        figures |= of_commit
        figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        manifest = read_manifest(path)
        for fewer in (64, 8, 1):
            placed = stages if fewer == num_ranks else place_parameters(config, fewer, restore_options(fewer))
            figures[f"blocks_restored_on_{fewer}"] = check_restore(manifest, placed)
    return figures


def read_model(name: str) -> DecoderConfig:
    """Returns a model of `configs/model`, or `70b`."""
    return _SEVENTY_BILLION if name == "70b" else read_decoder_config(_MODELS / f"{name}.yaml")


def main() -> None:
    """Prints the figures as JSON."""
    name, num_ranks, *degrees = sys.argv[1:]
    options = {axis: int(degree) for axis, degree in (word.split("=") for word in degrees)}
    print(json.dumps({"model": name, **simulate(read_model(name), int(num_ranks), options)}, indent=1))


if __name__ == "__main__":
    main()
