"""Lists the tensors that a checkpoint of the live model and optimizers must hold, and compares a checkpoint with them.

`build_expectation` does not read the tensors' values and does not communicate; `find_problems` is pure.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from genesis_callbacks.base.errors import numbered

from ..base.errors import name_some
from ..base.manifest import dtype_name
from .collect import canonical_name, name_optimizer, name_parameters, state_holder
from .contents import Contents, StoredTensor


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a checkpoint must hold.

    Attributes:
        names: Canonical names; a tied tensor has several and may be saved under any of them.
        shape: The global shape.
        dtype: The dtype of the live tensor.
        is_buffer: Whether the tensor is a buffer, not a parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpectedOptimizer:
    """The state that a checkpoint must hold for an optimizer.

    Attributes:
        parameters: Canonical names in the order of the groups, by which some formats number parameters.
        state: Parameter to key to tensor.
    """

    parameters: tuple[str, ...]
    state: Mapping[str, Mapping[str, ExpectedTensor]]


@dataclass(frozen=True)
class Expectation:
    """The content that a checkpoint of a run must have."""

    model: tuple[ExpectedTensor, ...] = ()
    optimizers: tuple[ExpectedOptimizer, ...] = field(default=())


def _due(name: str, tensor: Tensor) -> ExpectedTensor:
    return ExpectedTensor((name,), tuple(tensor.shape), tensor.dtype)


def _expect_model(module: nn.Module) -> tuple[ExpectedTensor, ...]:
    # Parameters from the module and not from its state dict: the check must also detect an empty state dict.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    others = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for name, tensor in [*parameters.items(), *others.items()]:
        if isinstance(tensor, Tensor):
            tensors[id(tensor)] = tensor
            if canonical_name(name) not in names[id(tensor)]:
                names[id(tensor)].append(canonical_name(name))
    return tuple(
        ExpectedTensor(tuple(names[key]), tuple(tensor.shape), tensor.dtype, not isinstance(tensor, nn.Parameter))
        for key, tensor in tensors.items()
    )


def _expect_optimizer(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> ExpectedOptimizer:
    named = name_optimizer(index, optimizer, names)
    state: dict[str, dict[str, ExpectedTensor]] = defaultdict(dict)
    for full_name, tensor in named.tensors.items():
        name, _, key = full_name.removeprefix(f"optimizer.{index}.").rpartition(".")
        state[name][key] = _due(name, tensor)
    parameters = [name for group in named.section["groups"] for name in group["params"]]
    return ExpectedOptimizer(tuple(parameters), dict(state))


def count_state(optimizer: Optimizer) -> int:
    """Returns the number of state values that this rank holds for an optimizer; a cheap sign that state appeared."""
    return sum(map(len, state_holder(optimizer).state.values()))


def build_expectation(module: nn.Module, optimizers: Sequence[Optimizer]) -> Expectation:
    """Returns this rank's part of the content that a checkpoint saved now must have.

    Parameters have their global shape. Each rank lists only the tensors that it holds, such as a stage of a pipeline,
    or under ZeRO-1 the state of some parameters; `merge_expectations` combines the ranks. No communication; nothing is
    read from a device.

    Raises:
        UnsupportedStateError: An optimizer updates a tensor that is not a parameter of the module.
    """
    names = name_parameters(module)
    return Expectation(
        _expect_model(module),
        tuple(_expect_optimizer(index, optimizer, names) for index, optimizer in enumerate(optimizers)),
    )


def merge_expectations(by_rank: Sequence[Expectation]) -> Expectation:
    """Returns the expectation of all ranks together, which may hold different parts of the model and its optimizers."""
    num_optimizers = max(len(expectation.optimizers) for expectation in by_rank)
    return Expectation(
        _merge_models(list(dict.fromkeys(expectation.model for expectation in by_rank))),
        tuple(
            _merge_optimizers(
                [expectation.optimizers[index] for expectation in by_rank if index < len(expectation.optimizers)]
            )
            for index in range(num_optimizers)
        ),
    )


def _merge_models(models: Sequence[tuple[ExpectedTensor, ...]]) -> tuple[ExpectedTensor, ...]:
    """Returns the tensors of all ranks: tensors that share a name are one tensor with the names of all ranks."""
    if len(models) == 1:
        return models[0]
    merged: list[ExpectedTensor] = []
    places: dict[str, int] = {}
    for tensor in (tensor for model in models for tensor in model):
        place = next((places[name] for name in tensor.names if name in places), len(merged))
        if place == len(merged):
            merged.append(tensor)
        else:
            names = tuple(dict.fromkeys((*merged[place].names, *tensor.names)))
            merged[place] = replace(merged[place], names=names)
        places |= dict.fromkeys(tensor.names, place)
    return tuple(merged)


def _merge_optimizers(by_rank: Sequence[ExpectedOptimizer]) -> ExpectedOptimizer:
    parameters: dict[str, None] = {}
    state: dict[str, Mapping[str, ExpectedTensor]] = {}
    for optimizer in by_rank:
        parameters |= dict.fromkeys(optimizer.parameters)
        state |= optimizer.state
    return ExpectedOptimizer(tuple(parameters), state)


def format_bytes(num_bytes: int) -> str:
    """Returns a size in readable units.

    Example:
        >>> format_bytes(39_120)
        '39.1 KB'
    """
    size, unit = float(num_bytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


# ---- names


def _common_prefixes(names: Iterable[str]) -> list[str]:
    """Returns the prefixes that all names share, each with its final dot, the shortest ("") first."""
    paths = [name.split(".")[:-1] for name in names]
    if not paths:
        return [""]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ["".join(f"{part}." for part in shared[:count]) for count in range(len(shared) + 1)]


def _match_names(due: Sequence[ExpectedTensor], saved: Iterable[str]) -> tuple[dict[str, str], Callable[[str], str]]:
    """Returns (saved name to first name of each expected tensor, function that maps a saved name to the live form).

    A checkpoint's names may have one container more or less than those of the live module (`module.`, or the inner
    model alone). Of all combinations of common prefixes to remove, the function uses the one with the most matches; on
    a tie it uses the shortest prefixes.
    """
    first_names = {name: tensor.names[0] for tensor in due for name in tensor.names}
    saved_names = {canonical_name(name) for name in saved}
    ways = [(ours, theirs) for ours in _common_prefixes(first_names) for theirs in _common_prefixes(saved_names)]

    def count(way: tuple[str, str]) -> int:
        ours, theirs = way
        stripped = {name.removeprefix(theirs) for name in saved_names}
        return sum(name.removeprefix(ours) in stripped for name in first_names)

    ours, theirs = max(ways, key=count)
    table = {name.removeprefix(ours): first for name, first in first_names.items()}
    return table, lambda name: table.get(canonical_name(name).removeprefix(theirs), canonical_name(name))


# ---- differences


def _describe(tensor: ExpectedTensor | StoredTensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _is_same_kind(due: ExpectedTensor, stored: StoredTensor, *, may_be_cast: bool) -> bool:
    is_cast = may_be_cast and due.dtype.is_floating_point and stored.dtype.is_floating_point
    return due.shape == stored.shape and (due.dtype == stored.dtype or is_cast)


def _find_different(
    what: str, pairs: Iterable[tuple[str, ExpectedTensor, StoredTensor]], *, may_be_cast: bool
) -> list[str]:
    different = [
        f"{name} ({_describe(stored)}, live {_describe(due)})"
        for name, due, stored in pairs
        if not _is_same_kind(due, stored, may_be_cast=may_be_cast)
    ]
    if not different:
        return []
    return [f"{len(different):,} {what} differ from the live ones in shape or dtype: {name_some(different)}"]


def _compare_model(
    due: Sequence[ExpectedTensor], stored: Mapping[str, list[StoredTensor]], contents: Contents, due_bytes: int
) -> list[str]:
    missing = [tensor for tensor in due if tensor.names[0] not in stored]
    problems = []
    if missing:
        problems.append(
            f"holds {len(due) - len(missing):,} of {numbered(len(due), 'model tensors')} "
            f"({format_bytes(contents.num_bytes)} where at least {format_bytes(due_bytes)} are expected); missing: "
            f"{name_some([tensor.names[0] for tensor in missing])}"
        )
    pairs = [(tensor.names[0], tensor, one) for tensor in due for one in stored.get(tensor.names[0], ())]
    # Exports of weights often have half precision; a checkpoint to resume from never has.
    return problems + _find_different("model tensors", pairs, may_be_cast=contents.format == "safetensors")


def _compare_optimizer(
    index: int,
    due: ExpectedOptimizer,
    stored: Mapping[str, Mapping[str, StoredTensor]],
    is_wanted: Callable[[str], bool],
) -> list[str]:
    wanted = {name: state for name, state in due.state.items() if is_wanted(name)}
    without = [name for name, state in wanted.items() if state and not stored.get(name)]
    problems = []
    if without:
        problems.append(
            f"holds the state of optimizer {index} for {len(wanted) - len(without):,} of "
            f"{numbered(len(wanted), 'parameters')}; missing: {name_some(without)}"
        )
    lacking = [
        f"{name}'s {key}"
        for name, state in wanted.items()
        for key in state
        if stored.get(name) and key not in stored[name]
    ]
    if lacking:
        problems.append(f"lacks {numbered(len(lacking), 'tensors')} of optimizer {index}: {name_some(lacking)}")
    pairs = [
        (f"{name}'s {key}", tensor, stored[name][key])
        for name, state in wanted.items()
        for key, tensor in state.items()
        if key in stored.get(name, {})
    ]
    return problems + _find_different(f"tensors of optimizer {index}", pairs, may_be_cast=False)


def _name_state(
    stored: Mapping[str | int, Mapping[str, StoredTensor]], due: ExpectedOptimizer, name_of: Callable[[str], str]
) -> dict[str, Mapping[str, StoredTensor]]:
    """Returns a checkpoint's optimizer state by the live names of the parameters."""
    named: dict[str, Mapping[str, StoredTensor]] = {}
    for parameter, state in stored.items():
        if isinstance(parameter, str):
            named[name_of(parameter)] = state
        elif parameter < len(due.parameters):
            named[due.parameters[parameter]] = state
    return named


