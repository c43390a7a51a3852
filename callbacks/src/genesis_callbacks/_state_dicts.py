"""Reads the state dicts of modules and loops, with the results of torch and Lightning and in a fraction of their time.

Training waits while a save reads them. Only plain modules and loops are read here. A module with hooks, or a class with
its own method, is called as torch and Lightning call it. The private names of torch and Lightning that this needs are
used in this file alone; the tests compare each result with the original's.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import Any

from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from torch import nn

_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""Methods by which a module decides what its state dict holds, each possibly replaced in its class or on the object."""
_CHILDREN, _PARAMETERS, _BUFFERS = attrgetter("_modules"), attrgetter("_parameters"), attrgetter("_buffers")
_HOOKS = (attrgetter("_state_dict_hooks"), attrgetter("_state_dict_pre_hooks"))
_ATTRIBUTES = attrgetter("__dict__")
_DICTS = frozenset({dict, OrderedDict})
_NUMBERS = frozenset({type(None), bool, int, float})


def _is_plain_class(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _METHODS)


def _is_plain(module: nn.Module) -> bool:
    """Returns whether torch reads the module's own state from its dicts alone; its hooks are not looked at."""
    return (
        _is_plain_class(type(module))
        and vars(module).keys().isdisjoint(_METHODS)
        and _DICTS.issuperset(map(type, (module._modules, module._parameters, module._buffers)))
    )


def _are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))


@dataclass(frozen=True)
class _Visit:
    """A module with buffers or with a method of its own, at its place among the parameters of the plain modules.

    Attributes:
        num_parameters: The number of parameters of plain modules before this module's buffers or own state.
        module: The module.
        prefix: What stands before its names.
        is_plain: Whether only its buffers are read here; otherwise its `state_dict` is called, for its children, too.
    """

    num_parameters: int
    module: nn.Module
    prefix: str
    is_plain: bool


class _Dicts:
    """One of the dicts that each of several modules has. Most are empty, and then only their length is read.

    Args:
        dicts: One dict for each module.
    """

    def __init__(self, dicts: list[dict[str, Any]]) -> None:
        self.all = dicts
        self.filled = list(filter(None, dicts))
        self._lengths = list(map(len, dicts))
        self._names = list(chain.from_iterable(self.filled))

    def values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.filled)))

    def are_as_before(self) -> bool:
        """Returns whether the dicts have the same names."""
        return list(map(len, self.all)) == self._lengths and list(chain.from_iterable(self.filled)) == self._names


class _Tree:
    """The modules of a tree whose state dict needs no call, in the order in which torch visits them.

    A module that is at several places of the tree is visited at each of them.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.visits: list[_Visit] = []
        self._walk(root, "")
        self._kinds = list(map(type, self.modules))
        self._attributes = list(map(_ATTRIBUTES, self.modules))
        self._num_attributes = list(map(len, self._attributes))
        self._parameters, self._buffers, self._children, *self._hooks = (
            _Dicts(list(map(attribute, self.modules))) for attribute in (_PARAMETERS, _BUFFERS, _CHILDREN, *_HOOKS)
        )
        self._known_children = self._children.values()
        self._calls_modules = not all(visit.is_plain for visit in self.visits)
        self.is_plain = bool(self.modules) and not any(hooks.filled for hooks in self._hooks)

    def _walk(self, module: nn.Module, prefix: str) -> None:
        if not _is_plain(module):
            self.visits.append(_Visit(len(self.names), module, prefix, is_plain=False))
            return
        self.modules.append(module)
        self.names += [prefix + name for name in module._parameters]
        if module._buffers:
            self.visits.append(_Visit(len(self.names), module, prefix, is_plain=True))
        for name, child in module._modules.items():
            if child is not None:
                self._walk(child, f"{prefix}{name}.")

    def seems_current(self) -> bool:
        """Returns whether no module was added, removed or replaced, and no parameter, buffer or hook added or removed.

        It reads the dicts that the modules had at first, and counts their attributes: most of the time of a full check
        is the search for each dict in its module.
        """
        return (
            _are_same(self._children.values(), self._known_children)
            and all(dicts.are_as_before() for dicts in (self._children, self._parameters, self._buffers, *self._hooks))
            and list(map(len, self._attributes)) == self._num_attributes
            and list(map(type, self.modules)) == self._kinds
        )

    def is_current(self) -> bool:
        """Returns whether the tree is still that of the modules, and is read without a call."""
        modules = self.modules
        kinds = set(map(type, modules))
        dicts = ((_PARAMETERS, self._parameters), (_BUFFERS, self._buffers), (_CHILDREN, self._children))
        return (
            self.seems_current()
            and _are_same(list(map(_ATTRIBUTES, modules)), self._attributes)
            and all(_are_same(list(map(attribute, modules)), known.all) for attribute, known in dicts)
            and not any(any(map(hooks, modules)) for hooks in _HOOKS)
            and not any(any(map(contains, self._attributes, repeat(name))) for name in _METHODS)
            and all(map(_is_plain_class, kinds))
        )

    def read(self) -> dict[str, Any]:
        """Returns the state dict that `keep_vars=True` gives."""
        values = self._parameters.values()
        found: dict[str, Any] = {}
        if self._calls_modules:  # their methods need torch's own kind of dict, which takes three times as long to fill
            found = OrderedDict()
            found._metadata = OrderedDict()  # type: ignore[attr-defined]
        start = 0
        for visit in self.visits:
            end = visit.num_parameters
            _add(found, self.names[start:end], values[start:end])
            start = end
            if visit.is_plain:
                persistent = visit.module._buffers.keys() - visit.module._non_persistent_buffers_set
                buffers = [(name, value) for name, value in visit.module._buffers.items() if name in persistent]
                _add(found, [visit.prefix + name for name, _ in buffers], [value for _, value in buffers])
            else:
                visit.module.state_dict(destination=found, prefix=visit.prefix, keep_vars=True)
        _add(found, self.names[start:], values[start:])
        return found


def _add(found: dict[str, Any], names: list[str], values: list[Any]) -> None:
    """Adds a module's own parameters or buffers; those that are None are not in a state dict."""
    if any(map(is_, values, repeat(None))):
        found.update((name, value) for name, value in zip(names, values, strict=True) if value is not None)
    else:
        found.update(zip(names, values, strict=True))


