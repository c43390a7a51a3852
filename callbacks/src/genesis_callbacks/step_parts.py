"""The parts of a step, and how code between the hooks of Lightning names the part that it works on.

    part            what it is
    data_wait       training waits for the next batch
    transfer        the batch is copied to the device
    forward         the forward passes
    backward        the backward passes, with the reductions of gradients that overlap with them
    communication   waits for other ranks that are known as such, under DDP also those at the end of a backward; in a
                    pipeline everything between its passes, and the reduction of gradients
    optimizer       clip and optimizer step
    save_stall      a checkpoint callback works in the training thread
    generation      a model writes texts to learn from; not counted as training by `Throughput`
    other           everything else between two steps

`StepTimer` and `Throughput` know most parts from Lightning's own hooks. Code that waits for other ranks, or generates,
inside of a hook uses `timing`. No torch is imported here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Literal, get_args

from .phases import find_callbacks

__all__ = ["PARTS", "Part", "PartListener", "timing"]

Part = Literal[
    "data_wait",
    "transfer",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "save_stall",
    "generation",
    "other",
]
PARTS: Final[tuple[Part, ...]] = get_args(Part)


class PartListener:
    """A callback that follows which part of a step begins and ends. Parts nest; the innermost one has the time."""

    def begin_part(self, part: Part) -> None:
        """Notes that a part begins."""

    def end_part(self) -> None:
        """Notes that the innermost part ends."""


@contextlib.contextmanager
def timing(trainer: Any, part: Part) -> Iterator[None]:
    """Counts the time of a `with` block as this part of the step. Without a listener it does nothing.

    Args:
        trainer: The Trainer, whose callbacks follow the parts.
        part: What the block does.

    Example:
        >>> from types import SimpleNamespace
        >>> with timing(SimpleNamespace(callbacks=[]), "generation"):
        ...     pass
    """
    listeners = find_callbacks(trainer, PartListener)
    for listener in listeners:
        listener.begin_part(part)
    try:
        yield
    finally:
        for listener in listeners:
            listener.end_part()
