"""What a checkpoint must hold, by the live model and its optimizers, and how what it holds differs from that.

`build_expectation` looks at tensors without reading them and communicates nothing; `find_problems` is pure.
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

from .collect import canonical_name, name_optimizer, name_parameters, state_holder
from .contents import Contents, StoredTensor
from .manifest import dtype_name

_NUM_NAMED = 3


@dataclass(frozen=True)
class DueTensor:
    """A tensor that must be there.

    Attributes:
        names: Canonical names, several for a tied one: under which of them it is saved does not matter.
        shape: The global one.
        dtype: The live one.
        is_buffer: Whether it is no parameter.
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
class DueOptimizer:
    """The state that an optimizer has.

    Attributes:
        parameters: Canonical names in the order of the groups: some formats number parameters so.
        state: Parameter to key to tensor.
    """

    parameters: tuple[str, ...]
    state: Mapping[str, Mapping[str, DueTensor]]


@dataclass(frozen=True)
class Expectation:
    """What a checkpoint of a run must hold."""

    model: tuple[DueTensor, ...] = ()
    optimizers: tuple[DueOptimizer, ...] = field(default=())


def _due(name: str, tensor: Tensor) -> DueTensor:
    return DueTensor((name,), tuple(tensor.shape), tensor.dtype)


def _expect_model(module: nn.Module) -> tuple[DueTensor, ...]:
    # Parameters as the module has them and not as its state dict says: an empty state dict is what is looked for.
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
        DueTensor(tuple(names[key]), tuple(tensor.shape), tensor.dtype, not isinstance(tensor, nn.Parameter))
        for key, tensor in tensors.items()
    )


