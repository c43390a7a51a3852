"""Which layers each stage of a pipeline has, and how long its ranks wait: arithmetic without process groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn

from genesis.base.errors import UserError, numbered
from genesis.model.decoder import Decoder, DecoderConfig


def ideal_bubble_share(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> float:
    """Returns the share of a window in which a rank waits if all stages take the same time.

    Example:
        >>> ideal_bubble_share(8, 1, 4)  # 7 of 11: the efficiency is 4 of 11
        0.6363636363636364

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv:2104.04473, section 2.2.
    """
    return (num_ranks - 1) / (stages_per_rank * num_micro_batches + num_ranks - 1)


def divide_layers(decoder: DecoderConfig, num_stages: int, given: Sequence[int] | None = None) -> list[range]:
    """Returns the layers of each stage.

    Args:
        decoder: The model.
        num_stages: The number of stages.
        given: The number of layers of each stage; None for the division whose largest stage has the fewest operations,
            with those of the head, and among these the one whose largest stage has the fewest parameters, with those of
            the embedding and the head.

    Raises:
        UserError: There are fewer layers than stages, or the given numbers do not fit.
    """
    if decoder.num_layers < num_stages:
        raise UserError(
            f"the pipeline has {numbered(num_stages, 'stages')}, and the model "
            f"{numbered(decoder.num_layers, 'layers')}: lower pipeline_parallel or stages_per_rank until their product "
            "is at most the number of layers"
        )
    if given is not None:
        if len(given) != num_stages or sum(given) != decoder.num_layers or min(given) < 1:
            raise UserError(
                f"layers_per_stage is {list(given)}: give {numbered(num_stages, 'numbers')} of at least 1, one for "
                f"each stage, that add up to the {numbered(decoder.num_layers, 'layers')} of the model"
            )
        ends = list(accumulate(given, initial=0))
        return [range(*pair) for pair in pairwise(ends)]
    return list(_divide(*_count_costs(decoder), num_stages))


@lru_cache(maxsize=64)
def count_operations(decoder: DecoderConfig, seq_len: int) -> tuple[tuple[int, ...], int]:
    """Returns the floating-point operations of a token's forward and backward in each block, and in the head."""
    with torch.device("meta"):
        model = Decoder(decoder)
    blocks = [0] * decoder.num_layers
    for name, part in model.parts.items():
        if name.startswith("blocks."):
            blocks[int(name.split(".")[1])] += part.flops_per_token + part.context_flops_per_token(seq_len)
    return tuple(blocks), 6 * model.output_weight.numel()


@lru_cache(maxsize=32)
def _count_costs(decoder: DecoderConfig) -> tuple["_Costs", "_Costs"]:
    """Returns the operations and the parameters."""
    with torch.device("meta"):
        model = Decoder(decoder)
    operations, of_head = count_operations(decoder, decoder.max_seq_len)
    parameters = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    table = model.output_weight.numel()
    return (
        _Costs(tuple(accumulate(operations, initial=0)), 0, of_head),
        _Costs(tuple(accumulate(parameters, initial=0)), table, table),
    )


class _Costs(NamedTuple):
    """What the layers before each one cost together, and what the first and the last stage cost beside their layers."""

    before: tuple[int, ...]
    first: int
    last: int

    def of(self, layers: range) -> int:
        """Returns the cost of a stage."""
        edges = self.first * (layers.start == 0) + self.last * (layers.stop == len(self.before) - 1)
        return self.before[layers.stop] - self.before[layers.start] + edges


@lru_cache(maxsize=1024)
def _divide(main: _Costs, other: _Costs, num_stages: int) -> tuple[range, ...]:
    """Returns the division whose largest stage is the smallest by `main`, and among these the smallest by `other`."""
    _, most = _find_division(main, num_stages, lambda layers: True)
    division, _ = _find_division(other, num_stages, lambda layers: main.of(layers) <= most)
    return tuple(division)


def _find_division(costs: _Costs, num_stages: int, is_allowed: Callable[[range], bool]) -> tuple[list[range], int]:
    """Returns the division into allowed stages whose largest one costs the least, and the cost of that one."""
    num_layers = len(costs.before) - 1
    best: dict[int, tuple[list[range], int]] = {0: ([], 0)}  # of the layers before an end, for a number of stages
    for stage in range(num_stages):
        ends = [num_layers] if stage == num_stages - 1 else range(stage + 1, num_layers - num_stages + stage + 2)
        found: dict[int, tuple[list[range], int]] = {}
        for end in ends:
            for start, (division, largest) in best.items():
                layers = range(start, end)
                if start < end and is_allowed(layers):
                    cost = max(largest, costs.of(layers))
                    if end not in found or cost < found[end][1]:
                        found[end] = ([*division, layers], cost)
        best = found
    return best[num_layers]


def check_micro_batches(num_micro_batches: int, num_ranks: int, stages_per_rank: int) -> None:
    """Checks that the schedule can run windows of a number of micro-batches.

    Raises:
        UserError: It cannot.
    """
    given = f"the micro-batches of a window are {num_micro_batches}"
    remedy = "change data.global_batch_size or data.micro_batch_size"
    if num_micro_batches < num_ranks:
        raise UserError(
            f"{given}, and pipeline_parallel is {num_ranks}: some stages would never work; a pipeline "
            f"needs at least {num_ranks} micro-batches, so {remedy}"
        )
    num_rounds = num_micro_batches // num_ranks
    if stages_per_rank > 1 and num_micro_batches % num_rounds:
        raise UserError(
            f"{given}, which cannot be interleaved over {numbered(num_ranks, 'ranks')} with stages_per_rank "
            f"{stages_per_rank}; {num_rounds * num_ranks} micro-batches can be, so {remedy}"
        )


class NumberedBlocks(nn.Module):
    """The blocks of the stages of a rank, under their numbers in the whole model.

    Args:
        blocks: The blocks by number, in ascending order.
    """

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)

    def __getitem__(self, number: int) -> nn.Module:
        return self.get_submodule(str(number))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(list(self.children()))
