"""How a part's matrices are shared by ranks that compute it together: the interface between parts and a strategy.

A part that can be shared has `share_matrices`, in which it says what each rank holds: some rows of the matrices that
read the stream, as those of some heads, and the columns of those that write to it, so that the outputs of all ranks
are added.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class MatrixShares(Protocol):
    """The ranks that share the matrices of a part (`genesis.strategies.tensor_parallel`)."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number among them."""

    def cut(self, module: nn.Module, name: str, dim: int = 0) -> None:
        """Leaves this rank an even part of a parameter along one dimension; a forward reads it by `held`."""

    def cut_linear(self, layer: nn.Linear, dim: int) -> None:
        """Leaves this rank even rows (0) of a linear layer with its bias, or even columns (1) of one without."""

    def use_rows(self, layer: nn.Linear, rows: slice | Tensor) -> None:
        """Makes a linear layer that is not cut multiply these rows alone, by their numbers on the host."""

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over the ranks; its gradient is summed, too, as each rank uses the sum its own way."""


def held(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a parameter in a forward: its part of one that ranks share, else all of it."""
    if isinstance(tensor, DTensor):
        own: Tensor = tensor.to_local()
        return own
    return tensor


def find_indivisible(sizes: dict[str, int], num_ranks: int) -> str | None:
    """Returns the name and value of the first size that `num_ranks` does not divide; None if it divides all."""
    return next((f"{name} {size}" for name, size in sizes.items() if size % num_ranks), None)


def take_rows(tensor: Tensor, rows: slice | Tensor | None) -> Tensor:
    """Returns some rows of a parameter that is not cut, or what this rank holds of it for None."""
    if rows is None:
        return held(tensor)
    return tensor[rows] if isinstance(rows, slice) else torch.index_select(tensor, 0, rows.to(tensor.device))