def _expect_optimizer(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> DueOptimizer:
    named = name_optimizer(index, optimizer, names)
    state: dict[str, dict[str, DueTensor]] = defaultdict(dict)
    for full_name, tensor in named.tensors.items():
        name, _, key = full_name.removeprefix(f"optimizer.{index}.").rpartition(".")
        state[name][key] = _due(name, tensor)
    parameters = [name for group in named.section["groups"] for name in group["params"]]
    return DueOptimizer(tuple(parameters), dict(state))


def count_state(optimizer: Optimizer) -> int:
    """Returns how many values of state this rank holds for an optimizer: a number that is quickly had."""
    return sum(map(len, state_holder(optimizer).state.values()))


def build_expectation(module: nn.Module, optimizers: Sequence[Optimizer]) -> Expectation:
    """Returns what a checkpoint taken now must hold, as far as this rank holds it.

    Parameters have their global shape. Of the model and of optimizer state each rank knows what it has: a stage of a
    pipeline, or under ZeRO-1 the state of some parameters (`merge_expectations`). No communication; nothing is read
    from a device.

    Raises:
        UnsupportedStateError: An optimizer updates a tensor that is no parameter of the module.
    """
    names = name_parameters(module)
    return Expectation(
        _expect_model(module),
        tuple(_expect_optimizer(index, optimizer, names) for index, optimizer in enumerate(optimizers)),
    )


def merge_expectations(by_rank: Sequence[Expectation]) -> Expectation:
    """Returns what all ranks together expect, where each may hold another part of the model and of its optimizers."""
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


def _merge_models(models: Sequence[tuple[DueTensor, ...]]) -> tuple[DueTensor, ...]:
    """Returns the tensors of all models: those that share a name are one, with the names that any rank gives it."""
    if len(models) == 1:
        return models[0]
    merged: list[DueTensor] = []
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


def _merge_optimizers(by_rank: Sequence[DueOptimizer]) -> DueOptimizer:
    parameters: dict[str, None] = {}
    state: dict[str, Mapping[str, DueTensor]] = {}
    for optimizer in by_rank:
        parameters |= dict.fromkeys(optimizer.parameters)
        state |= optimizer.state
    return DueOptimizer(tuple(parameters), state)


def format_bytes(num_bytes: int) -> str:
    """Returns a size for people.

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
    """Returns the containers that all names stand in, each with its dot, the shortest ("") first."""
    paths = [name.split(".")[:-1] for name in names]
    if not paths:
        return [""]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ["".join(f"{part}." for part in shared[:count]) for count in range(len(shared) + 1)]


def _match_names(due: Sequence[DueTensor], saved: Iterable[str]) -> tuple[dict[str, str], Callable[[str], str]]:
    """Returns (first name of each due tensor by its name in the checkpoint, what makes a saved name such a name).

    A checkpoint may name a tensor with a container more or less than the live module (`module.`, or the inner model
    alone): of all ways to leave out what is common to all names, the one that finds most counts, the plainest first.
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


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED:,} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _describe(tensor: DueTensor | StoredTensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _is_same_kind(due: DueTensor, stored: StoredTensor, *, may_be_cast: bool) -> bool:
    is_cast = may_be_cast and due.dtype.is_floating_point and stored.dtype.is_floating_point
    return due.shape == stored.shape and (due.dtype == stored.dtype or is_cast)


def _find_different(what: str, pairs: Iterable[tuple[str, DueTensor, StoredTensor]], *, may_be_cast: bool) -> list[str]:
    different = [
        f"{name} ({_describe(stored)}, live {_describe(due)})"
        for name, due, stored in pairs
        if not _is_same_kind(due, stored, may_be_cast=may_be_cast)
    ]
    if not different:
        return []
    return [f"{len(different):,} {what} have another shape or dtype than the live ones: {_name_some(different)}"]


def _compare_model(
    due: Sequence[DueTensor], stored: Mapping[str, list[StoredTensor]], contents: Contents, due_bytes: int
) -> list[str]:
    missing = [tensor for tensor in due if tensor.names[0] not in stored]
    problems = []
    if missing:
        problems.append(
            f"holds {len(due) - len(missing):,} of {len(due):,} model tensors ({format_bytes(contents.num_bytes)} "
            f"where at least {format_bytes(due_bytes)} are due); missing: "
            f"{_name_some([tensor.names[0] for tensor in missing])}"
        )
    pairs = [(tensor.names[0], tensor, one) for tensor in due for one in stored.get(tensor.names[0], ())]
    # Exports of weights are often made in half precision; a checkpoint to go on from never is.
    return problems + _find_different("model tensors", pairs, may_be_cast=contents.format == "safetensors")


def _compare_optimizer(
    index: int, due: DueOptimizer, stored: Mapping[str, Mapping[str, StoredTensor]], is_wanted: Callable[[str], bool]
) -> list[str]:
    wanted = {name: state for name, state in due.state.items() if is_wanted(name)}
    without = [name for name, state in wanted.items() if state and not stored.get(name)]
    problems = []
    if without:
        problems.append(
            f"holds the state of optimizer {index} for {len(wanted) - len(without):,} of {len(wanted):,} parameters; "
            f"missing: {_name_some(without)}"
        )
    lacking = [
        f"{name}'s {key}"
        for name, state in wanted.items()
        for key in state
        if stored.get(name) and key not in stored[name]
    ]
    if lacking:
        problems.append(f"lacks {len(lacking):,} tensors of optimizer {index}: {_name_some(lacking)}")
    pairs = [
        (f"{name}'s {key}", tensor, stored[name][key])
        for name, state in wanted.items()
        for key, tensor in state.items()
        if key in stored.get(name, {})
    ]
    return problems + _find_different(f"tensors of optimizer {index}", pairs, may_be_cast=False)


def _name_state(
    stored: Mapping[str | int, Mapping[str, StoredTensor]], due: DueOptimizer, name_of: Callable[[str], str]
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
    """Returns in what a checkpoint is less than, or other than, it must be: short sentences, none for a good one. Pure.

    What it holds beside is no problem. Safetensors may hold the model in another floating dtype.

    Args:
        expectation: What is due.
        contents: What is there.
        has_optimizer: Whether the state of optimizers is due.
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
    """Returns which names in `contents.model` are those of buffers. Pure."""
    _, name_of = _match_names(expectation.model, contents.model)
    buffers = {tensor.names[0] for tensor in expectation.model if tensor.is_buffer}
    return frozenset(name for name in contents.model if name_of(name) in buffers)
