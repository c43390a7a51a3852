"""Caches, from save to save, the names of a model's and its optimizers' tensors and the locations of their elements.

Training waits while a save takes its snapshot. Naming some hundred tensors and finding their blocks takes a millisecond
or more; checking that nothing has changed since the last save takes a tenth of that.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._compat import LayoutGuard, local_tensor
from ..base.local_shards import LocalShard
from .collect import (
    MODEL_PREFIX,
    NamedModel,
    model_parts,
    name_groups,
    name_model,
    name_optimizer,
    optimizer_parts,
    state_holder,
)
from .plan import SharedParts


@dataclass(frozen=True)
class KnownModel:
    """A model's tensors.

    Attributes:
        model: The tensors by canonical name.
        stored: `id` of each tensor to the full name under which it is stored.
        parts: The parts of the tensors that this rank holds.
        tensors: The tensors that hold the elements of this rank's parameters.
    """

    model: NamedModel
    stored: dict[int, str]
    parts: list[LocalShard]
    tensors: list[Tensor]


@dataclass(frozen=True)
class KnownOptimizer:
    """An optimizer's state.

    Attributes:
        section: The saved state other than tensors.
        parts: The parts of the state's tensors that this rank holds.
        tensors: The tensors that hold the elements of the parts.
    """

    section: dict[str, Any]
    parts: list[LocalShard]
    tensors: list[Tensor]


class _Tensors:
    """Ordered tensors and the addresses of their elements, to detect tensors that were replaced or moved.

    Args:
        keys: The owner's keys of the tensors.
        tensors: One tensor for each key.
    """

    def __init__(self, keys: Iterable[object], tensors: Iterable[Tensor]) -> None:
        self._keys, self._tensors = list(keys), list(tensors)
        self._distinct = list({id(tensor): tensor for tensor in self._tensors}.values())
        self._has_distributed = any(isinstance(tensor, DTensor) for tensor in self._distinct)
        self._layouts = LayoutGuard(self._local())

    def _local(self) -> list[Tensor]:
        # Testing the type of each tensor would take as long as comparing the layouts.
        return list(map(local_tensor, self._distinct)) if self._has_distributed else self._distinct

    def are(self, keys: Sequence[object], values: list[Any]) -> bool:
        """Returns whether `values` are the same tensors under the same keys, with elements at the same addresses."""
        return self._has(keys, values) and self._layouts.holds(self._local())

    def seem_to_be(self, keys: Sequence[object], values: list[Any]) -> bool:
        """Returns what `are` does unless only the order of elements at an address has changed: see `have_forms`."""
        return self._has(keys, values) and self._layouts.has_addresses(self._local())

    def have_forms(self) -> bool:
        """Returns whether the tensors' elements are in the same order, wherever they are by now."""
        return self._layouts.has_forms(self._local())

    def _has(self, keys: Sequence[object], values: list[Any]) -> bool:
        return (
            len(values) == len(self._tensors)
            and all(map(is_, values, self._tensors))  # `==` would compare elements, on their device
            and keys == self._keys
        )


@dataclass(frozen=True)
class _OptimizerEntry:
    parameters: list[Tensor]
    group_parameters: list[list[Tensor]]
    group_names: list[list[str]]
    state: _Tensors
    parts: list[LocalShard]
    tensors: list[Tensor]

    def seems_of(self, optimizer: Optimizer, holder: Optimizer) -> bool:
        """Returns whether the optimizer has the same parameters; the tensors of its state are not looked at."""
        groups = [group["params"] for group in optimizer.param_groups]
        return (
            len(holder.state) == len(self.parameters)
            and len(groups) == len(self.group_parameters)
            and all(map(_are_same, groups, self.group_parameters))
        )

    def has_state_of(self, holder: Optimizer) -> bool:
        """Returns whether the optimizer's state consists of the same tensors, with elements at the same addresses."""
        states = holder.state.values()
        return _are_same(list(holder.state), self.parameters) and self.state.are(
            list(chain.from_iterable(states)), list(chain.from_iterable(state.values() for state in states))
        )


def _are_same(objects: list[Any], others: list[Any]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))


