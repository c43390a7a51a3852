"""Activation checkpointing: the backward computes again what a block, or a group of blocks, has not kept.

A single block is recomputed inside of its forward: FSDP2's hooks surround both forwards, and a compiled block computes
both. A group is recomputed around the forwards of its blocks, with their hooks: only the input of its first block
is kept, and in the backward the activations and gathered parameters of all its blocks exist at once.
"""

from functools import partial
from typing import Final, Literal

from torch.utils.checkpoint import checkpoint

from genesis.errors import UserError
from genesis.model.decoder import Decoder
from genesis.model.part import Part
from genesis.strategies.activation_offload import ActivationOffload

ActivationCheckpointing = Literal["none", "block"] | int
"""Which blocks recompute their activations in backward: none, each, or every n-th."""

_OPTION: Final = "blocks_per_recomputation"


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


def apply_recomputation(
    decoder: Decoder,
    which: ActivationCheckpointing,
    blocks_per_group: int = 1,
    offload: ActivationOffload | None = None,
) -> None:
    """Makes the blocks of `decoder` recompute their activations, in place.

    Args:
        decoder: The decoder.
        which: See `ActivationCheckpointing`.
        blocks_per_group: Blocks that are recomputed together, with `which` "block".
        offload: Moves the inputs of groups to the host; None to leave them on the device.

    Raises:
        UserError: An option is out of its range.
    """
    check_groups(which, blocks_per_group, has_offload=offload is not None)
    if which == "none":
        return
    every_n = 1 if which == "block" else which
    if type(every_n) is not int or every_n < 1:
        raise UserError(f"activation_checkpointing is {which!r}; it must be 'none', 'block' or a whole number >= 1")
    # Saving and restoring generator states costs host time, so it is left out where no random number is drawn. With
    # dropout the recomputed forward must draw the same mask.
    is_random = [
        decoder.config.dropout > 0
        or any(part.draws_random_numbers for part in block.modules() if isinstance(part, Part))
        for block in decoder.blocks
    ]
    if blocks_per_group > 1 or offload is not None:
        num_blocks = len(decoder.blocks)
        decoder.groups = [
            range(start, min(start + blocks_per_group, num_blocks)) for start in range(0, num_blocks, blocks_per_group)
        ]
        run_blocks = partial(checkpoint, decoder.run_blocks, use_reentrant=False, preserve_rng_state=any(is_random))
        decoder.run_blocks = run_blocks if offload is None else offload.around(run_blocks)  # type: ignore[method-assign]
        return
    for index in range(0, len(decoder.blocks), every_n):
        block = decoder.blocks[index]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=is_random[index])
