"""Compares the tensors of two checkpoints one by one, with at most two tensors in memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..base.manifest import Manifest, TensorRecord
from .restore import read_recorded_tensors

TensorVerdict = Literal["same", "changed", "reshaped", "only in A", "only in B"]
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class TensorComparison:
    """One name in two checkpoints.

    Attributes:
        name: The tensor's name.
        verdict: `same` means equal digests, shape and dtype. The bytes are not read, so verify both checkpoints first.
        before: The tensor's record in A; None if A lacks the tensor.
        now: The tensor's record in B; None if B lacks the tensor.
        max_abs_difference: Largest absolute difference of a changed tensor; infinite if only one side has nan
            somewhere.
    """

    name: str
    verdict: TensorVerdict
    before: TensorRecord | None
    now: TensorRecord | None
    max_abs_difference: float | None = None


def max_abs_difference(one: Tensor, other: Tensor) -> float:
    """Returns the largest absolute difference of two tensors of one shape and dtype, 0 where both are nan.

    Example:
        >>> max_abs_difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]))
        0.5
    """
    largest = 0.0
    exact = torch.float64 if one.is_floating_point() or one.is_complex() else torch.int64
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.reshape(-1), other.reshape(-1)
    for start in range(0, one.numel(), _BLOCK_ELEMENTS):
        a, b = (tensor[start : start + _BLOCK_ELEMENTS].to(exact) for tensor in (one, other))
        gap = (a - b).abs().double()
        gap[(a == b) | (a.isnan() & b.isnan())] = 0.0
        largest = max(largest, float(gap.nan_to_num(nan=torch.inf).max()))
    return largest


def compare_tensors(
    path: Path, manifest: Manifest, other: Path, other_manifest: Manifest
) -> Iterator[TensorComparison]:
    """Yields the comparison of each tensor, ordered by name. No communication; nothing is unpickled.

    Raises:
        CorruptCheckpointError: A tensor differs from the saved one.
    """
    for name in sorted(manifest.tensors.keys() | other_manifest.tensors.keys()):
        before, now = manifest.tensors.get(name), other_manifest.tensors.get(name)
        if before is None or now is None:
            yield TensorComparison(name, "only in B" if before is None else "only in A", before, now)
        elif (before.shape, before.dtype) != (now.shape, now.dtype):
            yield TensorComparison(name, "reshaped", before, now)
        elif before.digest == now.digest:
            yield TensorComparison(name, "same", before, now)
        else:
            one = read_recorded_tensors(path, manifest, [name])[name]
            two = read_recorded_tensors(other, other_manifest, [name])[name]
            yield TensorComparison(name, "changed", before, now, max_abs_difference(one, two))
