"""Times attention of genesis-1b's shape by each kernel that there is, and finds out which repeat bit for bit.

The kernels are called as their packages document them, without the model: the speeds are what a choice between them can
gain. Rows are causal; in `documents` each row has about four documents, which attention does not cross.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from genesis.base.device import is_host, leave_memory_unfilled, synchronize

try:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]
except ImportError:
    flash_attn_varlen_func = None

_REPEATS: Final = 7
_DOCUMENTS_PER_ROW: Final = 4


class Shape(NamedTuple):
    """Rows, tokens of a row, heads of queries and of keys, and the width of a head."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    width: int


SHAPES: Final = {"tiny": Shape(1, 64, 4, 2, 16), "full": Shape(8, 2048, 16, 4, 128)}


class Inputs(NamedTuple):
    """Queries, keys and values, the gradient of the result, where documents begin, and each token's document.

    Offsets are int32 and end with the number of all tokens.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor
    offsets: Tensor
    documents: Tensor


Kernel = Callable[[Inputs], Tensor]


def build_inputs(shape: Shape, kind: str) -> Inputs:
    """Returns random inputs, the same each time."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if is_host(kind) else torch.bfloat16
    rows, tokens, heads, kv_heads, width = shape

    def draw(num_heads: int) -> Tensor:
        return torch.randn(rows, tokens, num_heads, width, generator=generator).to(kind, dtype)

    total = rows * tokens
    cuts = torch.randint(1, total, ((_DOCUMENTS_PER_ROW - 1) * rows,), generator=generator).tolist()
    starts = sorted({*range(0, total + 1, tokens), *cuts})
    lengths = torch.tensor([end - start for start, end in pairwise(starts)])
    documents = torch.arange(len(lengths)).repeat_interleave(lengths).view(rows, tokens)
    query, key, value = draw(heads).requires_grad_(), draw(kv_heads).requires_grad_(), draw(kv_heads).requires_grad_()
    return Inputs(query, key, value, draw(heads), torch.tensor(starts).to(kind, torch.int32), documents.to(kind))


def _heads_first(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.query.transpose(1, 2), inputs.key.transpose(1, 2), inputs.value.transpose(1, 2)


def attend_rows(inputs: Inputs) -> Tensor:
    """Computes causal attention of whole rows by torch's kernel of its choice."""
    out: Tensor = scaled_dot_product_attention(*_heads_first(inputs), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def attend_under_mask(inputs: Inputs) -> Tensor:
    """Computes attention of documents under a mask."""
    same = inputs.documents[:, :, None] == inputs.documents[:, None, :]
    mask = same.tril()[:, None]
    out: Tensor = scaled_dot_product_attention(*_heads_first(inputs), attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def attend_by_flash(inputs: Inputs) -> Tensor:
    """Computes attention of documents by torch's kernel for documents of any length, with repeated keys."""
    from_groups = inputs.query.shape[2] // inputs.key.shape[2]
    key, value = (part.repeat_interleave(from_groups, dim=2).flatten(0, 1) for part in (inputs.key, inputs.value))
    longest = inputs.query.shape[1]
    out: Any = varlen_attn(
        inputs.query.flatten(0, 1),
        key,
        value,
        inputs.offsets,
        inputs.offsets,
        longest,
        longest,
        window_size=(-1, 0),
    )
    found: Tensor = out.view(inputs.query.shape)
    return found


def build_flex(inputs: Inputs) -> Kernel:
    """Returns compiled FlexAttention of the documents, with the mask of blocks built."""
    documents = inputs.documents
    rows, tokens = documents.shape

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    blocks = create_block_mask(is_seen, rows, None, tokens, tokens, device=documents.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(inputs: Inputs) -> Tensor:
        out: Tensor = compiled(*_heads_first(inputs), block_mask=blocks, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def build_fa4(is_deterministic: bool) -> Kernel:
    """Returns FlashAttention-4 of the documents, whose determinism is an argument."""

    def attend(inputs: Inputs) -> Tensor:
        longest = inputs.query.shape[1]
        out = flash_attn_varlen_func(
            *(part.flatten(0, 1) for part in (inputs.query, inputs.key, inputs.value)),
            cu_seqlens_q=inputs.offsets,
            cu_seqlens_k=inputs.offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
            deterministic=is_deterministic,
        )
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found.view(inputs.query.shape)

    return attend


def list_kernels(kind: str, inputs: Inputs, is_deterministic: bool) -> dict[str, Callable[[], Kernel]]:
    """Returns how to build each kernel that the device may have, by name."""
    found: dict[str, Callable[[], Kernel]] = {
        "mask, documents": lambda: attend_under_mask,
        "torch, rows": lambda: attend_rows,
    }
    if kind == "cuda":
        found["flash, documents"] = lambda: attend_by_flash
        found["flex, documents"] = lambda: build_flex(inputs)
        if flash_attn_varlen_func is not None:
            found["fa4, documents"] = lambda: build_fa4(is_deterministic)
    return found


@contextmanager
def _deterministic(is_on: bool) -> Iterator[None]:
    leave_memory_unfilled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def measure_attention(kind: str, size: str) -> dict[str, Any]:
    """Measures each kernel, with and without determinism.

    Returns:
        For each kernel milliseconds of forward, and of forward and backward, whether two runs are equal bit for bit,
        and the largest difference from the mask, in relation to the largest value; or the reason why it did not run.
        `failures` names kernels under determinism that differ between two runs.
    """
    inputs = build_inputs(SHAPES[size], kind)
    results: dict[str, Any] = {}
    failures: list[str] = []
    wanted: list[Tensor] = []
    for is_on in (True, False):
        for name, build in list_kernels(kind, inputs, is_on).items():
            title = f"{name}, deterministic" if is_on else name
            try:
                with _deterministic(is_on):
                    results[title] = found = _measure(kind, build(), inputs, wanted if "documents" in name else [])
            except RuntimeError as error:  # a kernel that has no form for this device or mode, or is refused
                results[title] = {"reason": str(error)[:300]}
                continue
            if is_on and not found["is_repeatable"]:
                failures.append(title)
    findings = [
        f"{name}: {found['forward_backward_ms']:.2f} ms{'' if found['is_repeatable'] else ', not repeatable'}"
        for name, found in results.items()
        if "reason" not in found
    ]
    return {"shape": SHAPES[size]._asdict(), "kernels": results, "failures": failures, "findings": findings}


def _measure(kind: str, kernel: Kernel, inputs: Inputs, wanted: list[Tensor]) -> dict[str, Any]:
    def forward() -> list[Tensor]:
        return [kernel(inputs)]

    def both() -> list[Tensor]:
        out = kernel(inputs)
        return [out, *torch.autograd.grad(out, [inputs.query, inputs.key, inputs.value], inputs.upstream)]

    first, second = ([part.detach() for part in both()] for _ in range(2))
    if not wanted:
        wanted += first
    pairs = zip(first, wanted, strict=True)
    distances = [float((one - other).float().abs().max() / other.float().abs().max()) for one, other in pairs]
    return {
        "is_repeatable": all(torch.equal(one, other) for one, other in zip(first, second, strict=True)),
        "largest_difference": max(distances),
        "forward_ms": 1000 * time_work(kind, forward),
        "forward_backward_ms": 1000 * time_work(kind, both),
    }


def time_work(kind: str, work: Callable[[], object]) -> float:
    """Returns the seconds of `work`, the median of some runs after one that is not counted."""
    seconds = []
    for _ in range(_REPEATS + 1):
        synchronize(kind)
        begin = time.perf_counter()
        work()
        synchronize(kind)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
