"""The number of ranks for each kind of parallelism, and the groups of ranks: arithmetic without process groups.

    pp             stages of a pipeline
    dp_replicate   copies of the parameters that read different data
    dp_shard       ranks that read different data and share one copy of the parameters
    cp             ranks that share the positions of the same sequences (context)
    tp             ranks that share the matrices of the same layer (tensor)
    ep             ranks that share the experts; they are taken from dp_shard * cp * tp

Ranks are numbered with pp outermost and tp innermost, so that the ranks that communicate most are neighbours. The same
ranks have four views: `data_axes` (which data a rank reads), and `dense_axes`, `uncut_axes` and `sparse_axes` (where
parameters live).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Final

import numpy as np

from genesis.base.errors import UserError, numbered

_REST: Final = -1
AXIS_NAMES: Final = {"ep": "expert", "tp": "tensor", "cp": "context", "pp": "pipeline"}
"""The kinds of parallelism that a strategy is asked for by `NAME_parallel`."""


@dataclass(frozen=True)
class Degrees:
    """The size of each axis.

    Args:
        dp_replicate: Copies of the parameters; the module's docstring describes every axis.
        dp_shard: Ranks that share one copy; -1 for all ranks that remain after the other axes.
        cp: Ranks of context parallelism.
        tp: Ranks of tensor parallelism.
        ep: Ranks of expert parallelism.
        pp: Stages of the pipeline.

    Raises:
        UserError: A degree is not a number of ranks.
    """

    dp_replicate: int = 1
    dp_shard: int = _REST
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1 and not (name == "dp_shard" and value == _REST):
                rest = ", or -1 for all remaining ranks" if name == "dp_shard" else ""
                raise UserError(f"{name} is {value}; it is a number of ranks, at least 1{rest}")

    def resolve(self, world_size: int) -> "Degrees":
        """Returns these degrees for `world_size` ranks, with `dp_shard` filled in.

        Raises:
            UserError: The product is not `world_size`, or `ep` does not divide `dp_shard * cp * tp`.
        """
        others = {name: getattr(self, name) for name in ("pp", "dp_replicate", "cp", "tp")}
        num_others = prod(others.values())
        if world_size % num_others:
            names = {"pp": "pipeline_parallel", "cp": "context_parallel", "tp": "tensor_parallel"}
            given = [f"{names.get(axis, axis)} {value}" for axis, value in others.items() if value > 1]
            product = f" = {num_others}" if len(given) > 1 else ""
            raise UserError(
                f"{' * '.join(given)}{product} does not divide {numbered(world_size, 'ranks')}: lower it to one of "
                f"{', '.join(map(str, list_divisors(world_size)))}, or change trainer.devices"
            )
        num_left = world_size // num_others
        if self.dp_shard not in (_REST, num_left):
            raise UserError(
                f"dp_shard is {self.dp_shard}, but the other degrees leave {num_left} of "
                f"{numbered(world_size, 'ranks')}; give {num_left}, or -1 for all remaining ranks"
            )
        resolved = replace(self, dp_shard=num_left)
        num_lenders = num_left * self.cp * self.tp
        if num_lenders % self.ep:
            raise UserError(
                f"expert_parallel is {self.ep}, which does not divide the {numbered(num_lenders, 'ranks')} of a shard "
                f"group; one of {list_divisors(num_lenders)} does"
            )
        return resolved

    @property
    def world_size(self) -> int:
        """The total number of ranks; the degrees must be resolved."""
        assert self.dp_shard != _REST
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_world_size(self) -> int:
        """The number of ranks that read different data; the degrees must be resolved."""
        assert self.dp_shard != _REST
        return self.dp_replicate * self.dp_shard

    def data_axes(self) -> dict[str, int]:
        """Returns the view that decides which data a rank reads: ranks that differ along `dp` read different data."""
        return {"pp": self.pp, "dp": self.data_world_size, "cp": self.cp, "tp": self.tp}

    def dense_axes(self) -> dict[str, int]:
        """Returns the view on which the parameters that every token uses live."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "fsdp": self.dp_shard * self.cp, "tp": self.tp}

    def uncut_axes(self) -> dict[str, int]:
        """Returns the view on which the parameters live that every token uses and tensor parallelism does not cut."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "uncut": self.dp_shard * self.cp * self.tp}

    def sparse_axes(self) -> dict[str, int]:
        """Returns the view on which experts live."""
        num_lenders = self.dp_shard * self.cp * self.tp
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "efsdp": num_lenders // self.ep, "ep": self.ep}

    def data_rank(self, rank: int) -> int:
        """Returns the index of the share of the data that a rank reads."""
        return place_on(self.data_axes(), rank)["dp"]

    def token_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns groups of ranks; the ranks of each group together read every row of a global batch once.

        Ranks that share the tokens of rows read them whole, and strategies cut them.
        """
        return groups_along(self.data_axes(), ("dp",))

    def peer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns groups of ranks that read the same rows."""
        return groups_along(self.data_axes(), ("pp", "cp", "tp"))

    def seed_place(self, rank: int) -> tuple[int, ...]:
        """Returns what the seed of dropout depends on: ranks with other tokens or other layers draw other masks."""
        place = place_on(self.data_axes(), rank)
        # Without the axes that give ranks of equal data other tokens or layers, the data rank alone.
        is_alone = self.pp == self.cp == self.tp == 1
        return (place["dp"],) if is_alone else (place["dp"], place["cp"], place["tp"], place["pp"])

    def reports_rows(self, rank: int) -> bool:
        """Returns whether a rank gives the counts of its rows to a sum over all ranks, of which some read the same."""
        place = place_on(self.data_axes(), rank)
        return place["pp"] == place["cp"] == place["tp"] == 0

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same pipeline stage as `rank`; without a pipeline, all ranks."""
        size = self.world_size // self.pp
        first = rank // size * size
        return tuple(range(first, first + size))

    def named(self) -> dict[str, int]:
        """Returns the degrees that are not 1, by name, for a checkpoint's manifest."""
        return {name: value for name, value in asdict(self).items() if value != 1}


