"""Builds the optimizer of a model: assigns each parameter to a group and its algorithm."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import nn

from genesis.base.errors import UserError
from genesis.model.part import ADAPTERS, EMBEDDINGS, HEAD, MATRICES, VECTORS, ParameterGroup
from genesis.optim.algorithm import Algorithm, list_algorithms
from genesis.optim.optimizer import GroupedOptimizer

_MATRIX_DIMS = (2, 3)


class GroupedModule(Protocol):
    """A module that knows the group of each of its parameters, as `genesis.model.decoder.Decoder` does."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields every parameter by its name."""

    def parameter_groups(self) -> Mapping[str, ParameterGroup]:
        """Returns the group of each parameter by its name."""


def count_moment_bytes(model: GroupedModule, algorithm: Algorithm) -> int:
    """Returns the bytes of the moments that the optimizer of a model will have; the model may be on the meta device."""
    groups = model.parameter_groups()
    return sum(
        sum(algorithm.of(groups[name]).list_moment_bytes(parameter.shape, parameter.element_size()))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def build_optimizer(model: GroupedModule, algorithm: Algorithm) -> GroupedOptimizer:
    """Builds the optimizer of a model's trainable parameters, in the groups that its parts name.

    The four usual groups come first, in the order of checkpoints: `matrices`, `head` (the output weight if it is not
    the embedding table), `embeddings` and `vectors`. Additional groups of parts follow.

    A parameter of three dimensions is a stack of matrices along the first, such as one for each expert.

    Raises:
        UserError: A part names no group for a parameter; or the algorithm needs whole matrices, and a part has matrices
            of other dimensions.
    """
    # The order is part of the format of checkpoints: Lightning's states go by the positions of groups and parameters.
    groups: dict[ParameterGroup, list[nn.Parameter]] = {MATRICES: [], HEAD: [], EMBEDDINGS: [], VECTORS: []}
    group_of = model.parameter_groups()
    for name, parameter in model.named_parameters():
        group = group_of.get(name)
        if group is None:
            raise UserError(f"{name} is in no group of the optimizer: its part's parameter_groups must name it")
        if not parameter.requires_grad:
            continue
        groups.setdefault(group, []).append(parameter)
        if algorithm.of(group).whole_matrices and parameter.ndim not in _MATRIX_DIMS:
            raise UserError(
                f"the optimizer is {algorithm.name}, which updates matrices and stacks of matrices, and {name} has "
                f"{parameter.ndim} dimensions: use another one, such as adamw"
            )
    # Beside adapters, whose base is frozen, the only vectors are DoRA's magnitudes.
    of_adapters = (ADAPTERS, VECTORS) if groups.get(ADAPTERS) else ()
    trained = [group for group, params in groups.items() if params]
    return GroupedOptimizer(
        [
            {
                "name": group.name,
                "params": groups[group],
                "algorithm": algorithm.of(group).name,
                **algorithm.of(group).group_options(group, has_adapters=group in of_adapters),
            }
            for group in trained
        ],
        list_algorithms(algorithm, trained),
    )
