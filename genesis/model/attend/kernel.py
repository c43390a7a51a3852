"""What a kernel of attention is, and where it runs."""

from abc import ABC, abstractmethod
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from genesis.base.device import kind_of, read_capability
from genesis.model.attend.metadata import AttentionMetadata, Rows

CUDA: Final = "cuda"
HALF_DTYPES: Final = (torch.float16, torch.bfloat16)
AMPERE: Final = (8, 0)
FLASH_CAPABILITY, FLASH_HEAD_DIM = AMPERE, 256
"""The oldest GPUs (Ampere) and the widest heads for which torch has flash kernels."""
_WIDTH_STEP: Final = 8


class Place(NamedTuple):
    """What decides which kernels there are.

    Args:
        kind: The kind of device.
        capability: The compute capability of a CUDA device.
        dtype: The dtype of queries, keys and values.
        head_dim: The width of a head.
        has_sinks: Whether the softmax of each head has a sink.
    """

    kind: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    has_sinks: bool = False

    @classmethod
    def of(cls, x: Tensor, head_dim: int) -> "Place":
        """Returns the place of a model with heads of this width whose blocks get `x`."""
        is_autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype
        return cls(kind_of(x.device), read_capability(x.device), dtype, head_dim)

    def find_older(self, least: tuple[int, int]) -> str | None:
        """Returns an obstacle if this is no CUDA device of at least this compute capability."""
        if self.kind != CUDA:
            return f"it needs a CUDA device, and this is {self.kind}"
        found = self.capability or (0, 0)
        if found < least:
            return f"it needs a GPU of compute capability {_show(least)} or newer, and this one has {_show(found)}"
        return None


def _show(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class AttentionKernel(ABC):
    """A way to attend within documents and windows, causally, where a key head may serve several query heads.

    Attributes:
        name: The name in recipes and in `AttentionMetadata`.
        needs_offsets: Whether `prepare` reads where documents begin, which costs a wait if the loader has not counted.
    """

    name: str
    needs_offsets: bool = True

    def __init__(self) -> None:
        self._distrusted: set[str] = set()

    def describe(self) -> str:
        """Returns the name of the kernel, with the version of its package if that is not torch."""
        return self.name

    def distrust(self, kind: str) -> None:
        """Makes this kernel unavailable on a kind of device from now on, after it gave wrong results there."""
        self._distrusted.add(kind)

    def find_obstacle(self, place: Place) -> str | None:
        """Returns why this kernel cannot run there, in a clause whose subject is the kernel; None if it can."""
        if place.kind in self._distrusted:
            return f"it gave wrong results on this {place.kind} device"
        return self._find_obstacle(place)

    @abstractmethod
    def _find_obstacle(self, place: Place) -> str | None:
        """Returns why this kernel cannot run there even if its results are right."""

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata, rows: Rows) -> AttentionMetadata:
        """Returns the metadata of a forward with what `attend` reads, computed once for all its layers."""

    @abstractmethod
    def attend(
        self,
        query: Float[Tensor, "B S H E"],
        key: Float[Tensor, "B L K E"],
        value: Float[Tensor, "B L K E"],
        metadata: AttentionMetadata,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B S H E"]:
        """Returns softmax(query key^T / sqrt(E)) value over the tokens that `metadata` lets each token see.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            metadata: What `prepare` has returned.
            sinks: A logit for each head, which joins its softmax and has no value. Kernels without it have an obstacle.
        """


def find_flash_obstacle(place: Place) -> str | None:
    """Returns why torch has no flash kernel there; None if it has one."""
    older = place.find_older(FLASH_CAPABILITY)
    if older is not None:
        return older
    if place.dtype not in HALF_DTYPES:
        return "it needs bfloat16 or float16"
    if place.head_dim > FLASH_HEAD_DIM or place.head_dim % _WIDTH_STEP:
        return f"it takes heads of a width up to {FLASH_HEAD_DIM} that {_WIDTH_STEP} divides, not {place.head_dim}"
    return None
