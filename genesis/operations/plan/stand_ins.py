"""Stand-ins for kernels of accelerators and for other ranks, neither of which a plan has, that take as much memory.

A CPU build of torch lacks the kernels of attention, and its own norms and dropout keep something else.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from genesis.base.device import CPU, kind_of
from genesis.model.adapter import AdaptedLinear, use_rows
from genesis.model.attend.kernel import AttentionKernel, Place
from genesis.model.attend.mask import SINK_WIDTH
from genesis.model.attend.metadata import AttentionMetadata, Rows
from genesis.model.attend.table import FLASH, FLEX, KERNELS, MASK
from genesis.model.exchange import HeadExchange


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch's
    return out


class _AttentionFunction(torch.autograd.Function):
    """Keeps what every fused kernel of attention keeps: inputs, result, and a number for each token and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, workspace: int) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        ctx.workspace = workspace
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        _workspace = grads[0].new_empty(ctx.workspace, dtype=torch.uint8)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


_WORKSPACES: Final[dict[str, Callable[[Tensor, Tensor], int]]] = {
    # It first multiplies result and gradient, and sums the products of each token and head.
    "flex": lambda query, key: query.nbytes + query.shape[:3].numel() * 4,
    # The gradient of the queries is added up in float32.
    "flash": lambda query, key: query.numel() * 4,
    # So are those of keys and values that several heads share.
    "fa4": lambda query, key: (
        (query.numel() + (2 * key.numel() if key.shape[2] < query.shape[2] else 0)) * 4 + query.shape[:3].numel() * 8
    ),
}
"""Bytes that the backward of a kernel of attention takes on an accelerator, beside the gradients."""


class _AttentionStandIn(AttentionKernel):
    """A kernel of attention that prepares as the real one does, and holds the same memory."""

    def __init__(self, kernel: AttentionKernel) -> None:
        super().__init__()
        self._kernel, self.name, self.needs_offsets = kernel, kernel.name, kernel.needs_offsets

    def _find_obstacle(self, place: Place) -> str | None:
        return None

    def prepare(self, metadata: AttentionMetadata, rows: Rows) -> AttentionMetadata:
        return self._kernel.prepare(metadata, rows)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)
        if sinks is None:
            return self._attend(query, key, value)
        if self.name == FLEX.name:
            share = sinks.float().expand(query.shape[:3]).sigmoid().unsqueeze(-1)
            return (self._attend(query, key, value) * share).to(query.dtype)
        wide = (functional.pad(part, (0, SINK_WIDTH)) for part in (query, key, value))
        return self._attend(*wide)[..., : query.shape[-1]]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if kind_of(query.device) != CPU:
            workspace = _WORKSPACES.get(self.name)
            return _apply(_AttentionFunction, query, key, value, workspace(query, key) if workspace else 0)
        # One call for each document: the results are joined in a tensor of their own, and so are the gradients.
        parts = _apply(_AttentionFunction, query, key, value, query.nbytes + key.nbytes + value.nbytes)
        return parts.clone()


class _NormFunction(torch.autograd.Function):
    """RMSNorm as accelerators have it: it keeps its input, and the scale of each vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _DropoutFunction(torch.autograd.Function):
    """Dropout as accelerators have it: it keeps a byte for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def _norm(input: Tensor, normalized_shape: Any, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = _apply(_NormFunction, input, weight)
    return out


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    out: Tensor = _apply(_DropoutFunction, input) if training and p > 0.0 else input
    return out


_FUNCTIONS: Final[dict[Any, Callable[..., Tensor]]] = {functional.rms_norm: _norm, functional.dropout: _drop}


class _StandIns(TorchFunctionMode):
    """Replaces functions whose kernels on accelerators keep something else than those of a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


class EvenExchange:
    """Sends rows to other ranks, of which as many arrive: loads are taken as even."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def send(self, rows: Tensor, counts: Tensor) -> "_Flight":
        """Begins to send rows."""
        received = _apply(_Travel, rows.contiguous())
        return _Flight(received, counts.view(self._num_ranks, -1))


class EvenContext(HeadExchange):
    """Exchanges tokens for heads with ranks that send as much as they get."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks, 0)

    def swap(self, packed: Tensor) -> Tensor:
        """Returns a tensor of the same size."""
        return _apply(_Travel, packed.contiguous())

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Returns a tensor of the size of the sum."""
        return torch.empty_like(counts)


class EvenRows:
    """Gathers whole rows from ranks that share them, and scatters sums: the `RowShares` of the first rank."""

    rank = 0

    def __init__(self, num_ranks: int) -> None:
        self.size = num_ranks

    def cut(self, rows: Tensor) -> Tensor:
        """Returns the first tokens."""
        return rows.chunk(self.size, dim=1)[0]

    def gather(self, x: Tensor) -> Tensor:
        """Returns a tensor of the size of whole rows."""
        return _apply(_Resize, x, self.size, 1)

    def scatter(self, x: Tensor) -> Tensor:
        """Returns a tensor of the size of a share."""
        return _apply(_Resize, x, 1, self.size)

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Returns a tensor of the size of the sum."""
        return torch.empty_like(counts)


class EvenMatrices:
    """Leaves the first rank's part of matrices, without values: its `MatrixShares`."""

    rank = 0

    def __init__(self, num_ranks: int) -> None:
        self.size = num_ranks
        self.dims: dict[tuple[nn.Module, str], int] = {}
        """The dimension along which each parameter was cut, by its module and its name there."""

    def cut(self, module: nn.Module, name: str, dim: int = 0) -> None:
        """Replaces a parameter by a smaller one."""
        parameter = module.get_parameter(name)
        shape = list(parameter.shape)
        shape[dim] //= self.size
        module.register_parameter(name, nn.Parameter(parameter.new_empty(shape), parameter.requires_grad))
        self.dims[module, name] = dim

    def cut_linear(self, layer: nn.Linear, dim: int) -> None:
        """Leaves even rows or columns of a linear layer and its adapter."""
        self.cut(layer, "weight", dim)
        if layer.bias is not None:
            self.cut(layer, "bias")
        if isinstance(layer, AdaptedLinear):
            self.cut(layer, "lora_B" if dim == 0 else "lora_A", dim)

    def use_rows(self, layer: nn.Linear, rows: slice | Tensor) -> None:
        """Makes a linear layer multiply some of its rows."""
        use_rows(layer, rows)

    def sum(self, x: Tensor) -> Tensor:
        """Returns a tensor of the size of the sum."""
        return _apply(_Travel, x)


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int, parts: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty((x.shape[0], x.shape[1] * times // parts, *x.shape[2:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_empty(ctx.shape), None, None


class _Flight:
    def __init__(self, rows: Tensor, counts: Tensor) -> None:
        self._rows, self._counts = rows, counts

    def finish(self, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        order = torch.empty(len(self._rows), dtype=torch.int64).argsort()
        inverse = torch.empty_like(order)
        made = run(_apply(_Permute, self._rows, order), self._counts.sum(0))
        made = _apply(_Permute, made, inverse)
        return _apply(_Travel, made)


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0].contiguous())


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None


@contextlib.contextmanager
def stand_in(kind: str) -> Iterator[None]:
    """Puts everything that stands in for something of this kind of device into its place."""
    real = dict(KERNELS)
    # On a CPU documents are attended one by one, by lengths that a plan does not know.
    for name in (FLASH.name,) if kind == CPU else real.keys() - {MASK.name}:
        KERNELS[name] = _AttentionStandIn(real[name])
    try:
        with contextlib.nullcontext() if kind == CPU else _StandIns():
            yield
    finally:
        KERNELS.update(real)
