"""Attention by FlashAttention-4, on Hopper and Blackwell, where `pip install genesis-lm[cuda]` has installed it.

T  tokens of a micro-batch; other letters as in `metadata`. The package's own function is an autograd function that
torch.compile cannot look into; two operators, for the forward and the backward, pass through compiled and recomputed
blocks.
"""

import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import Tensor

from genesis.model.attend.kernel import HALF_DTYPES, AttentionKernel, Place
from genesis.model.attend.metadata import AttentionMetadata, Rows

PACKAGE: Final = "flash-attn-4"
REMEDY: Final = "pip install 'genesis-lm[cuda]'"
_MODULE: Final = "flash_attn.cute.interface"
_OLDEST: Final = (9, 0)
_HOPPER, _BLACKWELL = (9,), (10, 11)
"""Major compute capabilities. The package's kernels for others have no backward, or none that is repeatable."""


@cache
def find_version() -> str | None:
    """Returns the version of the installed package; None if it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


class FA4Kernel(AttentionKernel):
    """FlashAttention-4. Under torch's deterministic algorithms, its backward adds in a fixed order."""

    name = "fa4"

    def describe(self) -> str:
        """Returns the name with the version of the package."""
        return f"{self.name} ({PACKAGE} {find_version()})"

    def _find_obstacle(self, place: Place) -> str | None:
        older = place.find_older(_OLDEST)
        if older is not None:
            return older
        major = (place.capability or _OLDEST)[0]
        if major not in _HOPPER + _BLACKWELL:
            return f"its kernel for a GPU of compute capability {major} is not repeatable"
        if place.dtype not in HALF_DTYPES:
            return "it needs bfloat16 or float16"
        is_wide = place.head_dim > 256 or (major in _BLACKWELL and 128 < place.head_dim < 256)
        if place.head_dim % 8 or is_wide:
            return f"it has no kernel for heads of width {place.head_dim} on this GPU"
        if place.has_sinks:
            return "it has no attention sinks"
        return None if find_version() is not None else f"{PACKAGE} is not installed ({REMEDY})"

    def prepare(self, metadata: AttentionMetadata, rows: Rows) -> AttentionMetadata:
        """Gives the offsets of documents to the kernel; a row of one document is a document."""
        return metadata._replace(kernel=self.name, offsets=rows.find_offsets(), window=rows.window)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends document by document."""
        assert sinks is None, "they are an obstacle"
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast casts no inputs of this kernel
        heads = (part.flatten(0, 1) for part in (query, key, value))
        out: Tensor
        out, _ = _run_forward(*heads, metadata.offsets, query.shape[1], metadata.window)
        return out.view(query.shape)


def _options(query: Tensor, offsets: Tensor, max_tokens: int, window: int | None) -> dict[str, Any]:
    """Returns the arguments that forward and backward have in common."""
    return {
        "softmax_scale": query.shape[-1] ** -0.5,
        "causal": True,
        "window_size_left": None if window is None else window - 1,  # itself is not counted
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": max_tokens,
        "max_seqlen_k": max_tokens,
    }


def _load_kernels() -> Any:
    """Returns the kernels, and hides what their compiler warns of in its own code, now and when it compiles one."""
    if _MODULE not in sys.modules:
        warnings.filterwarnings("ignore", module=r"cutlass\.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # also of modules that have no name yet while they are imported
            return import_module(_MODULE)
    return sys.modules[_MODULE]


@torch.library.custom_op("genesis::fa4", mutates_args=())
def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, max_tokens: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the result [T, H, E], and the logarithms of the sums of the softmax [H, T]."""
    kernels = _load_kernels()
    options = _options(query, offsets, max_tokens, window)
    out, sums, *_ = kernels._flash_attn_fwd(query, key, value, return_lse=True, **options)
    return out, sums


@_run_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, max_tokens: int, window: int | None) -> Any:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("genesis::fa4_backward", mutates_args=())
def _run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    offsets: Tensor,
    max_tokens: int,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    kernels = _load_kernels()
    is_repeatable = torch.are_deterministic_algorithms_enabled()
    options = _options(query, offsets, max_tokens, window)
    found = kernels._flash_attn_bwd(query, key, value, out, grad, sums, deterministic=is_repeatable, **options)
    return found[0], found[1], found[2]


@_run_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    offsets: Tensor,
    max_tokens: int,
    window: int | None,
) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_tokens, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, offsets, out, sums = ctx.saved_tensors
    found = _run_backward(grad.contiguous(), query, key, value, out, sums, offsets, ctx.max_tokens, ctx.window)
    return (*found, None, None, None)


_run_forward.register_autograd(_differentiate, setup_context=_keep)
