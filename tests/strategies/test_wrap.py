"""The wrappers of a decoder, as far as they show without training; `tests/train/test_step.py` has what they compute."""

from dataclasses import replace

import pytest
import torch

from genesis.model.decoder import Decoder
from genesis.strategies.wrap import apply_wrappers
from tests.model.mixture_part import MixtureConfig
from tests.train.support import TINY


@pytest.mark.parametrize(
    ("changes", "is_preserved"),
    [
        ({}, False),
        ({"dropout": 0.1}, True),
        ({"ffn_dim": None, "feed_forward": MixtureConfig(2, 8)}, True),
    ],
    ids=["nothing_random", "dropout", "a_part_that_may_be"],
)
def test_checkpointing_keeps_the_generators_states_where_something_is_random(changes, is_preserved) -> None:
    with torch.device("meta"):
        decoder = Decoder(replace(TINY, **changes))
    apply_wrappers(decoder, activation_checkpointing="block")
    assert [block.forward.keywords["preserve_rng_state"] for block in decoder.blocks] == [is_preserved] * 2
