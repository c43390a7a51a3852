"""Runs code that makes hundreds of thousands of objects without looking for garbage among them."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Leaves cyclic garbage alone during the block: of a save of a thousand ranks, its search takes the most time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