def place_on(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Returns a rank's coordinate on each axis; the last axis varies fastest.

    >>> place_on({"dp": 2, "tp": 4}, 6)
    {'dp': 1, 'tp': 2}
    """
    places = np.unravel_index(rank, tuple(axes.values()))
    return {name: int(place) for name, place in zip(axes, places, strict=True)}


def groups_along(axes: Mapping[str, int], names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns all ranks in groups whose members differ only in their coordinates along `names`.

    >>> groups_along({"dp": 2, "tp": 2}, ["dp"])
    ((0, 2), (1, 3))
    """
    ranks = np.arange(prod(axes.values())).reshape(tuple(axes.values()))
    outer = [number for number, name in enumerate(axes) if name not in names]
    inner = [number for number, name in enumerate(axes) if name in names]
    size = prod(axes[name] for name in names)
    return tuple(tuple(group) for group in ranks.transpose(*outer, *inner).reshape(-1, size).tolist())


def warn_of_crossing(degrees: Degrees, nodes: Sequence[int]) -> Iterator[str]:
    """Yields a warning for each axis that communicates in every layer, and has ranks on several nodes.

    Args:
        degrees: The resolved degrees.
        nodes: The node of each rank, as the launcher has placed it.

    >>> list(warn_of_crossing(Degrees(tp=2, dp_shard=2), [0, 0, 1, 1]))
    []
    >>> [line.partition(":")[0] for line in warn_of_crossing(Degrees(tp=2, dp_shard=2), [0, 1, 0, 1])]
    ['tensor parallelism crosses nodes (ranks 0, 1), and communicates in every layer over the network']
    """
    axes = degrees.data_axes()
    for axis in (name for name in ("tp", "cp") if axes[name] > 1):
        groups = groups_along(axes, (axis,))
        crossing = next((group for group in groups if len({nodes[rank] for rank in group}) > 1), None)
        if crossing is not None:
            yield (
                f"{AXIS_NAMES[axis]} parallelism crosses nodes (ranks {', '.join(map(str, crossing))}), and "
                "communicates in every layer over the network: lower its degree to what a node has, or start the ranks "
                "of a node one after the other"
            )


def list_divisors(number: int) -> list[int]:
    """Returns the divisors of a number from 1 up."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
