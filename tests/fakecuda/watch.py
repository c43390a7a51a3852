"""What an accelerator would be asked to do: kernels, casts, and the lines at which the host would wait for it."""

import contextlib
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import lightning
import torch
import torchmetrics
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import genesis
import genesis_callbacks
from tests.fakecuda.memory import LiveBytes
from tests.fakecuda.repeatable import name_operator

aten = torch.ops.aten

_ROOTS: Final = {
    module.__name__: str(Path(module.__file__ or "").parent) + os.sep
    for module in (genesis, genesis_callbacks, lightning, torchmetrics)
}
"""Packages whose lines are named, and where they lie."""
_VIEWS: Final = frozenset(
    (
        *("_unsafe_view", "alias", "as_strided", "chunk", "detach", "expand", "narrow", "permute", "prim::device"),
        *("reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
        *("unflatten", "unsqueeze", "view"),
    )
)
_PICKS: Final = frozenset(("embedding", "gather", "index", "index_select"))
_SCATTERS: Final = frozenset(("scatter_", "scatter_add_"))
_FILLS: Final = ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
_OVERWRITES: Final = frozenset(("copy_", "fill_", "zero_"))
NUM_FOUND: Final = 5
"""How many elements are found wherever the number of results depends on values."""


class Watch(TorchDispatchMode):
    """Records what happens on the fake device, and answers where a result would depend on values.

    Args:
        numbers: What a number that is read from the device is, by the function of ours that reads it.
        fake: The mode of what lives on the device, where the host's tensors are real. None where that mode is on
            anyway, and the host's tensors are fake, too.
    """

    supports_higher_order_operators = True
    """FlexAttention is one: its fake form has the shapes of its results, and computes nothing."""

    def __init__(self, numbers: dict[str, float] | None = None, fake: "FakeMode | None" = None) -> None:
        super().__init__()
        self.numbers = numbers or {}
        self.fake = fake
        if fake is not None:
            # `torch.tensor(numbers, device=...)` makes a tensor of the host first, which is then copied by an operator.
            torch._C._set_only_lift_cpu_tensors(True)
        self.kernels: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.casts: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.live = LiveBytes("cuda")
        self.lines: dict[str, str] = {}
        self.operators: set[str] = set()
        """Names of all operators that ran there so far (`tests.fakecuda.repeatable`)."""
        self._is_within_kernel = False

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that counts as one kernel, with its arguments and results, as torch.compile makes it."""

        def run(*args: Any) -> Any:
            self._is_within_kernel = True
            try:
                out = function(*args)
            finally:
                self._is_within_kernel = False
            self.live.note(out)
            self.kernels[function.__name__] += 1
            self.num_bytes[function.__name__] += _bytes_of((args, out))
            return out

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            out = func(*args, **kwargs)
            self.live.note(out)
            self.kernels[func.name()] += 1
            self.operators.add(func.name())
            return out
        if self._is_within_kernel:
            with self.fake or contextlib.nullcontext():
                out = func(*args, **kwargs)
                self._note_operator(func, args, out)
                return out
        if self.fake is None:
            return self._dispatch(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not _is_on_device(kwargs) and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        with self.fake:
            out = self._dispatch(func, args, kwargs)
        if isinstance(out, FakeTensor) and out.device.type == "cpu":  # the host sees values
            return torch.arange(out.numel()).remainder(7).reshape(out.shape).to(out.dtype)
        return out

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        first = next((argument for argument in args if isinstance(argument, Tensor)), None)
        is_device = first is not None and first.device.type == "cuda"
        answer = _ANSWERS.get(func)
        if answer is not None and (is_device or isinstance(first, FakeTensor)):
            if (
                not is_device
                and getattr(first, "constant", None) is not None
                and func is aten._local_scalar_dense.default
            ):
                return first.constant.item()
            if is_device:
                self._note_sync(_NAMES.get(func, func._schema.name.removeprefix("aten::")))
            return answer(self, *args, **kwargs)
        if func is aten.index.Tensor and is_device:
            args = (args[0], self._find_masked(args[1]))
        if func is aten.index_put_.default and is_device:
            args = (args[0], self._find_masked(args[1]), *args[2:])
        if func is aten._pin_memory.default:
            return args[0]
        if func is aten.is_pinned.default:
            return True
        if func is aten.zeros.default and kwargs.get("dtype") == torch.int32 and not _is_on_device(kwargs):
            with _disable_current_modes():  # DDP's map of used parameters, whose address it looks at
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self.live.note(out)
        self._note_kernel(func, args, out, kwargs)
        self._note_operator(func, args, out)
        return out

    def _note_operator(self, func: Any, arguments: tuple[Any, ...], out: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _VIEWS or name.startswith(("empty", "new_empty")):
            return
        tensors = (leaf for leaf in tree_leaves((out, arguments)) if isinstance(leaf, Tensor))  # lists for `_foreach`
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self.operators.add(name_operator(func, arguments))

    def _note_kernel(self, func: Any, args: Any, out: Any, kwargs: dict[str, Any]) -> None:
        name = func._schema.name.removeprefix("aten::")
        first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
        made = out if isinstance(out, Tensor) else first
        if made is None:
            return
        if func is aten._to_copy.default and first is not None:
            source, target = first.device.type, made.device.type
            if source != target:
                if not kwargs.get("non_blocking"):
                    self._note_sync(f"copy {source} to {target}")
                return
        if func is aten.copy_.default and first is not None and isinstance(kwargs.get("src"), Tensor):
            made = first
        if made.device.type != "cuda" or name in _VIEWS or name.startswith(("empty", "new_empty")):
            return
        self.kernels[name] += 1
        self.num_bytes[name] += count_moved_bytes(func, args, kwargs, out)
        if func is aten._to_copy.default and first is not None and first.dtype != made.dtype:
            weight = " of a weight" if isinstance(first, torch.nn.Parameter) else ""
            self.casts[f"{_short(first.dtype)} to {_short(made.dtype)}{weight}"] += 1

    def _note_sync(self, what: str) -> None:
        frame = _find_frame()
        if frame is None:
            where, line = "backward", "in the backward, outside of our files"
        else:
            path = _name(frame.f_code.co_filename)
            where = f"{path}:{frame.f_code.co_qualname}"
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            line = f"{path}:{frame.f_lineno}: {source}"
        key = f"{what} {where}"
        self.syncs[key] += 1
        self.lines[key] = line

    def _find_masked(self, indices: Any) -> list[Any]:
        found = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                self._note_sync("index by mask")
                index = index.new_zeros((NUM_FOUND,), dtype=torch.int64)
            found.append(index)
        return found

    def number(self, tensor: Tensor) -> Any:
        """Returns the number that a tensor on the device holds."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            name = frame.f_code.co_name
            if name in self.numbers:
                return (tensor.dtype.is_floating_point and float(self.numbers[name])) or int(self.numbers[name])
            if name == "_maybe_opt_step":  # of the gradient scaler: nothing has overflowed
                return 0.0
            frame = frame.f_back
        if tensor.dtype.is_floating_point:
            return 1.0
        return tensor.dtype != torch.bool and 0


def count_moved_bytes(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """Returns the bytes that a kernel reads and writes at least: each tensor once, whatever caches hold.

    An operator that picks rows or elements is taken to read only those.
    """
    name = func._schema.name.removeprefix("aten::")
    made = _bytes_of(out)
    if name in _FILLS:
        return made
    if name in _PICKS:
        return 2 * made + _bytes_of(args[1:])
    if name in _SCATTERS:
        return 3 * _bytes_of(args[1:])
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
    moved = 0
    for argument, value in given:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if name == "_fused_adamw_" and argument.name == "grads":
            is_written = kwargs.get("grad_scale") is not None
        is_read = not (is_written and name in _OVERWRITES)
        moved += _bytes_of(value) * (is_read + is_written)
    is_in_place = any(one.alias_info is not None for one in func._schema.returns)
    return moved + (0 if is_in_place else made)


def _bytes_of(value: Any) -> int:
    tensors = {id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
    on_device = (tensor for tensor in tensors.values() if tensor.device.type == "cuda")
    # An expanded tensor has fewer bytes than elements.
    return sum(min(one.numel() * one.element_size(), one.untyped_storage().nbytes()) for one in on_device)


def _nonzero(watch: Watch, tensor: Tensor) -> Tensor:
    return tensor.new_zeros((NUM_FOUND, tensor.dim()), dtype=torch.int64)


def _unique_consecutive(watch: Watch, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    found = tensor.new_zeros((NUM_FOUND,))
    return found, tensor.new_zeros(tensor.shape, dtype=torch.int64), found.new_zeros((NUM_FOUND,), dtype=torch.int64)


def _is_equal(watch: Watch, *arguments: Any) -> bool:
    return True


_ANSWERS: Final[dict[Any, Callable[..., Any]]] = {
    aten._local_scalar_dense.default: Watch.number,
    aten.nonzero.default: _nonzero,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.equal.default: _is_equal,
}

_NAMES: Final = {aten._local_scalar_dense.default: "item"}


def _is_on_device(options: dict[str, Any]) -> bool:
    return torch.device(options.get("device") or "cpu").type == "cuda"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(path: str) -> str | None:
    """Returns the path of a file from its package on, if that package is one of those whose lines are named."""
    for package, root in _ROOTS.items():
        if path.startswith(root):
            return f"{package}/{path[len(root) :]}"
    return None


def _find_frame() -> FrameType | None:
    """Returns the innermost frame of a file of ours, Lightning's or torchmetrics', unless that only watches."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _name(frame.f_code.co_filename) is not None:
            return frame
        frame = frame.f_back
    return None


class FakeMode(FakeTensorMode):
    """A fake mode that takes real tensors, too, and makes numbers on the host before they go to the device."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @property
    def avoid_device_init(self) -> bool:
        """Whether a tensor of numbers is made on the host first; torch asks whether there is a real CUDA."""
        return True


for _operator in (flex_attention, flex_attention_backward):  # torch looks the rule up by the class itself
    _operator.python_key_table[FakeMode] = _operator.python_key_table[FakeTensorMode]
