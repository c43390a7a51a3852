"""Strategies of tests whose data ranks are not the global ranks."""

from dataclasses import replace

from genesis.strategies import Replicated, Sharded
from genesis.strategies.degrees import Degrees
from genesis.strategies.layout import ParallelLayout
from genesis.strategies.mesh import WorldMesh


def turn_round(layout: ParallelLayout) -> ParallelLayout:
    data_rank = layout.data_world_size - 1 - layout.data_rank
    return replace(layout, data_rank=data_rank, seed_place=(data_rank,))


class Reversed(Replicated):
    """The last rank reads the first share of the data."""

    def _lay_out(self) -> ParallelLayout:
        return turn_round(super()._lay_out())


class ReversedShards(Sharded):
    """The last rank reads the first share of the data."""

    def _lay_out(self, degrees: Degrees, mesh: WorldMesh) -> ParallelLayout:
        return turn_round(super()._lay_out(degrees, mesh))


LAYOUTS = {"reversed": Reversed, "reversed_shards": ReversedShards}


def share_of(layout: str, rank: int, world_size: int) -> tuple[int, int]:
    """Returns which of how many shares of the data a rank reads."""
    return (world_size - 1 - rank if layout.startswith("reversed") else rank), world_size
