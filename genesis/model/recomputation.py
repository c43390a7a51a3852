"""Which blocks recompute their activations, and which of them together. Pure."""

from typing import Any, Final, Literal

from genesis.base.errors import UserError

ActivationCheckpointing = Literal["none", "block"] | int
"""Which blocks recompute their activations in backward: none, each, or every n-th."""

_OPTION: Final = "blocks_per_recomputation"


def check_checkpointing(which: Any) -> None:
    """Checks that a value is an `ActivationCheckpointing`.

    Raises:
        UserError: The value is invalid.
    """
    if which not in ("none", "block") and not (type(which) is int and which >= 1):
        raise UserError(f"activation_checkpointing is {which!r}; it must be 'none', 'block' or a whole number >= 1")


def check_groups(
    which: ActivationCheckpointing, blocks_per_group: int, blocks_per_unit: int = 1, *, has_offload: bool = False
) -> None:
    """Checks that groups of blocks can be recomputed together. Pure.

    Args:
        which: See `ActivationCheckpointing`.
        blocks_per_group: Blocks that are recomputed together.
        blocks_per_unit: Blocks that FSDP2 gathers together; 1 without FSDP2.
        has_offload: Whether the inputs of groups are moved to the host.

    Raises:
        UserError: They cannot.
    """
    if type(blocks_per_group) is not int or blocks_per_group < 1:
        raise UserError(f"{_OPTION} is {blocks_per_group!r}; it must be a whole number >= 1")
    if has_offload and which != "block":
        raise UserError(
            f"activation_offload is true, and activation_checkpointing is {which!r}: what is moved to the host are the "
            "inputs of recomputed blocks; set activation_checkpointing to block"
        )
    if blocks_per_group == 1 and not has_offload:
        return
    if which != "block":
        raise UserError(
            f"{_OPTION} is {blocks_per_group}, and activation_checkpointing is {which!r}: groups are recomputed only "
            "with activation_checkpointing block"
        )
    if blocks_per_group % blocks_per_unit:
        raise UserError(
            f"{_OPTION} {blocks_per_group} is no multiple of blocks_per_unit {blocks_per_unit}: a unit that is "
            "gathered together must be recomputed together"
        )
