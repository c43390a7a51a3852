"""The interface of the model's parts: initial values, groups of parameters, cost and statistics.

A part is a module that alone knows its parameters: the decoder, the optimizer and the description ask the part.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn

from genesis.errors import UserError
from genesis.model.initial import InitialValues


@dataclass(frozen=True)
class ParameterGroup:
    """What the optimizer must know of some parameters.

    Args:
        name: Of their group in the optimizer, and so in checkpoints.
        kind: `matrix` for weights between hidden dimensions, which may be Muon's; `head` for an output weight and
            `embedding` for a table, whose rows belong to tokens; `vector` for norms and biases, which never decay.
    """

    name: str
    kind: Literal["matrix", "head", "embedding", "vector"]


MATRICES: Final = ParameterGroup("matrices", "matrix")
HEAD: Final = ParameterGroup("head", "head")
EMBEDDINGS: Final = ParameterGroup("embeddings", "embedding")
VECTORS: Final = ParameterGroup("vectors", "vector")


class Statistics(NamedTuple):
    """What a part reports of one forward: sums over its tokens, so that micro-batches and ranks add up.

    A block returns them. They are not added to a buffer, because activation checkpointing runs a forward twice.
    """

    counts: dict[str, Tensor]
    """Scalars or vectors without gradient by name, the unit in it: `load_tokens`. The log shows their sums."""
    loss_sum: Tensor | None = None
    """An auxiliary loss, a float32 scalar; it joins the sum that the step divides by the number of valid tokens."""


class Part(nn.Module, ABC):
    """A module that answers for the parameters that it holds; a part within it answers for its own.

    Attributes:
        draws_random_numbers: Whether its forward does, so that activation checkpointing has to save and set the state
            of the generators, which takes the host's time for each block.
    """

    draws_random_numbers: bool = True

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

    def context_flops_per_token(self, context: int) -> int:
        """Returns what the products of a token with those of a context of so many tokens add to that."""
        return 0


def check_counts(config: Any) -> None:
    """Checks that each whole number of a configuration is at least 1.

    Raises:
        UserError: One is not.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in (int, int | None) and value is not None and value < 1:
            raise UserError(f"{field.name} is {value}: it must be at least 1")
