"""Next-token cross-entropy, summed over the valid tokens or for each of them, without the logits ever standing whole.

N  tokens (all leading dimensions of `hidden` together)     D  model width     V  vocabulary
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from genesis.base.device import find_measured_kernel, find_missing_compiler, is_host, kind_of
from genesis.base.errors import numbered

IGNORE_INDEX = -100
"""The label of tokens that the loss ignores (torch's convention)."""

CHUNK_LOGITS_BYTES_CPU, CHUNK_LOGITS_BYTES_GPU = 8 * 2**20, 512 * 2**20
"""Bytes of float32 logits at one time: they fit a CPU's caches; on a GPU they let it read the weight seldom."""

MIN_CHUNK_TOKENS = 256
"""Every chunk reads the weight and reads and writes its gradient: fewer tokens than this would not pay for that."""


def chunk_tokens(vocab_size: int, device: torch.device) -> int:
    """Returns how many tokens' logits exist at one time."""
    num_bytes = CHUNK_LOGITS_BYTES_CPU if kind_of(device) == "cpu" else CHUNK_LOGITS_BYTES_GPU
    return max(MIN_CHUNK_TOKENS, num_bytes // (4 * vocab_size))


def split_tokens(num_tokens: int, vocab_size: int, device: torch.device) -> int:
    """Returns how many of `num_tokens` tokens a chunk has: on a GPU all chunks have as many, up to rounding.

    A last chunk of a few tokens would read the whole weight for them. On a CPU the chunks stay as they are, because
    others would change the last bits of every loss.
    """
    most = chunk_tokens(vocab_size, device)
    if kind_of(device) == "cpu" or num_tokens <= most:
        return most
    return -(-num_tokens // -(-num_tokens // most))


def sum_cross_entropy(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    labels: Int64[Tensor, "*N"],
    softcap: float | None = None,
) -> Float32[Tensor, ""]:
    """Returns the sum of -log p(label) over the labels that are not `IGNORE_INDEX`, in nats.

    Matrix products run in the autocast dtype where autocast is on, else in that of `hidden`; the softmax, the sum and
    the weight's gradient over chunks are float32. A second backward through the same result is refused by autograd.

    Args:
        hidden: What the decoder gives to its head.
        weight: The output weight; logits are `hidden @ weight.T`.
        labels: Of the shape of `hidden` without its last dimension.
        softcap: The bound c of logits, which are then `c * tanh(logits / c)`; None without one.
    """
    dtype = find_product_dtype(hidden)
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    with torch.autocast(hidden.device.type, enabled=False):
        needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        loss_sum: Tensor = _SumCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's
            hidden, weight, labels, dtype, needs_grad, needs_grad and weight.requires_grad, softcap
        )
    return loss_sum.float()


def token_losses(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    labels: Int64[Tensor, "*N"],
    softcap: float | None = None,
) -> Float32[Tensor, " N"]:
    """Returns -log p(label) of each token, in nats, with all leading dimensions in one; 0 where the label is ignored.

    For losses that are no sum over tokens, such as those of preferences: each token has its own gradient from above.
    Logits are therefore computed again in the backward. The dtypes are those of `sum_cross_entropy`.

    Args:
        hidden: What the decoder gives to its head.
        weight: The output weight; logits are `hidden @ weight.T`.
        labels: Of the shape of `hidden` without its last dimension.
        softcap: As in `sum_cross_entropy`.
    """
    dtype = find_product_dtype(hidden)
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    # An index of a label would find a hidden state among others, and finite losses of other tokens.
    assert len(hidden) == len(labels), f"{numbered(len(hidden), 'hidden states')} and {numbered(len(labels), 'labels')}"
    with torch.autocast(hidden.device.type, enabled=False):
        if kind_of(hidden.device) != "cpu":  # to count the valid labels there, the host would have to wait
            return _apply_token_losses(hidden, weight, labels, dtype, softcap)
        # Questions have no labels: often most of the tokens.
        valid = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        losses = _apply_token_losses(hidden[valid], weight, labels[valid], dtype, softcap)
        return losses.new_zeros(len(labels)).index_copy(0, valid, losses)


def find_product_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype of the products with the output weight.

    A custom Function is not cast by autocast, so the dtype is read before it. Autocast is off inside, because it would
    cast the products in float32 to 16 bits.
    """
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype


def _without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context without autocast, for a backward.

    In a thread of autograd's the end of any context of autocast would clear the casts that a window keeps.
    """
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _apply_token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, softcap: float | None = None
) -> Tensor:
    losses: Tensor = _TokenLosses.apply(hidden, weight, labels, dtype, softcap)  # type: ignore[no-untyped-call]  # torch's
    return losses


def bound_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Returns the logits within the bound, in float32, or unchanged without one."""
    return logits if softcap is None else logits.float().div_(softcap).tanh_().mul_(softcap)


def _pass_bound(gradient: Tensor, logits: Tensor, softcap: float | None) -> Tensor:
    """Returns the gradient in the logits before the bound, by that in the bounded `logits`, in place."""
    return gradient if softcap is None else gradient.mul_(1.0 - (logits / softcap).square_())


class _SumCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward, so that no logits wait for the backward.

    The gradients of a scalar are known up to the factor that comes from above, and backward multiplies by it: nothing
    is computed twice. torch 2.13's `linear_cross_entropy` does the same and is as fast on CPU in float32, but for
    bfloat16 its sum is bfloat16 and it takes three times as long.

    References:
        Hsu et al., Liger Kernel, arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        needs_grad: bool,
        needs_weight_grad: bool,  # not where the output weight is frozen
        softcap: float | None,
    ) -> Tensor:
        num_tokens = hidden.shape[0]
        step = split_tokens(num_tokens, weight.shape[0], weight.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad else None
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        low_weight = weight.to(dtype)
        is_fused = softcap is None and _is_fused(kind_of(hidden.device))
        for start in range(0, num_tokens, step):
            chunk, target = hidden[start : start + step].to(dtype), labels[start : start + step, None]
            if is_fused:
                if grad_hidden is None:
                    loss_sum += fuse(lose_rows)(chunk @ low_weight.t(), target).sum()
                    continue
                losses, grad_logits = fuse(lose_rows_with_gradient)(chunk @ low_weight.t(), target, None)
                loss_sum += losses.sum()
                grad_hidden[start : start + step] = grad_logits @ low_weight
                if grad_weight is not None:
                    grad_weight = add_product(
                        grad_weight, grad_logits.t(), chunk.masked_fill(target == IGNORE_INDEX, 0)
                    )
                del grad_logits  # before the logits of the next chunk exist
                continue
            is_ignored = target == IGNORE_INDEX
            target = target.masked_fill(is_ignored, 0)
            logits = bound_logits(chunk @ low_weight.t(), softcap)
            probs, log_normaliser = normalise(logits)
            loss_sum += (log_normaliser - logits.gather(1, target)).masked_fill_(is_ignored, 0).sum()
            if grad_hidden is None:
                del logits  # before those of the next chunk exist
                continue
            # d(-log p)/d(logits) = softmax - onehot; ignored rows are cleared after and before the products, where
            # they are narrow.
            probs.scatter_add_(1, target, probs.new_full(target.shape, -1.0))
            _pass_bound(probs, logits, softcap)
            del logits  # as large as `probs`, and not read again
            grad_logits = probs.to(dtype)
            grad_hidden[start : start + step] = (grad_logits @ low_weight).masked_fill_(is_ignored, 0)
            if grad_weight is not None:
                grad_weight = add_product(grad_weight, grad_logits.t(), chunk.masked_fill(is_ignored, 0))
            del probs, grad_logits  # before the logits of the next chunk exist
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # In place, which saves two copies; autograd refuses a second backward, since the saved tensors have changed.
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = grad_outputs
        scaled = (grad_hidden.mul_(scale), None if grad_weight is None else grad_weight.mul_(scale))
        return *scaled, None, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    """Computes the losses chunk by chunk, and the logits of each chunk a second time in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, softcap: float | None
    ) -> Tensor:
        # The weight as it came: its cast would be a copy of a parameter that sharding frees until the backward.
        ctx.save_for_backward(hidden, weight, labels)
        ctx.dtype, ctx.softcap = dtype, softcap
        losses = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        low_weight = weight.to(dtype)
        is_fused = softcap is None and _is_fused(kind_of(hidden.device))
        for run in split_chunks(len(labels), weight):
            target = labels[run, None]
            logits = bound_logits(hidden[run].to(dtype) @ low_weight.t(), softcap)
            if is_fused:
                losses[run] = fuse(lose_rows)(logits, target).squeeze(1)
                continue
            is_ignored = target == IGNORE_INDEX
            log_normaliser = normalise(logits)[1]
            own = log_normaliser - logits.gather(1, target.masked_fill(is_ignored, 0))
            losses[run] = own.masked_fill_(is_ignored, 0).squeeze(1)
            del logits  # before those of the next chunk exist
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        needs_hidden_grad, needs_weight_grad, *_ = ctx.needs_input_grad
        (factors,) = grad_outputs
        grad_hidden = torch.empty_like(hidden) if needs_hidden_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad else None
        low_weight = weight.to(ctx.dtype)
        is_fused = ctx.softcap is None and _is_fused(kind_of(hidden.device))
        with _without_autocast(hidden.device.type):
            for run in split_chunks(len(labels), weight):
                target = labels[run, None]
                chunk = hidden[run].to(ctx.dtype)
                if is_fused:
                    logits = chunk @ low_weight.t()
                    _, grad_logits = fuse(lose_rows_with_gradient)(logits, target, factors[run, None])
                    del logits
                    if grad_hidden is not None:
                        grad_hidden[run] = grad_logits @ low_weight
                    if grad_weight is not None:
                        valid = chunk.masked_fill(target == IGNORE_INDEX, 0)
                        grad_weight = add_product(grad_weight, grad_logits.t(), valid)
                    del grad_logits
                    continue
                is_ignored = target == IGNORE_INDEX
                target = target.masked_fill(is_ignored, 0)
                logits = bound_logits(chunk @ low_weight.t(), ctx.softcap)
                probs, _ = normalise(logits)
                # d(-log p)/d(logits) = softmax - onehot. The factors come before the cast: in float16 their product
                # with the scale of a loss may be all that keeps a gradient from being 0.
                probs.scatter_add_(1, target, probs.new_full(target.shape, -1.0))
                _pass_bound(probs, logits, ctx.softcap)
                del logits
                grad_logits = (probs * factors[run, None].masked_fill(is_ignored, 0)).to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[run] = (grad_logits @ low_weight).masked_fill_(is_ignored, 0)
                if grad_weight is not None:
                    grad_weight = add_product(grad_weight, grad_logits.t(), chunk.masked_fill(is_ignored, 0))
                del probs, grad_logits  # before the logits of the next chunk exist
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


