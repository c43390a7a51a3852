"""The kernels of attention, best first, and the choice of one. A new kernel is a file and its entry here."""

from typing import Final, Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from genesis.base.errors import UserError
from genesis.model.attend.cache import attend_used
from genesis.model.attend.fa4 import FA4Kernel
from genesis.model.attend.flash import FlashKernel
from genesis.model.attend.flex import FlexKernel
from genesis.model.attend.kernel import AttentionKernel, Place
from genesis.model.attend.mask import MaskKernel
from genesis.model.attend.metadata import AttentionMetadata

AUTO: Final = "auto"
AttentionName = Literal["auto", "fa4", "flex", "flash", "mask"]

MASK: Final = MaskKernel()
FLASH: Final = FlashKernel(MASK)
FLEX: Final = FlexKernel()
KERNELS: Final[dict[str, AttentionKernel]] = {one.name: one for one in (FA4Kernel(), FLEX, FLASH, MASK)}
"""Best first. The last one runs everywhere."""
TORCH_KERNEL: Final = FLASH.name
"""The kernel of a decoder that no fit has built: it compiles nothing, and uses a mask where it has to."""


class Choice(NamedTuple):
    """A kernel, and why each better one was not chosen.

    Args:
        name: The kernel.
        obstacles: Why each kernel before it in the table cannot run, by its name.
    """

    name: str
    obstacles: dict[str, str]


def choose_kernel(place: Place) -> Choice:
    """Returns the best kernel that can run there."""
    obstacles: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        obstacle = kernel.find_obstacle(place)
        if obstacle is None:
            return Choice(name, obstacles)
        obstacles[name] = obstacle
    raise AssertionError("the last kernel runs everywhere")


def list_worse(name: str, place: Place) -> list[str]:
    """Returns the kernels after `name` in the table that can run there, best first."""
    names = list(KERNELS)
    return [other for other in names[names.index(name) + 1 :] if KERNELS[other].find_obstacle(place) is None]


def resolve_kernel(name: str, place: Place) -> str:
    """Returns the kernel of that name, and for `auto` the best one there.

    Raises:
        UserError: The kernel cannot run there.
    """
    if name == AUTO:
        return choose_kernel(place).name
    obstacle = KERNELS[name].find_obstacle(place)
    if obstacle is not None:
        best = choose_kernel(place).name
        raise UserError(f"model.attention is {name}, but {obstacle}; give --model.attention {best}, or auto")
    return name


def attend(
    query: Float[Tensor, "B S H E"],
    key: Float[Tensor, "B L K E"],
    value: Float[Tensor, "B L K E"],
    metadata: AttentionMetadata,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B S H E"]:
    """Returns softmax(query key^T / sqrt(E)) value over the tokens that `metadata` lets each token see.

    With sinks, the softmax of each head has a further logit, which has no value.
    """
    if metadata.used is not None:
        assert sinks is None, "the metadata of attention with sinks has a mask"
        return attend_used(query, key, value, metadata.used, metadata.window)
    return KERNELS[metadata.kernel].attend(query, key, value, metadata, sinks)
