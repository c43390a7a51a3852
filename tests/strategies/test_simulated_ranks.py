"""Many ranks of one model: what the real strategy cuts tiles every tensor, saved by many and read by fewer."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from genesis.model.decoder import DecoderConfig
from genesis_callbacks.testing import run_ranks
from tests.simulated_ranks import cut_on, place_parameters, simulate

SMALL = DecoderConfig(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=256, max_seq_len=64, vocab_size=512)
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 4},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "stages_per_rank": 2},
    {"shard": "hybrid", "ranks_per_shard_group": 16, "tensor_parallel": 2, "context_parallel": 2},
]


def compare_with_torch(options: dict[str, Any], num_ranks: int, rank: int) -> int:
    """Returns how many parameters torch places on a rank as the arithmetic does."""
    stages = place_parameters(SMALL, num_ranks, options)
    placed = stages[rank * len(stages) // num_ranks]
    with cut_on(rank, num_ranks, SMALL, options) as decoder:
        for name, parameter in decoder.named_parameters():
            assert isinstance(parameter, DTensor)
            sizes, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            found = placed[name].find_blocks()[rank]
            assert found[1] == tuple(sizes), name
            assert 0 in sizes or found[0] == tuple(offsets), name
        return len(placed)


def simulate_each() -> list[dict[str, Any]]:
    dist.destroy_process_group()  # the process stands for one of many ranks
    for options in LAYOUTS:
        for rank in (0, 21, 63):
            assert compare_with_torch(options, 64, rank) > 0
    return [simulate(SMALL, 64, options) for options in LAYOUTS]


@pytest.mark.process
def test_sixty_four_ranks_save_what_eight_and_one_read_without_overlap_or_gap() -> None:
    (found,) = run_ranks(simulate_each, 1)
    for figures in found:
        assert figures["blocks_restored_on_1"] == figures["tensors"] // 4
        assert figures["blocks_restored_on_8"] > figures["blocks_restored_on_1"]