# ---- a chunk in one compiled function, on accelerators

Rows = Callable[..., Any]


_by_operators: set[str] = set()


def distrust_fused(device: torch.device) -> None:
    """Makes the loss run operator by operator on this type of device from now on, after its proof failed."""
    _by_operators.add(device.type)


def _is_fused(kind: str) -> bool:
    """Returns whether the logits of a chunk pass through one compiled function: on accelerators with a compiler.

    On a CPU the chunk lies in the caches, and other operators would change the last bits of every loss.
    """
    if is_host(kind) or kind in _by_operators:
        return False
    return find_measured_kernel() is not None or not _lacks_compiler(kind)


@functools.cache
def _lacks_compiler(kind: str) -> bool:
    missing = find_missing_compiler(kind)
    if missing is not None:
        warnings.warn(
            f"{missing}; the loss runs operator by operator on {kind}, which is slower, takes more memory and differs "
            "in the last bits: install a C++ compiler and Triton",
            stacklevel=2,
        )
    return missing is not None


@functools.cache
def _compile(function: Rows) -> Rows:
    return torch.compile(function)


def fuse(function: Rows) -> Rows:
    """Returns `function`, a pure function of logits and of columns with as many rows, compiled for any number of rows.

    A validation, or the last chunk, has other numbers of rows than a window; the vocabulary stays part of the code. The
    compiler gets the same number as a hint in every process: it decides by that how a row is summed, and a resumed run
    may meet another number first.
    """

    def run(logits: Tensor, *columns: Tensor | None) -> Any:
        run_kernel = find_measured_kernel()
        if run_kernel is not None:
            return run_kernel(function, logits, *columns)
        torch._dynamo.mark_static(logits, 1)
        num_rows = chunk_tokens(logits.shape[1], logits.device)
        for tensor in (logits, *columns):
            if tensor is not None and tensor.shape[0] > 1:  # torch always has a form of its own for one row
                torch._dynamo.mark_dynamic(tensor, 0, hint_override=num_rows)
        return _compile(function)(logits, *columns)

    return run


