"""The way of tokens to their experts and back, without a limit of capacity: no token is dropped.

T  tokens     K  experts of a token     N  T * K rows, sorted by expert     D  model width     G  experts

Gathers take the place of scatters in the backward, too, so that each sum has one order: results have the same bits in
every run and on any number of threads.
"""

from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import embedding_bag

from genesis.base.device import kind_of


class Order(NamedTuple):
    """The rows of experts, sorted by expert and then by token.

    A choice is one expert of one token: choice t * K + k is the k-th expert of token t.
    """

    choice_of_row: Int64[Tensor, " N"]
    row_of_choice: Int64[Tensor, "T K"]
    counts: Int64[Tensor, " G"]
    """The number of rows of each expert."""


def sort_by_expert(experts: Int64[Tensor, "T K"], num_experts: int) -> Order:
    """Returns the order of the rows. Does not wait for the device.

    Args:
        experts: The experts of each token.
        num_experts: The number of all experts.
    """
    choices = experts.flatten()
    choice_of_row = choices.argsort(stable=True)
    row_of_choice = torch.empty_like(choice_of_row)
    row_of_choice[choice_of_row] = torch.arange(len(choices), device=choices.device)
    counts = choices.new_zeros(num_experts).scatter_add_(0, choices, torch.ones_like(choices))
    return Order(choice_of_row, row_of_choice.view(experts.shape), counts)


def spread(x: Float[Tensor, "T D"], order: Order) -> Float[Tensor, "N D"]:
    """Returns each token once for each of its experts, sorted by expert."""
    rows: Tensor = _Spread.apply(x, order.choice_of_row, order.row_of_choice)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Float[Tensor, "N D"], weights: Float[Tensor, "T K"], order: Order) -> Float[Tensor, "T D"]:
    """Returns the sum of each token's rows, each multiplied by its weight; the sum is in float32 or more."""
    out: Tensor = _Combine.apply(rows, weights, order.choice_of_row, order.row_of_choice)  # type: ignore[no-untyped-call]
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, choice_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_choice)
        return x.index_select(0, choice_of_row // row_of_choice.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_of_choice,) = ctx.saved_tensors
        (grad,) = grads
        return _sum_rows(grad, row_of_choice, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, choice_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, choice_of_row, row_of_choice)
        return _sum_rows(rows, row_of_choice, weights.to(_sum_dtype(rows)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, choice_of_row, row_of_choice = ctx.saved_tensors
        grad = grads[0].index_select(0, choice_of_row // row_of_choice.shape[1]).to(_sum_dtype(rows))
        by_row = weights.flatten().index_select(0, choice_of_row).to(grad.dtype)
        products = torch.linalg.vecdot(grad, rows.to(grad.dtype))
        grad_weights = products[row_of_choice.flatten()].view(weights.shape).to(weights.dtype)
        return (grad * by_row.unsqueeze(1)).to(rows.dtype), grad_weights, None, None


def _sum_rows(rows: Tensor, row_of_choice: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the sum of each token's rows, in the order of its choices."""
    if kind_of(rows.device) == "cpu" and rows.dtype == torch.float32 and not torch.compiler.is_compiling():
        # One pass over the memory: a bag is a token.
        return embedding_bag(row_of_choice, rows, mode="sum", per_sample_weights=weights)
    parts = (rows.index_select(0, column).to(_sum_dtype(rows)) for column in row_of_choice.unbind(1))
    if weights is not None:
        parts = (part * weight.unsqueeze(1) for part, weight in zip(parts, weights.unbind(1), strict=True))
    return reduce(torch.add, parts).to(rows.dtype)


def _sum_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)
