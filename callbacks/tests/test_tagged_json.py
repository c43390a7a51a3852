"""Every type that a state may hold comes back as it was."""

import json
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import timedelta
from enum import Enum
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from genesis_callbacks.base.checkpoint_errors import UnsupportedStateError
from genesis_callbacks.checkpoint import CorruptCheckpointError
from genesis_callbacks.checkpoint.tagged_json import decode_tagged, encode_tagged, named_tensors


class Colour(Enum):
    RED = 1
    BLUE = "blue"


def round_trip(value):
    content, tensors = encode_tagged(value, "state.0")
    text = json.dumps(content, allow_nan=False)
    assert named_tensors(content) == set(tensors)
    return decode_tagged(json.loads(text), tensors)


def same(value, other):
    """Equality that knows types, order, nan, signed zero and arrays."""
    if type(value) is not type(other):
        return False
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.dtype == other.dtype and np.array_equal(value, other)
    if isinstance(value, dict):
        pairs = zip(value.items(), other.items(), strict=True)
        return len(value) == len(other) and all(same(key, k) and same(item, i) for (key, item), (k, i) in pairs)
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, (float, complex, np.generic)):
        return pickle.dumps(value) == pickle.dumps(other)
    return value == other


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([Colour.RED, Colour.BLUE, Path("a/b"), torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])]),
    st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), np.float64("inf"), range(1, 9, 2)]),
    st.timedeltas(),
    st.builds(bytearray, st.binary()),
)
KEYS = st.one_of(
    st.text(), st.integers(), st.none(), st.tuples(st.integers(), st.text()), st.sampled_from(["!", "a.b"])
)
VALUES = st.recursive(
    LEAVES,
    lambda items: st.one_of(
        st.lists(items),
        st.lists(items).map(tuple),
        st.dictionaries(st.text(), items),
        st.dictionaries(KEYS, items),
        st.dictionaries(KEYS, items).map(OrderedDict),
        st.builds(deque, st.lists(items, max_size=3), st.sampled_from([None, 3])),
        st.dictionaries(KEYS, st.integers()).map(Counter),
        st.dictionaries(KEYS, items).map(lambda pairs: defaultdict(list, pairs)),
        st.sets(st.one_of(st.integers(), st.text())),
        st.frozensets(st.integers()),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(VALUES)
def test_any_nesting_comes_back(value):
    assert same(round_trip(value), value)


def test_special_values_come_back():
    value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "zero": -0.0, "long": timedelta(days=3)}
    back = round_trip(value)
    assert math.isnan(back.pop("nan"))
    value.pop("nan")
    assert same(back, value)
    assert round_trip(deque([1], maxlen=4)).maxlen == 4
    assert round_trip(defaultdict(int))["new"] == 0


def test_tensors_and_arrays_go_by_their_path():
    value = {"a": {"b": torch.arange(3)}, "a.b": torch.ones(2), "list": [np.arange(4, dtype=np.int16)]}
    content, tensors = encode_tagged(value, "state.0")
    assert set(tensors) == {"state.0.a.b", "state.0.a.b'", "state.0.list.0"}
    assert same(decode_tagged(json.loads(json.dumps(content)), tensors), value)


class Stranger:
    pass


@pytest.mark.parametrize("value", [Stranger(), lambda: None, object, Stranger, np.array(["a"]), defaultdict(Stranger)])
def test_an_unknown_type_is_refused_by_its_key(value):
    with pytest.raises(UnsupportedStateError, match=r"state\.0\.callbacks\.mine\.1"):
        encode_tagged({"callbacks": {"mine": [1, value]}}, "state.0")


@pytest.mark.parametrize(
    "content",
    [
        {"!": "pickle", "base64": ""},
        {"!": "enum", "module": "os", "class": "system", "name": "true"},
        {"!": "enum", "module": "not.imported.anywhere", "class": "Colour", "name": "RED"},
        {"!": "tensor", "name": "not there"},
    ],
)
def test_a_stranger_can_name_no_type_but_ours(content):
    with pytest.raises(CorruptCheckpointError):
        decode_tagged(content, {})
