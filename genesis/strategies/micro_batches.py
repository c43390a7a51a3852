"""Forward and backward of a window's micro-batches, one after the other: the loop of every strategy without a pipeline.

A pipeline schedule runs a whole window at once; a strategy with one has its own `train_micro_batches`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genesis.data.window import MicroBatch
from genesis.model.decoder import Decoder
from genesis.model.statistics import add_auxiliary_losses, add_statistics
from genesis.strategies.wrap import set_gradient_sync

Head = Callable[[Tensor, Tensor], Tensor]
"""A function of the final hidden states and the output weight that returns the summed loss."""


class WindowLoss(NamedTuple):
    """The results of a window's micro-batches on this rank.

    Args:
        to_backward: The scaled loss whose backward Lightning still has to run.
        loss_sum: Nats over this rank's valid tokens, detached, without the auxiliary losses of parts.
        part_sums: The statistics of the model's parts, summed over this rank's micro-batches
            (`genesis.model.statistics`).
    """

    to_backward: Tensor
    loss_sum: Tensor
    part_sums: dict[str, Tensor]


def sum_loss(decoder: Decoder, micro_batch: MicroBatch, head: Callable[[Tensor], Head]) -> Tensor:
    """Returns the sum over valid labels of -log p, a float32 scalar.

    Args:
        decoder: The model.
        micro_batch: The inputs and labels.
        head: A function that returns the loss-computing head for given labels.
    """
    labels = micro_batch.labels
    total: Tensor = decoder(
        micro_batch.input_ids,
        document_ids=micro_batch.document_ids,
        document_offsets=micro_batch.document_offsets,
        head=head(labels),
    )
    return total


def train_in_turn(
    decoder: Decoder,
    micro_batches: Sequence[MicroBatch],
    scale: float,
    *,
    head: Callable[[Tensor], Head],
    backward: Callable[[Tensor, None], object],
    gradient_reduction: Literal["window", "micro_batch"] = "window",
    set_gathering: Callable[[bool], None] | None = None,
) -> WindowLoss:
    """Runs every forward, and every backward but the last one, in which gradients are reduced over ranks.

    Args:
        decoder: The model.
        micro_batches: This rank's micro-batches between two optimizer steps, at least one.
        scale: The factor of each loss before its backward.
        head: A function that returns the loss-computing head for given labels.
        backward: The strategy's backward, which includes Lightning's hooks.
        gradient_reduction: Whether sharded gradients are reduced in the last backward alone, or in every backward.
        set_gathering: Called before each micro-batch with whether it is the last; decides when parameters are freed.
    """
    # The sum stays on the device: reading it here would make the host wait for every micro-batch.
    loss_sum = torch.zeros((), dtype=torch.float32, device=micro_batches[0].labels.device)
    part_sums: dict[str, Tensor] = {}
    for number, micro_batch in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        # FSDP2's post-backward hooks read this flag. The last backward runs in Lightning,
        # after this function has returned, so its flag stays set.
        set_gradient_sync(decoder, is_reduced=is_last or gradient_reduction == "micro_batch")
        if set_gathering is not None:
            set_gathering(is_last)
        own_sum, statistics = decoder(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            document_offsets=micro_batch.document_offsets,
            head=head(micro_batch.labels),
            has_statistics=True,
        )
        loss_sum = loss_sum + own_sum.detach()
        add_statistics(part_sums, statistics)
        loss = add_auxiliary_losses(own_sum, statistics) * scale
        if not is_last:
            # Lightning runs `training_step` under autocast, and its own backward outside of it.
            with torch.autocast(loss.device.type, enabled=False):
                backward(loss, None)
    return WindowLoss(loss, loss_sum, part_sums)


def sum_in_turn(decoder: Decoder, micro_batches: Sequence[MicroBatch], *, head: Callable[[Tensor], Head]) -> Tensor:
    """Returns the summed loss of all micro-batches without a backward, for validation."""
    return torch.stack([sum_loss(decoder, micro_batch, head) for micro_batch in micro_batches]).sum()
