"""Gives a freshly built decoder its share of the work, where ranks divide rows or matrices."""

from genesis.model.decoder import Decoder
from genesis.model.exchange import HeadExchange
from genesis.model.mixture import find_routers


def share_context(decoder: Decoder, exchange: HeadExchange) -> None:
    """Makes a freshly built decoder compute this rank's tokens of each row, in place."""
    decoder.context = exchange
    for block in decoder.numbered_blocks.values():
        block.sequence_mixer.exchange = exchange
    for router in find_routers(decoder).values():
        router.sum_over_row = exchange.sum_over_row
