"""Degrees: what is refused, and which ranks belong together."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.model.decoder import DecoderConfig
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.run_options import RunOptions
from genesis.strategies import Sharded
from genesis.strategies.degrees import AXIS_NAMES, Degrees, groups_along, list_divisors, place_on
from genesis.train.step import seed_of_step

SIZES = st.integers(1, 3)


@st.composite
def resolved_degrees(draw: st.DrawFn) -> Degrees:
    sizes = {name: draw(SIZES) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    ep = draw(st.sampled_from(list_divisors(sizes["dp_shard"] * sizes["cp"] * sizes["tp"])))
    return Degrees(**sizes, ep=ep).resolve(prod(sizes.values()))


@given(resolved_degrees())
def test_every_view_holds_every_rank_once(degrees: Degrees) -> None:
    for axes in (degrees.data_axes(), degrees.dense_axes(), degrees.uncut_axes(), degrees.sparse_axes()):
        places = {tuple(place_on(axes, rank).values()) for rank in range(degrees.world_size)}
        assert len(places) == prod(axes.values()) == degrees.world_size


@given(resolved_degrees())
def test_a_token_group_reads_every_row_once(degrees: Degrees) -> None:
    groups = degrees.token_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(degrees.world_size))
    for group in groups:
        # Ranks that share the tokens of a row read it whole: with them, each row would be counted several times.
        assert sorted(degrees.data_rank(rank) for rank in group) == list(range(degrees.data_world_size))
    reporting = [degrees.data_rank(rank) for rank in range(degrees.world_size) if degrees.reports_rows(rank)]
    assert sorted(reporting) == list(range(degrees.data_world_size))


@given(resolved_degrees())
def test_ranks_with_other_tokens_or_layers_draw_other_dropout_masks(degrees: Degrees) -> None:
    seeds = {seed_of_step(1, 2, *degrees.seed_place(rank)) for rank in range(degrees.world_size)}
    assert len(seeds) == degrees.world_size


def test_without_further_axes_dropout_is_seeded_by_the_data_rank_alone() -> None:
    assert [Degrees().resolve(4).seed_place(rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]


@given(resolved_degrees())
def test_a_stage_holds_the_ranks_of_one_place_on_the_pipeline(degrees: Degrees) -> None:
    stages = [place_on(degrees.dense_axes(), rank)["pp"] for rank in range(degrees.world_size)]
    for rank, stage in enumerate(stages):
        assert list(degrees.stage_ranks(rank)) == [other for other, found in enumerate(stages) if found == stage]


def test_tensor_parallel_neighbours_read_the_same_rows() -> None:
    degrees = Degrees(tp=2).resolve(4)
    assert [degrees.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert degrees.token_groups() == ((0, 2), (1, 3))


def test_groups_along_several_axes_keep_the_order_of_ranks() -> None:
    assert groups_along({"pp": 2, "dp": 2, "tp": 2}, ["pp", "tp"]) == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        ({"dp_replicate": 3}, 4, "dp_replicate 3 does not divide 4 ranks: lower it to one of 1, 2, 4, or change"),
        ({"dp_replicate": 2, "tp": 4}, 12, "dp_replicate 2 [*] tensor_parallel 4 = 8 does not divide 12 ranks"),
        ({"dp_shard": 2, "dp_replicate": 2}, 12, "dp_shard is 2, but the other degrees leave 6 of 12 ranks; give 6"),
        (
            {"ep": 3},
            4,
            r"expert_parallel is 3, which does not divide the 4 ranks of a shard group; one of \[1, 2, 4\] does",
        ),
    ],
)
def test_degrees_that_do_not_make_up_the_world_are_refused(
    degrees: dict[str, int], world_size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Degrees(**degrees).resolve(world_size)


DEEP = DecoderConfig(dim=32, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=48, max_seq_len=48, vocab_size=48)


@pytest.mark.parametrize(
    ("num_ranks", "axes", "batch_sizes", "message"),
    [
        # Of the nearest degrees, the heads refuse 3 and the batch refuses what leaves too many readers.
        (8, {"tp": 8}, (2, 1), "cannot share num_heads 4: set it to 4$"),
        (12, {"tp": 12}, (6, 1), "cannot share num_heads 4: set it to 4$"),
        (8, {"tp": 8}, (3, 1), "cannot share num_heads 4: set it to 4, and change data.global_batch_size"),
        (16, {"cp": 8}, (8, 1), "context_parallel 8 does not divide the 4 heads .*; set context_parallel to 4$"),
        (16, {"cp": 8}, (4, 1), "context_parallel 8 does not divide the 4 heads .*; set context_parallel to 4$"),
        (16, {"cp": 8}, (2, 1), "does not divide the 4 heads .*; set context_parallel to 4, and change data"),
        (6, {"tp": 4, "pp": 2}, (6, 1), "= 8 does not divide 6 ranks: .*; tensor_parallel 1 fits$"),
        (12, {"tp": 4, "pp": 2}, (12, 1), "= 8 does not divide 12 ranks: .*; pipeline_parallel 1 fits$"),
        (8, {"pp": 8}, (8, 1), "8 stages, and the model 4 layers: .*; pipeline_parallel 4 fits$"),
        (8, {"pp": 8}, (4, 1), "8 stages, and the model 4 layers: .* number of layers$"),
        (8, {"tp": 2, "pp": 2}, (2, 1), "the micro-batches of a window are 1, .*; tensor_parallel 4 fits$"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_nearest_degree_that_also_fits_the_batch_and_the_other_axes(
    num_ranks: int, axes: dict[str, int], batch_sizes: tuple[int, int], message: str
) -> None:
    strategy: Any = Sharded(**{f"{AXIS_NAMES[axis]}_parallel": degree for axis, degree in axes.items()})
    strategy.parallel_devices = [torch.device("cpu")] * num_ranks
    with pytest.raises(UserError, match=message):
        strategy.check_options(RunOptions(DEEP, CrossEntropy, batch_sizes=batch_sizes))


@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "cp", "tp", "ep", "pp"])
def test_a_degree_that_is_no_number_of_ranks_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is 0; it is a number of ranks, at least 1"):
        Degrees(**{name: 0})


def test_only_what_is_not_one_is_named() -> None:
    assert Degrees().resolve(1).named() == {}
    assert Degrees(dp_replicate=2).resolve(4).named() == {"dp_replicate": 2, "dp_shard": 2}
