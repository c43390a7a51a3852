"""The data states of checkpoints that earlier versions wrote are read."""

from typing import Any

import pytest

from genesis.data.old_keys import rename_old_keys
from genesis.data.usage import DATA_STATE, DataUsage, read_data_usage


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tokens_drawn", "tokens_consumed"),
        ("epochs_drawn", "epochs_consumed"),
        ("ledger_of_lanes", "usage_of_lanes"),
    ],
)
def test_an_old_key_of_the_state_is_read_as_todays(old: str, new: str) -> None:
    assert rename_old_keys({old: {"web": 3}, "data_position": 8}) == {new: {"web": 3}, "data_position": 8}
    assert rename_old_keys({new: {"web": 3}}) == {new: {"web": 3}}


def test_an_old_key_of_the_orders_mixes_is_read_as_todays() -> None:
    state = {"order": {"seed": 3, "mixes": [{"sequences_drawn": {"tokens_drawn": 1}, "start_position": 0}]}}
    expected = {"order": {"seed": 3, "mixes": [{"sequences_consumed": {"tokens_drawn": 1}, "start_position": 0}]}}
    assert rename_old_keys(state) == expected, "a source may have any name"


@pytest.mark.parametrize("order", [None, 3, {"mixes": 3}, {"mixes": [3]}])
def test_a_malformed_order_is_left_to_the_reader_of_the_state(order: Any) -> None:
    assert rename_old_keys({"order": order}) == {"order": order}


def test_the_usage_of_an_old_checkpoint_is_read() -> None:
    corpus = {"tokens_drawn": {"web": 640}, "epochs_drawn": {"web": 0.5}}
    assert read_data_usage([{"trainer": {DATA_STATE: corpus}}]) == {"web": DataUsage(640, 0.5)}
    entry = {"num_tokens": 10, "num_documents": 3, "num_bad_documents": 1}
    stream = [{"trainer": {DATA_STATE: {"ledger_of_lanes": {"web": entry}}}}] * 2
    assert read_data_usage(stream) == {"web": DataUsage(20, None, 6, 2)}