class LiveStateDict:
    """The state dict of one module with its live tensors, read again and again: `module.state_dict(keep_vars=True)`.

    It walks the modules at the first call and after a change of the modules. If the root has a method of its own, or a
    plain module has a hook, torch reads the whole state dict. Not thread-safe.
    """

    def __init__(self) -> None:
        self._root: nn.Module | None = None
        self._tree: _Tree | None = None
        self._is_quick = True

    def read(self, module: nn.Module) -> dict[str, Any]:
        """Returns names and tensors of `module`, in torch's order. Ask `has_missed_change` afterwards."""
        tree = self._tree
        if tree is None or self._root is not module or not self._is_unchanged(tree):
            tree = _Tree(module)
            self._root, self._tree = module, tree if tree.is_plain else None
            if self._tree is None:
                return module.state_dict(keep_vars=True)
        return tree.read()

    def _is_unchanged(self, tree: _Tree) -> bool:
        return tree.seems_current() if self._is_quick else tree.is_current()

    def has_missed_change(self) -> bool:
        """Returns whether the last `read` may have missed a change; then it will be exact from now on.

        The quick check in `read` does not see a module whose own dicts were replaced by others. This method may be
        called by another thread while training continues.
        """
        tree = self._tree
        if tree is None or not self._is_quick or tree.is_current():
            return False
        self._is_quick = False
        return True


# ---- loops


@cache
def _read_fields(kind: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Returns the names of a dataclass's fields, and a function that returns their values."""
    names = tuple(field.name for field in fields(kind))
    # With one name, attrgetter returns the value itself.
    return names, attrgetter(*names) if len(names) > 1 else lambda owner: tuple(getattr(owner, name) for name in names)


def _copy_progress(progress: _BaseProgress) -> dict[str, Any] | None:
    """Returns what `dataclasses.asdict` does for counts and records of counts; None for any other value."""
    kind: Any = type(progress)
    names, read = _read_fields(kind)
    values = read(progress)
    copied = dict(zip(names, values, strict=True))
    if _NUMBERS.issuperset(map(type, values)):
        return copied
    for name, value in zip(names, values, strict=True):
        if isinstance(value, _BaseProgress):
            inner = copied[name] = _copy_progress(value)
            if inner is None:
                return None
        elif type(value) not in _NUMBERS:
            return None
    return copied


def _read_progress(progress: _BaseProgress) -> dict[str, Any]:
    copied = _copy_progress(progress) if type(progress).state_dict is _BaseProgress.state_dict else None
    return progress.state_dict() if copied is None else copied


def read_loop_state(loop: Any, found: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """Returns `loop.state_dict()` of a loop of Lightning.

    Args:
        loop: The loop.
        found: Receives the entries; a new dict by default.
        prefix: A prefix for each key.
    """
    found = {} if found is None else found
    if type(loop).state_dict is not _Loop.state_dict or "state_dict" in vars(loop):
        state: dict[str, Any] = loop.state_dict(found, prefix)
        return state
    found[f"{prefix}state_dict"] = loop.on_save_checkpoint()
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            found[prefix + name] = _read_progress(value)
        elif isinstance(value, _Loop):
            read_loop_state(value, found, f"{prefix}{name}.")
    return found
