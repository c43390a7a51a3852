"""Stages a save: takes live tensors to where training cannot change them.

This first form is the blocking one: a tensor at a time, just before it is written, while the training thread waits.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from .plan import LocalPart, Part


def stage_tensor(data: Tensor) -> Tensor:
    """Returns `data` on the CPU, contiguous, in a storage of its own size: a view is saved with its buffer."""
    staged = data.detach().cpu().contiguous()
    if staged.untyped_storage().nbytes() != staged.numel() * staged.element_size():
        staged = staged.clone()
    return staged


def stage_blocking(parts: Iterable[LocalPart]) -> Iterator[tuple[Part, Tensor]]:
    """Yields each part with its staged data. It must be consumed before the next optimizer step."""
    for local in parts:
        yield local.part, stage_tensor(local.data)
