"""The interface of the model's parts: initial values, groups of parameters, cost, memory and statistics.

A part is a module that alone knows its parameters: the decoder, the optimizer and the description ask the part.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn

from genesis.base.errors import UserError
from genesis.model.initial import InitialValues


@dataclass(frozen=True)
class ParameterGroup:
    """A group of parameters for the optimizer.

    Args:
        name: The name of the group in the optimizer, and therefore in checkpoints.
        kind: `matrix` for weights between hidden dimensions, which may be Muon's, or stacks of them along the first
            dimension; `head` for an output weight and `embedding` for a table, whose rows belong to tokens, and `head`
            for a router, whose rows belong to experts; `vector` for norms and biases, which never decay.
    """

    name: str
    kind: Literal["matrix", "head", "embedding", "vector"]


MATRICES: Final = ParameterGroup("matrices", "matrix")
HEAD: Final = ParameterGroup("head", "head")
EMBEDDINGS: Final = ParameterGroup("embeddings", "embedding")
VECTORS: Final = ParameterGroup("vectors", "vector")
ADAPTERS: Final = ParameterGroup("adapters", "matrix")


class Statistics(NamedTuple):
    """The statistics of a part in one forward: sums over its tokens, which can be added over micro-batches and ranks.

    A block returns them. They are not added to a buffer, because activation checkpointing runs a forward twice.
    """

    counts: dict[str, Tensor]
    """Scalars or vectors without gradient by name, including the unit: `load_tokens`. The log shows their sums."""
    loss_sum: Tensor | None = None
    """An auxiliary loss, a float32 scalar; it joins the sum that the step divides by the number of valid tokens."""


class Part(nn.Module, ABC):
    """A module that describes its own parameters; parts within it describe theirs.

    Attributes:
        draws_random_numbers: Whether the forward uses random numbers, so that activation checkpointing has to save and
            restore the generators' state, which costs host time for each block.
        keeps_float32: Whether its parameters are float32 under any precision; strategies then gather them as such.
        measured_note: What `genesis plan` prints of this part on accelerators where its kernels hold other memory than
            the code that is measured; None if they do not.
        precise_layers: The names of linear layers whose products are never in float8.
    """

    draws_random_numbers: bool = True
    keeps_float32: bool = False
    measured_note: str | None = None
    precise_layers: Collection[str] = ()

    @abstractmethod
    def init_weights(self, initial: InitialValues) -> None:
        """Fills each parameter with its initial values."""

    @abstractmethod
    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each parameter, by its name in this part."""

    @property
    @abstractmethod
    def flops_per_token(self) -> int:
        """Floating-point operations of a token's forward and backward: six for each weight that it multiplies."""

    @property
    def num_inactive_parameters(self) -> int:
        """The number of its parameters that a token does not use, such as those of other experts."""
        return 0

    def context_flops_per_token(self, context: int) -> int:
        """Returns the additional FLOPs of a token for its products with the tokens of a context of this length."""
        return 0


def check_counts(config: Any, may_be_zero: Collection[str] = ()) -> None:
    """Checks that each whole number of a configuration is at least 1.

    Args:
        config: A dataclass.
        may_be_zero: The fields that may also be 0.

    Raises:
        UserError: A number is too small.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        least = 0 if field.name in may_be_zero else 1
        if field.type in (int, int | None) and value is not None and value < least:
            raise UserError(f"{field.name} is {value}: it must be at least {least}")
