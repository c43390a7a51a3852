"""Forward and backward of a window's micro-batches, one after the other: the loop of every strategy without a pipeline.

A pipeline schedule runs a whole window at once; a strategy with one has its own `train_micro_batches`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.model.language_model import LanguageModel
from genesis.model.part import Statistics
from genesis.model.statistics import add_statistics, list_auxiliary_losses
from genesis.objectives.objective import TOKENS, HeadResult, Objective, prepare
from genesis.objectives.vocabulary import Vocabulary
from genesis.strategies.wrap import set_gradient_sync


class WindowLoss(NamedTuple):
    """The results of a window's micro-batches on this rank.

    Args:
        to_backward: The scaled loss whose backward Lightning still has to run.
        sums: The objective's terms and figures, summed over this rank's micro-batches, without a graph and without the
            auxiliary losses of parts.
        part_sums: The statistics of the model's parts, summed over this rank's micro-batches
            (`genesis.model.statistics`).
    """

    to_backward: Tensor
    sums: HeadResult
    part_sums: dict[str, Tensor]


def train_in_turn(
    decoder: LanguageModel,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    scales: Mapping[str, float],
    *,
    vocabulary: Vocabulary,
    backward: Callable[[Tensor, None], object],
    gradient_reduction: Literal["window", "micro_batch"] = "window",
    set_gathering: Callable[[bool], None] | None = None,
) -> WindowLoss:
    """Runs every forward, and every backward but the last one, in which gradients are reduced over ranks.

    Args:
        decoder: The model.
        micro_batches: This rank's micro-batches between two optimizer steps, at least one.
        objective: What the window minimises.
        scales: The factor of each term before its backward, by unit.
        vocabulary: The strategy's.
        backward: The strategy's backward, which includes Lightning's hooks.
        gradient_reduction: Whether sharded gradients are reduced in the last backward alone, or in every backward.
        set_gathering: Called before each micro-batch with whether it is the last; decides when parameters are freed.
    """
    # The sums stay on the device: reading them here would make the host wait for every micro-batch.
    vocabulary = vocabulary.bounded(decoder.softcap)
    sums = HeadResult({}, {})
    part_sums: dict[str, Tensor] = {}
    for number, given in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        # FSDP2's post-backward hooks read this flag. The last backward runs in Lightning,
        # after this function has returned, so its flag stays set.
        set_gradient_sync(decoder, is_reduced=is_last or gradient_reduction == "micro_batch")
        if set_gathering is not None:
            set_gathering(is_last)
        micro_batch = prepare(objective, decoder, given, vocabulary)
        result, statistics = decoder(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            document_offsets=micro_batch.document_offsets,
            head=objective.head(micro_batch, vocabulary),
            has_statistics=True,
            # Padding, and prompts whose labels are ignored, are in no sum that is divided by the valid tokens.
            counted=micro_batch.labels != IGNORE_INDEX,
        )
        sums = add_result(sums, result)
        add_statistics(part_sums, statistics)
        loss = scale_terms(result.terms, statistics, scales)
        if not is_last:
            # Lightning runs `training_step` under autocast, and its own backward outside of it.
            with torch.autocast(loss.device.type, enabled=False):
                backward(loss, None)
    return WindowLoss(loss, sums, part_sums)


def add_result(sums: HeadResult, result: HeadResult) -> HeadResult:
    """Returns the sums with those of a further forward, without its graph."""
    added = (
        {name: total[name] + value.detach() if name in total else value.detach() for name, value in of_one.items()}
        for total, of_one in zip(sums, result, strict=True)
    )
    return HeadResult(*added)


def scale_terms(
    terms: Mapping[str, Tensor], statistics: Mapping[str, Statistics], scales: Mapping[str, float]
) -> Tensor:
    """Returns the loss to run backward: each term with its factor. Auxiliary losses of parts are sums over tokens."""
    of_unit = dict(terms)
    for auxiliary in list_auxiliary_losses(statistics):
        of_unit[TOKENS] = of_unit[TOKENS] + auxiliary if TOKENS in of_unit else auxiliary
    return reduce(add, [value * scales[unit] for unit, value in of_unit.items()])


@torch.no_grad()
def sum_in_turn(
    decoder: LanguageModel,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    vocabulary: Vocabulary,
) -> HeadResult:
    """Returns the objective's sums over all micro-batches without a backward, for validation."""
    vocabulary, results = vocabulary.bounded(decoder.softcap), []
    for given in micro_batches:
        micro_batch = prepare(objective, decoder, given, vocabulary)
        results.append(
            decoder(
                micro_batch.input_ids,
                document_ids=micro_batch.document_ids,
                document_offsets=micro_batch.document_offsets,
                head=objective.head(micro_batch, vocabulary),
            )
        )
    first: HeadResult = results[0]
    return HeadResult(
        {unit: torch.stack([result.terms[unit] for result in results]).sum() for unit in first.terms},
        {name: torch.stack([result.figures[name] for result in results]).sum() for name in first.figures},
    )
