"""Counts the bytes of live tensors on one kind of device, and their peak, from the results of operators.

Temporaries within a kernel, fragmentation and what an allocator reserves are not seen.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ROUNDED_TO = 512
"""The unit of CUDA's allocator."""


class LiveBytes:
    """The bytes of all storages that are alive, each counted once.

    Args:
        device_type: The kind of device whose tensors count.
        rounded_to: Each storage takes a multiple of so many bytes.

    Attributes:
        now: The bytes that are alive.
        peak: The most bytes since the start, or since `reset_peak`.
    """

    def __init__(self, device_type: str, rounded_to: int = _ROUNDED_TO) -> None:
        self.now = self.peak = 0
        self._device_type, self._rounded_to = device_type, rounded_to
        self._sizes: dict[int, int] = {}

    def note(self, results: Any) -> None:
        """Adds the storages of an operator's results."""
        for leaf in tree_leaves(results):
            # The local tensor of a DTensor is a result of its own.
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.device.type == self._device_type:
                self.note_storage(leaf.untyped_storage())

    def note_storage(self, storage: torch.UntypedStorage, *, is_known: bool = False) -> None:
        """Sets the size of a storage.

        Args:
            storage: The storage.
            is_known: Whether only a storage that counts already is updated.
        """
        key = storage._cdata
        if key not in self._sizes:
            if is_known:
                return
            self._sizes[key] = 0
            weakref.finalize(storage, self._resize, key, None).atexit = False
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, num_bytes: int | None) -> None:
        before = self._sizes[key]
        if num_bytes is None:
            after = 0
            del self._sizes[key]
        else:
            after = self._sizes[key] = -(-num_bytes // self._rounded_to) * self._rounded_to
        self.now += after - before
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        """Begins to look for the peak again."""
        self.peak = self.now

    def watch_resizes(self) -> None:
        """Sees storages that are resized in place, as FSDP2 frees gathered parameters; for the rest of the process."""
        storages: Any = torch.UntypedStorage
        resize = storages.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.note_storage(storage, is_known=True)
            return result

        storages.resize_ = resize_


class CountLiveBytes(TorchDispatchMode):
    """Counts what real operators make."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live.note(out)
        return out
