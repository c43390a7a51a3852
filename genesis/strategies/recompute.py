"""Activation checkpointing: the backward computes again what a block, or a group of blocks, has not kept.

A single block is recomputed inside of its forward: FSDP2's hooks surround both forwards, and a compiled block computes
both. A group is recomputed around the forwards of its blocks, with their hooks: only the input of its first block
is kept, and in the backward the activations and gathered parameters of all its blocks exist at once.
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

from genesis.base.errors import UserError
from genesis.model.decoder import Decoder
from genesis.model.language_model import LanguageModel
from genesis.model.recomputation import ActivationCheckpointing, check_checkpointing, check_groups
from genesis.strategies.activation_offload import ActivationOffload


def split_blocks(blocks: range, size: int) -> list[range]:
    """Returns consecutive blocks in groups of a size, the last of which may be smaller.

    Example:
        >>> split_blocks(range(2, 7), 2)
        [range(2, 4), range(4, 6), range(6, 7)]
    """
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def apply_recomputation(
    decoder: LanguageModel,
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
    check_checkpointing(which)
    every_n = 1 if which == "block" else which
    # Saving and restoring generator states costs host time, so it is left out where no random number is drawn. With
    # dropout the recomputed forward must draw the same mask.
    is_random = {number: decoder.draws_random_numbers(block) for number, block in decoder.numbered_blocks.items()}
    if blocks_per_group > 1 or offload is not None:
        if not isinstance(decoder, Decoder):
            raise UserError(
                f"blocks_per_recomputation is {blocks_per_group} and activation_offload {offload is not None}, and the "
                "model of another library calls its blocks itself: set them to 1 and false"
            )
        decoder.groups = [part for run in decoder.groups for part in split_blocks(run, blocks_per_group)]
        run_blocks = partial(
            checkpoint, decoder.run_blocks, use_reentrant=False, preserve_rng_state=any(is_random.values())
        )
        decoder.run_blocks = run_blocks if offload is None else offload.around(run_blocks)  # type: ignore[method-assign]
        return
    for number, block in decoder.numbered_blocks.items():
        if number % every_n == 0:
            run = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=is_random[number])
            block.forward = run
