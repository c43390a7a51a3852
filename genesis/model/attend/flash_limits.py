"""Where torch has its flash kernels, on which attention by documents, over a cache and over whole rows depends."""

from typing import Final

from genesis.model.attend.kernel import AMPERE, HALF_DTYPES, Place

FLASH_CAPABILITY, FLASH_HEAD_DIM = AMPERE, 256
"""The oldest GPUs (Ampere) and the widest heads with flash kernels."""
_WIDTH_STEP: Final = 8


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
