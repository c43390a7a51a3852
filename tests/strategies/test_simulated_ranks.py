"""Many ranks of one model: what the real strategy cuts tiles every tensor, saved by many and read by fewer."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from genesis.model.decoder import DecoderConfig
from genesis_callbacks.testing import run_ranks
from tests.simulated_ranks import Placed, cut_on, place_parameters, simulate

SMALL = DecoderConfig(dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=256, max_seq_len=64, vocab_size=512)
NUM_RANKS = 64
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 4},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "stages_per_rank": 2},
    {"shard": "hybrid", "ranks_per_shard_group": 16, "tensor_parallel": 2, "context_parallel": 2},
]


def ask_torch(rank: int) -> list[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Returns the offsets and sizes that torch gives to a rank, by parameter, for each layout."""
    dist.destroy_process_group()  # the process stands for one of many ranks, always the same: torch keeps its place
    found = []
    for options in LAYOUTS:
        with cut_on(rank, NUM_RANKS, SMALL, options) as decoder:
            blocks = {}
            for name, parameter in decoder.named_parameters():
                assert isinstance(parameter, DTensor)
                mesh, placements = parameter.device_mesh, parameter.placements
                sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
                blocks[name] = (tuple(offsets), tuple(sizes))
            found.append(blocks)
    return found


def place_and_simulate() -> list[tuple[list[dict[str, Placed]], dict[str, Any]]]:
    dist.destroy_process_group()
    return [(place_parameters(SMALL, NUM_RANKS, options), simulate(SMALL, NUM_RANKS, options)) for options in LAYOUTS]


@pytest.mark.slow
@pytest.mark.process
def test_sixty_four_ranks_save_what_eight_and_one_read_without_overlap_or_gap() -> None:
    (found,) = run_ranks(place_and_simulate, 1)
    for _, figures in found:
        assert figures["blocks_restored_on_1"] == figures["tensors"] // 4
        assert figures["blocks_restored_on_8"] > figures["blocks_restored_on_1"]
    rank = 53
    (of_torch,) = run_ranks(ask_torch, 1, rank)
    for (stages, _), expected in zip(found, of_torch, strict=True):
        blocks = {name: it.find_blocks()[rank] for name, it in stages[rank * len(stages) // NUM_RANKS].items()}
        assert blocks.keys() == expected.keys()
        for name, (offsets, sizes) in expected.items():
            assert blocks[name][1] == sizes, name
            assert 0 in sizes or blocks[name][0] == offsets, name