class KnownTensors:
    """The cache of one run. It keeps tensors alive: drop it when the run ends. One thread at a time uses it.

    Args:
        is_late: Whether the state of optimizers, and the order of elements in the model's tensors, are taken for
            unchanged at first: `has_missed_change` has to be asked before a tensor is read. Only a step of the
            optimizer, for which a save is waited, replaces tensors there.
    """

    def __init__(self, *, is_late: bool = False) -> None:
        self._is_late = is_late
        self._unchecked: list[tuple[int, Optimizer]] = []
        self._unchecked_model: _Tensors | None = None
        self._model: tuple[_Tensors, KnownModel] | None = None
        self._optimizers: dict[int, _OptimizerEntry] = {}
        self._shared: tuple[list[list[LocalShard]], SharedParts] | None = None

    def find_model(self, state_dict: Mapping[str, Any]) -> KnownModel:
        """Returns the model's tensors by name.

        Args:
            state_dict: Made with `keep_vars=True`, so that ties show.

        Raises:
            UnsupportedStateError: Two different tensors would have the same name, or a tensor cannot be saved.
        """
        self._unchecked, self._unchecked_model = [], None  # of a snapshot that was not finished
        keys, values = list(state_dict), list(state_dict.values())
        if self._model is not None:
            tensors, known = self._model
            if self._is_late and tensors.seem_to_be(keys, values):
                self._unchecked_model = tensors
                return known
            if not self._is_late and tensors.are(keys, values):
                return known
        model = name_model(state_dict)
        # An `id` stays valid because the entry below refers to the tensors: no other object can get it meanwhile.
        stored = {id(tensor): MODEL_PREFIX + name for name, tensor in model.tensors.items()}
        parameters = [local_tensor(tensor) for tensor in model.tensors.values() if isinstance(tensor, nn.Parameter)]
        found = KnownModel(model, stored, model_parts(model), parameters)
        # Values of a module that are not tensors may differ at each save, so that nothing can be cached.
        self._model = None if model.extras else (_Tensors(keys, values), found)
        return found

    def find_optimizer(
        self, index: int, optimizer: Optimizer, name_parameters: Callable[[], Mapping[int, str]]
    ) -> KnownOptimizer:
        """Returns the state of the run's optimizer number `index`, as this rank holds it.

        Args:
            index: The optimizer's number.
            optimizer: The live optimizer.
            name_parameters: Returns the names of the model's parameters by `id`; called only if a tensor has changed.

        Raises:
            UnsupportedStateError: The optimizer updates a tensor that is not the model's, or its state has keys that
                are not plain names.
        """
        holder, known = state_holder(optimizer), self._optimizers.get(index)
        is_known = known is not None and known.seems_of(optimizer, holder)
        if is_known and self._is_late:
            self._unchecked.append((index, optimizer))
        if known is not None and is_known and (self._is_late or known.has_state_of(holder)):
            groups = [
                {**group, "params": names}
                for group, names in zip(optimizer.param_groups, known.group_names, strict=True)
            ]
            section = {"groups": groups, "values": {}, "has_state": bool(known.parameters)}
            return KnownOptimizer(section, known.parts, known.tensors)
        names = name_parameters()
        named = name_optimizer(index, optimizer, names)
        parts = optimizer_parts(named)
        # The old entry, and the groups of its parts, would keep its tensors and their memory alive.
        self._optimizers.pop(index, None)
        self._shared = None
        states, tensors = holder.state.values(), list(map(local_tensor, named.tensors.values()))
        if not named.section["values"]:  # values that are not tensors are read at each save
            self._optimizers[index] = _OptimizerEntry(
                list(holder.state),
                [list(group["params"]) for group in optimizer.param_groups],
                name_groups(index, optimizer, names),
                _Tensors(chain.from_iterable(states), chain.from_iterable(state.values() for state in states)),
                parts,
                tensors,
            )
        return KnownOptimizer(named.section, parts, tensors)

    def has_missed_change(self) -> bool:
        """Returns whether a late check finds other tensors than were taken; then the next searches will not be late.

        Another thread may call it, until the next search.
        """
        model, self._unchecked_model = self._unchecked_model, None
        unchecked, self._unchecked = self._unchecked, []
        has_missed = model is not None and not model.have_forms()
        for index, optimizer in unchecked:
            has_missed |= not self._optimizers[index].has_state_of(state_holder(optimizer))
        self._is_late = self._is_late and not has_missed
        return has_missed

    def share(self, model: KnownModel, optimizers: Sequence[KnownOptimizer], swapped: list[LocalShard]) -> SharedParts:
        """Returns all parts that ranks plan together. Nothing is computed if they are those of the last call.

        Args:
            model: The model's tensors.
            optimizers: The optimizers' tensors.
            swapped: The parts of tensors that are saved in the place of the model's.
        """
        lists = [model.parts, *(optimizer.parts for optimizer in optimizers)]
        if not swapped and self._shared is not None and _are_same(lists, self._shared[0]):
            return self._shared[1]
        parameters = [*model.tensors, *(local.data for local in swapped)]
        states = list(chain.from_iterable(optimizer.tensors for optimizer in optimizers))
        shared = SharedParts([*chain.from_iterable(lists), *swapped], parameters, states)
        self._shared = None if swapped else (lists, shared)
        return shared