def lose_rows(logits: Float[Tensor, "N V"], labels: Int64[Tensor, "N 1"]) -> Float32[Tensor, "N 1"]:
    """Returns -log p(label) of each row; 0 where the label is ignored."""
    losses, _ = _lose(logits, labels)
    return losses


def lose_rows_with_gradient(
    logits: Float[Tensor, "N V"], labels: Int64[Tensor, "N 1"], factors: Float32[Tensor, "N 1"] | None
) -> tuple[Float32[Tensor, "N 1"], Float[Tensor, "N V"]]:
    """Returns `lose_rows`, and the gradient of its sum in the logits, in their dtype.

    Args:
        logits: The logits.
        labels: A label for each row.
        factors: The factor of each row in the sum; None for 1.
    """
    losses, probs = _lose(logits, labels)
    # d(-log p)/d(logits) = softmax - onehot. A comparison, and no scattered addition: a GPU adds those in any order.
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels
    gradient = torch.where(is_label, probs - 1.0, probs)
    if factors is not None:
        gradient = gradient * factors
    return losses, gradient.masked_fill(labels == IGNORE_INDEX, 0.0).to(logits.dtype)


def _lose(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    is_ignored = labels == IGNORE_INDEX
    wide = logits.float()
    largest = wide.amax(1, keepdim=True)
    exponentials = (wide - largest).exp()
    total = exponentials.sum(1, keepdim=True)
    own = wide.gather(1, labels.masked_fill(is_ignored, 0))
    return (total.log() + (largest - own)).masked_fill(is_ignored, 0.0), exponentials / total


# ---- chunks and their products


def split_chunks(num_tokens: int, weight: Tensor) -> Iterator[slice]:
    """Yields the chunks of so many tokens, whose logits with this output weight exist at one time."""
    step = split_tokens(num_tokens, weight.shape[0], weight.device)
    return (slice(start, start + step) for start in range(0, num_tokens, step))


def normalise(logits: Float[Tensor, "N V"]) -> tuple[Float32[Tensor, "N V"], Float[Tensor, "N 1"]]:
    """Returns the probabilities, and the logarithm of the sum of the exponentials."""
    # The sum over the vocabulary needs float32: in bfloat16, 8 bits of mantissa lose the small terms.
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    # The normaliser from the largest entry, which is never tiny: one exponential less than by log_softmax.
    return probs, logits.amax(1, keepdim=True) - probs.amax(1, keepdim=True).log_()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Returns `total` with the product of `a` and `b` added, in place or not, in float32."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if kind_of(a.device) == "cuda":  # the product is never rounded to 16 bits, and no tensor of its own
        return torch.addmm(total, a, b, out_dtype=torch.float32)
    total += a @ b
    return total
