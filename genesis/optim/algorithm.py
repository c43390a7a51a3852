"""What an optimizer's algorithm is: its options, its moments and its update. Everything else asks the algorithm."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple

import torch
from jaxtyping import BFloat16
from torch import Tensor

from genesis.base.errors import UserError
from genesis.model.adapter import AdapterConfig
from genesis.model.part import ADAPTERS, EMBEDDINGS, HEAD, MATRICES, VECTORS, ParameterGroup

NO_DECAY: Final = 0.0
"""The weight decay of adapters, if none is given: it would pull their update to zero, which is the base."""


class Parts(NamedTuple):
    """What an update gets: parameters of one group, or flat parts of them. Each list has one entry for each.

    Args:
        weights: The parameters' elements on this rank.
        gradients: Their gradients, which may be written to.
        moments: Each moment, in the order of `Algorithm.moments`, on the device of the update.
        steps: The count of updates, a float32 scalar; empty if the algorithm does not count.
        divisor: A number on the device by which the update divides the gradients (`Algorithm.divides`); or None.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    moments: tuple[list[Tensor], ...]
    steps: list[Tensor]
    divisor: Tensor | None = None


class Form(NamedTuple):
    """The form of a moment beside that of its parameter.

    Args:
        dtype: Its type; None for the parameter's.
        block: How many neighbouring values of a row share one element. The last element of a row may have fewer.
    """

    dtype: torch.dtype | None = None
    block: int = 1

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the moment's shape for a parameter of some shape.

        Example:
            >>> Form(block=128).shape((64, 576))
            (64, 5)
        """
        return (*shape[:-1], -(-shape[-1] // self.block)) if shape else ()


@dataclass(frozen=True)
class RateProposal:
    """Options for another global batch.

    Args:
        factor: New global batch over the old one.
        lr: Learning rate.
        betas: Decay of the moments; None where the rule has no valid one, because the batch grows too much.
        eps: Added to the root of the second moment.
    """

    factor: float
    lr: float
    betas: tuple[float, float] | None
    eps: float


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """How parameters are updated: derive a frozen dataclass of plain values, whose fields are its options.

    A recipe chooses one by `model.optimizer: {class_path: ..., init_args: {...}}`. It has no state: moments are in the
    optimizer, where offload, sharding, checkpoints, plans and reports find them by the names in `moments`. Learning
    rates are the peaks of a schedule.

    Args:
        lr: Learning rate.
        weight_decay: Weight decay of matrices; vectors (norms, biases) are never decayed.
        adapter_lr: Learning rate of adapters; by default `lr`, which replaces it on the command line.
        adapter_weight_decay: Weight decay of adapters; by default none, and a run that continues keeps its own.

    Attributes:
        moments: Names of the states of each parameter; none by default. Each is zeros at first, and has the
            parameter's shape and dtype unless `forms` has another form.
        counts_steps: Whether there is a state `step`, to which each update adds 1.
        whole_matrices: Whether the update of a matrix needs all its elements, so that ranks must not cut it. `update`
            then only prepares it, and leaves in the place of the gradient what `direct` gets.

    Raises:
        UserError: A value is out of its range.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    counts_steps: ClassVar[bool] = False
    whole_matrices: ClassVar[bool] = False

    lr: float = 3e-4
    weight_decay: float = 0.1
    adapter_lr: float | None = None
    adapter_weight_decay: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) is None and one.default is not None:
                raise UserError(f"optimizer.{one.name} is null: give a value, or leave it out")
        for name in ("lr", "weight_decay", "adapter_lr", "adapter_weight_decay"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise UserError(f"optimizer.{name} is {value}: it must be at least 0")

    @property
    def name(self) -> str:
        """Its name in the groups of checkpoints."""
        return type(self).__name__.lower()

    @property
    def whole_name(self) -> str | None:
        """The name of the algorithm of matrices if it needs them whole; otherwise None."""
        one = self.of(MATRICES)
        return one.name if one.whole_matrices else None

    @property
    def forms(self) -> Mapping[str, Form]:
        """The form of each moment that has not its parameter's shape and dtype; empty by default."""
        return {}

    @property
    def parts(self) -> "tuple[Algorithm, ...]":
        """The algorithms of all parameters, each once; that of matrices is the first."""
        return tuple(dict.fromkeys(map(self.of, (MATRICES, HEAD, EMBEDDINGS, VECTORS))))

    def find_row_block(self, adapter: AdapterConfig | None = None) -> int:
        """Returns how many values of a row share an element of a moment at most, which ranks must not divide.

        Args:
            adapter: The adapters that are trained, with what is trained beside them; None for all weights.
        """
        groups = [MATRICES, HEAD, EMBEDDINGS, VECTORS]
        if adapter is not None:
            groups = [ADAPTERS, VECTORS, *({"head": HEAD, "embedding": EMBEDDINGS}[one] for one in adapter.also_train)]
        blocks = (form.block for group in groups for form in self.of(group).forms.values())
        return max(blocks, default=1)

    def of(self, group: ParameterGroup) -> "Algorithm":
        """Returns the algorithm of a group: another one where this one is not for all parameters."""
        return self

    def count_moments(self, group: ParameterGroup) -> int:
        """Returns the number of moments of each parameter of a group."""
        return len(self.of(group).moments)

    def list_moment_bytes(self, shape: Sequence[int], element_bytes: int) -> list[int]:
        """Returns the bytes of each moment of a parameter that this algorithm updates.

        Args:
            shape: The parameter's, or that of a rank's part.
            element_bytes: Bytes of one of its elements.
        """
        forms = [self.forms.get(moment, Form()) for moment in self.moments]
        return [
            math.prod(form.shape(shape)) * (element_bytes if form.dtype is None else form.dtype.itemsize)
            for form in forms
        ]

    def decays(self, group: ParameterGroup) -> bool:
        """Returns whether weight decay is for a group."""
        return group.kind in ("matrix", "head")

    def group_options(self, group: ParameterGroup, *, has_adapters: bool) -> dict[str, Any]:
        """Returns the options of a group, as `update` gets them; checkpoints hold them, and a schedule changes `lr`.

        Args:
            group: The group.
            has_adapters: Whether it belongs to adapters.
        """
        lr = self.adapter_lr if has_adapters and self.adapter_lr is not None else self.lr
        decay = self.weight_decay
        if has_adapters:
            decay = NO_DECAY if self.adapter_weight_decay is None else self.adapter_weight_decay
        return {**self.update_options(), "lr": lr, "weight_decay": decay if self.decays(group) else 0.0}

    def update_options(self) -> dict[str, Any]:
        """Returns the options that are the same for all groups; by default the fields that only this class has."""
        common = {field.name for field in fields(Algorithm)}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in common}

    def propose_rate(self, factor: float) -> RateProposal | None:
        """Returns what a rule suggests for a global batch `factor` times as large; None if no rule is known."""
        return None

    def divides(self, options: Mapping[str, Any]) -> bool:
        """Returns whether `update` divides the gradients by `Parts.divisor` where it reads them, on an accelerator."""
        return False

    @abstractmethod
    def update(self, options: Mapping[str, Any], parts: Parts) -> None:
        """Updates weights and moments in place. Ranks and offload give it any part of a tensor.

        Each element must get the same bits wherever a tensor is cut, so that it may not look at other elements.

        Args:
            options: Those of the group, with the learning rate of this step.
            parts: The parts, whose gradients are not scaled yet if there is a divisor.
        """

    def direct(self, matrices: BFloat16[Tensor, "N rows columns"]) -> BFloat16[Tensor, "N rows columns"]:
        """Returns the directions in which whole matrices move; needed with `whole_matrices` alone.

        Args:
            matrices: Matrices of one shape, no taller than wide: others are transposed before and after.
        """
        raise NotImplementedError

    def step_size(self, options: Mapping[str, Any], shape: Sequence[int]) -> float:
        """Returns the factor by which a matrix moves in its direction; needed with `whole_matrices` alone."""
        raise NotImplementedError


def list_algorithms(algorithm: Algorithm, groups: Sequence[ParameterGroup]) -> dict[str, Algorithm]:
    """Returns the algorithms of some groups by their names.

    Raises:
        UserError: Two different algorithms have the same name.
    """
    found: dict[str, Algorithm] = {}
    for group in groups:
        one = algorithm.of(group)
        if type(found.setdefault(one.name, one)) is not type(one):
            raise UserError(f"two algorithms of model.optimizer have the name {one.name!r}: rename one of the classes")
    return found


def check_shares(options: Mapping[str, float]) -> None:
    """Checks decays of moments.

    Args:
        options: Values by the name of their option.

    Raises:
        UserError: A value is not at least 0 and below 1.
    """
    for name, value in options.items():
        if not 0.0 <= value < 1.0:
            raise UserError(f"optimizer.{name} has {value}: it must be at least 0 and below 1")