def find_problems(
    expectation: Expectation, contents: Contents, *, has_optimizer: bool = True, ignore: Sequence[str] = ()
) -> list[str]:
    """Returns a short sentence for each expected tensor or state that a checkpoint lacks or holds differently. Pure.

    Additional content is not a problem. Safetensors may hold the model in another floating dtype.

    Args:
        expectation: The content that the checkpoint must have.
        contents: The content of the checkpoint.
        has_optimizer: Whether the state of optimizers is expected.
        ignore: Globs of the names of parameters and buffers that may be missing or different.
    """

    def is_wanted(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in ignore)

    due = [tensor for tensor in expectation.model if all(map(is_wanted, tensor.names))]
    table, name_of = _match_names(expectation.model, contents.model)
    known = set(table.values())
    stored: dict[str, list[StoredTensor]] = defaultdict(list)
    for name, tensor in contents.model.items():
        if name_of(name) in known:
            stored[name_of(name)].append(tensor)
    optimizers = expectation.optimizers if has_optimizer else ()
    due_bytes = sum(tensor.num_bytes for tensor in due) + sum(
        tensor.num_bytes for optimizer in optimizers for state in optimizer.state.values() for tensor in state.values()
    )
    problems = [*contents.problems, *_compare_model(due, stored, contents, due_bytes)]
    for index, optimizer in enumerate(optimizers):
        state: Mapping[str | int, Any] = contents.optimizers.get(index, {})
        problems += _compare_optimizer(index, optimizer, _name_state(state, optimizer, name_of), is_wanted)
    return problems


def name_buffers(expectation: Expectation, contents: Contents) -> frozenset[str]:
    """Returns the names in `contents.model` that belong to buffers. Pure."""
    _, name_of = _match_names(expectation.model, contents.model)
    buffers = {tensor.names[0] for tensor in expectation.model if tensor.is_buffer}
    return frozenset(name for name in contents.model if name_of(name) in buffers)
