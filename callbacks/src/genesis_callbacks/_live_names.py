"""Names what one rank's live model and optimizers hold, for the comparison with a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from .checkpoint.collect import MODEL_PREFIX, name_groups, name_model, name_parameters
from .checkpoint.groups import GroupNames


@dataclass(frozen=True)
class LiveNames:
    """The names of the tensors that one restoring rank holds.

    Attributes:
        model: Full names of its model's tensors.
        optimizers: The names of the parameters in the groups of each of its optimizers.
    """

    model: frozenset[str]
    optimizers: tuple[GroupNames, ...]


def name_optimizer_groups(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    """Returns the names of the parameters in each group of the run's optimizer number `index`."""
    return tuple(map(tuple, name_groups(index, optimizer, names)))


def name_live(module: LightningModule, optimizers: Iterable[Optimizer]) -> LiveNames:
    """Returns the names that this rank holds. No communication."""
    model = name_model(module.state_dict(keep_vars=True))
    names = name_parameters(module)
    return LiveNames(
        frozenset(MODEL_PREFIX + name for name in model.tensors),
        tuple(name_optimizer_groups(index, optimizer, names) for index, optimizer in enumerate(optimizers)),
    )
