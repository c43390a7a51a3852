"""Gives a freshly built decoder its share of the work, where ranks divide rows or matrices."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import embedding

from genesis.model.cut import MatrixShares, held
from genesis.model.decoder import Decoder, DecoderConfig, SequenceShare
from genesis.model.exchange import HeadExchange
from genesis.model.mixture import find_routers


class RowShares(SequenceShare, Protocol):
    """The ranks that share the matrices of layers, and between them the tokens of rows, in the order of the rows."""

    @property
    def rank(self) -> int:
        """This rank's number among them."""

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Returns the sum of what the ranks have counted in their tokens, without a gradient."""


def share_context(decoder: Decoder, exchange: HeadExchange) -> None:
    """Makes a freshly built decoder compute this rank's tokens of each row, in place."""
    decoder.context = exchange
    for block in decoder.numbered_blocks.values():
        block.sequence_mixer.exchange = exchange
    _count_whole_rows(decoder, exchange.sum_over_row)


def share_matrices(decoder: Decoder, share: RowShares, ranks: MatrixShares) -> None:
    """Cuts a freshly built decoder among ranks, in place, before it is wrapped.

    Args:
        decoder: The decoder, with its adapters, on the meta device or not.
        share: The ranks that share the tokens of rows.
        ranks: The same ranks, which share the matrices.
    """
    decoder.share = share
    for block in decoder.numbered_blocks.values():
        block.sequence_mixer.share_matrices(ranks)
        block.mixer_share = share
        if block.feed_forward.share_matrices(ranks):
            block.feed_forward_share = share
    table, output = (decoder._modules.get(name) for name in ("embedding", "output"))  # a stage may have neither
    if isinstance(table, nn.Embedding):
        ranks.cut(table, "weight")
        table.forward = partial(_embed, table, share)  # type: ignore[method-assign]
    if output is not None:
        ranks.cut(output, "weight")
    _count_whole_rows(decoder, share.sum_over_row)


def list_cut_columns(config: DecoderConfig, num_ranks: int) -> dict[str, int]:
    """Returns the width of each kind of matrix whose columns a number of ranks would share, by its name."""
    with torch.device("meta"):
        decoder = Decoder(config)
    found = _CutColumns(num_ranks)
    for block in decoder.numbered_blocks.values():
        block.sequence_mixer.share_matrices(found)
        block.feed_forward.share_matrices(found)
    return found.widths


class _CutColumns:
    """Notes the matrices whose columns would be cut, and cuts nothing: a `MatrixShares`."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.widths: dict[str, int] = {}

    def cut(self, module: nn.Module, name: str, dim: int = 0) -> None:
        parameter = module.get_parameter(name)
        if dim == parameter.ndim - 1 > 0:
            width = parameter.shape[-1]
            self.widths[f"the {width} columns of a matrix of {type(module).__name__}"] = width

    def cut_linear(self, layer: nn.Linear, dim: int) -> None:
        self.cut(layer, "weight", dim)

    def use_rows(self, layer: nn.Linear, rows: slice | Tensor) -> None: ...

    def sum(self, x: Tensor) -> Tensor:
        return x


def _embed(table: nn.Embedding, share: RowShares, ids: Int64[Tensor, "B S"]) -> Float[Tensor, "B T D"]:
    """Returns the vectors of this rank's tokens, each of which is in the part of one rank."""
    part = held(table.weight)
    own = ids - share.rank * part.shape[0]
    is_elsewhere = (own < 0) | (own >= part.shape[0])
    return share.scatter(embedding(own.masked_fill(is_elsewhere, 0), part).masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


def _count_whole_rows(decoder: Decoder, sum_over_row: Callable[[Tensor], Tensor]) -> None:
    """Makes routers count the tokens of whole rows, of which ranks have some each."""
    for router in find_routers(decoder).values():
        inner = router.sum_over_row
        router.sum_over_row = sum_over_row if inner is None else partial(_sum_twice, inner, sum_over_row)


def _sum_twice(inner: Callable[[Tensor], Tensor], outer: Callable[[Tensor], Tensor], counts: Tensor) -> Tensor:
    return outer(inner(counts))
