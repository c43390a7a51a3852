"""One device mesh of all ranks, and its views: the only file that uses private names of torch's meshes.

All views come from one 1-D mesh, so that torch can combine them in one tensor (a parameter that tensor parallelism and
FSDP2 both shard). Making a view makes process groups, which is a collective: every rank asks for the same views in the
same order. Unused views cost nothing.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from genesis.strategies.degrees import Degrees
from genesis.strategies.timeouts import set_timeout

_ALWAYS_REAL: Final = ("dp", "fsdp", "efsdp", "uncut")
"""Axes over which torch communicates even if they have only one rank."""


class WorldMesh:
    """The mesh of all ranks, divided by degrees. Every rank creates one; creating it communicates.

    Args:
        degrees: The degrees, resolved for the number of ranks.
        device_type: `cpu` or `cuda`.
        timeout_seconds: Time limit of the collectives of all groups; None leaves each group the limit that torch gives.
    """

    def __init__(self, degrees: Degrees, device_type: str, timeout_seconds: float | None = None) -> None:
        self._degrees, self._timeout_seconds = degrees, timeout_seconds
        self._world = init_device_mesh(device_type, (degrees.world_size,), mesh_dim_names=("world",))
        self._limit(self._world, ("world",))

    @cached_property
    def data(self) -> DeviceMesh:
        """The axes that decide which data a rank reads: pp, dp, cp, tp."""
        return self._view(self._degrees.data_axes())

    @cached_property
    def dense(self) -> DeviceMesh:
        """The axes of the parameters that every token uses: pp, dp_replicate, fsdp, tp."""
        return self._view(self._degrees.dense_axes())

    @cached_property
    def sparse(self) -> DeviceMesh:
        """The axes of experts: pp, dp_replicate, efsdp, ep."""
        return self._view(self._degrees.sparse_axes())

    @cached_property
    def shard(self) -> DeviceMesh:
        """The mesh that FSDP2 takes for dense parameters: fsdp alone, or dp_replicate and fsdp."""
        # A second axis selects hybrid sharding, which adds an all-reduce to every reduction, even over one rank.
        names = ("fsdp",) if self._degrees.dp_replicate == 1 else ("dp_replicate", "fsdp")
        return self.dense[names]

    @cached_property
    def tensor(self) -> DeviceMesh:
        """The ranks that share the matrices of each layer: tp alone."""
        return self.dense["tp"]

    @cached_property
    def uncut(self) -> DeviceMesh:
        """The mesh that FSDP2 takes for dense parameters that tensor parallelism does not cut."""
        names = ("uncut",) if self._degrees.dp_replicate == 1 else ("dp_replicate", "uncut")
        return self._view(self._degrees.uncut_axes())[names]

    @cached_property
    def experts(self) -> DeviceMesh:
        """The ranks that share the experts: ep alone."""
        return self.sparse["ep"]

    @cached_property
    def expert_shard(self) -> DeviceMesh:
        """The mesh that FSDP2 takes for experts: efsdp alone, or dp_replicate and efsdp."""
        names = ("efsdp",) if self._degrees.dp_replicate == 1 else ("dp_replicate", "efsdp")
        return self.sparse[names]

    @cached_property
    def tokens(self) -> DeviceMesh:
        """The ranks that together read every row of a global batch once."""
        return self.data["dp"]

    def _view(self, axes: dict[str, int]) -> DeviceMesh:
        # An axis of one rank needs no process group: torch's fake backend replaces it.
        alone = {name: "fake" for name, size in axes.items() if size == 1 and name not in _ALWAYS_REAL}
        view = self._world._unflatten(0, tuple(axes.values()), tuple(axes), backend_override=alone)  # type: ignore[arg-type]
        self._limit(view, tuple(name for name in axes if name not in alone))
        return view

    def _limit(self, mesh: DeviceMesh, names: Sequence[str]) -> None:
        """Sets the time limit of the groups of a mesh's axes, which are not those of the default group."""
        if self._timeout_seconds is not None:
            for name in names:
                set_timeout(mesh.get_group(name), self._timeout_seconds)
