"""The end of the last accumulation window, and whether the live state is still the state of that moment."""

from typing import Any

from lightning.pytorch import LightningModule

from ._compat import write_counts
from .checkpoint.rng import read_rng_state


class Boundary:
    """Records a window's end: the random generators, and the number of writes to each parameter and buffer.

    Args:
        step: Windows attempted.
        module: Holds the live tensors.
    """

    def __init__(self, step: int, module: LightningModule) -> None:
        self.step = step
        self.rng: dict[str, Any] = read_rng_state()
        self._module = module
        self._writes = self._count_writes()

    @property
    def is_untouched(self) -> bool:
        """Whether no parameter and no buffer was written since."""
        return self._count_writes() == self._writes

    def _count_writes(self) -> list[tuple[int, int]]:
        # Torch's version counters are read on the host, so a look costs no wait for the device and works after the
        # device has failed. The identity is compared, too: a replaced tensor begins to count at 0.
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return list(zip(map(id, tensors), write_counts(tensors), strict=True))
