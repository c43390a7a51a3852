"""When storages begin and end to exist, while code runs on tensors without memory."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from genesis.model.nf4 import allocate_weight

ACTIVATIONS: Final = "activations"
LOSS: Final = "logits and loss"
CASTS: Final = "weights cast for products"
GRADIENTS: Final = "gradients"

Bytes = Counter[str]
"""Bytes by term; they may be negative."""
Event = tuple[int, int]
"""The number of a storage, and its bytes, negative where it ends."""


class Course(NamedTuple):
    """How memory changes: at its highest point, and at the end, each relative to the beginning."""

    peak: Bytes
    end: Bytes


def _find_all(x: Tensor) -> Tensor:
    return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)


def _multiply_groups(left: Tensor, right: Tensor, offs: Tensor, *_: Any, **options: Any) -> Tensor:
    groups = [] if right.ndim == 3 else [len(offs)]
    return left.new_empty([*groups, left.shape[0], right.shape[-1]])


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    out: Tensor = torch.ops.aten.select.int(x, dim, 0)
    return out


def _select_backward(gradient: Tensor, sizes: list[int], dim: int, index: int) -> Tensor:
    out: Tensor = torch.ops.aten.select_backward.default(gradient, sizes, dim, 0)
    return out


_RESULTS: Final[dict[Any, Callable[..., Tensor]]] = {
    # Torch remembers the sizes of a call: one index in the place of all makes loops over chunks cheap.
    torch.ops.aten.select.int: _select,
    torch.ops.aten.select_backward.default: _select_backward,
    torch.ops.aten.nonzero.default: _find_all,
    torch.ops.aten._grouped_mm.default: _multiply_groups,  # torch knows only sizes in bfloat16
    torch.ops.genesis.nf4_weight.default: allocate_weight,  # one kernel on a GPU, whose tables have values
}
"""Operators whose sizes torch does not know without values, where every value counts, or knows only slowly."""


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Records when storages begin and end to exist.

    Args:
        rounded_to: The allocator's unit.

    Attributes:
        events: What began and ended so far.
        terms: The term of each storage that is no activation.
        casts: The parameter of which each narrower copy is one.
    """

    def __init__(self, rounded_to: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.events: list[Event] = []
        self.terms: dict[int, str] = {}
        self.casts: dict[int, nn.Parameter] = {}
        self._rounded_to = rounded_to
        self._known: dict[int, tuple[int, int, Any]] = {}
        self._num_storages = 0
        self._is_within_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPDEFS.get(func.name()) if func.namespace == "genesis" and func not in _RESULTS else None
        if own is not None:  # torch would show only the results of an operator of ours
            with self:
                return own._init_fn(*args, **(kwargs or {}))
        out = _RESULTS.get(func, func)(*args, **(kwargs or {}))
        if not self._is_within_kernel:
            self.note(out, args[0] if func is torch.ops.aten._to_copy.default else None)
        return out

    def note(self, out: Any, cast: Any = None) -> None:
        """Records the storages of an operator's results that are new."""
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            self._num_storages += 1
            number, size = self._num_storages, self.size(leaf)
            self._known[key] = number, size, weakref.ref(storage, partial(self._end, key))
            self.events.append((number, size))
            if isinstance(cast, nn.Parameter):
                self.terms[number], self.casts[number] = CASTS, cast

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Does not record the storages of tensors that exist already."""
        for one in tensors:
            self._known[one.untyped_storage()._cdata] = 0, 0, one

    def find(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage; 0 if it is not recorded."""
        return self._known.get(tensor.untyped_storage()._cdata, (0,))[0]

    def size(self, tensor: Tensor) -> int:
        """Returns the bytes of a tensor's storage, as the allocator gives them."""
        return -(-tensor.untyped_storage().nbytes() // self._rounded_to) * self._rounded_to

    def run_kernel(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function as one kernel, of which only the results take memory."""
        self._is_within_kernel = True
        try:
            out = function(*args)
        finally:
            self._is_within_kernel = False
        self.note(out)
        return out

    def course(self, events: Sequence[Event]) -> Course:
        """Returns the course of events."""
        total = most = at = 0
        for index, (_, size) in enumerate(events, 1):
            total += size
            if total > most:
                most, at = total, index

        def add(some: Sequence[Event]) -> Bytes:
            found: Bytes = Counter()
            for number, size in some:
                found[self.terms.get(number, ACTIVATIONS)] += size
            return found

        return Course(add(events[:at]), add(events))

    def _end(self, key: int, _: Any) -> None:
        number, size, _reference = self._known.pop(key)
        self.events.append((number, -size))
