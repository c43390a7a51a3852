"""Permutations of any length: whole, and those of grain's index shuffle."""

import doctest
import logging
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import genesis.data.shuffle as shuffle_module
from genesis.data.shuffle import encrypt_32_bits, permute

logging.disable(logging.WARNING)  # grain warns, when it is imported, that jax is absent
from grain.experimental import index_shuffle  # noqa: E402

logging.disable(logging.NOTSET)

ROUNDS = 12


def permute_slowly(index: int, length: int, seed: int) -> int:
    moved: int = index_shuffle(index, max_index=length - 1, seed=seed, rounds=ROUNDS)
    return moved


@given(length=st.integers(2, 2**45), seed=st.integers(0, 2**32 - 1), data=st.data())
@pytest.mark.slow
def test_the_values_are_those_of_grain(length: int, seed: int, data: st.DataObject) -> None:
    if (length - 1).bit_count() == 1:
        length += 1  # one longer than a power of two: see below
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=8))
    found = permute(np.array(indices), length, seed, ROUNDS)
    assert found.tolist() == [permute_slowly(index, length, seed) for index in indices]


def test_keys_to_sort_by_are_those_of_grain() -> None:
    expected = [permute_slowly(index, 2**32, 7) for index in range(200)]
    assert encrypt_32_bits(np.arange(200), 7, ROUNDS).tolist() == expected


@pytest.mark.parametrize("length", [1, 2, 255, 4_097, 65_535, 65_536, 65_537, 65_538, 100_003, 2**18 + 1])
def test_every_index_of_a_range_comes_once(length: int) -> None:
    indices = np.arange(length)
    np.random.default_rng(0).shuffle(indices)
    parts = [permute(part, length, 3, ROUNDS) for part in np.array_split(indices, 7)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(length))


def test_grain_loses_the_last_index_where_we_do_not() -> None:
    """The one difference: it encrypts 16 bits, of which the index 65,536 has 17."""
    length = 65_537
    assert permute_slowly(length - 1, length, 3) == permute_slowly(0, length, 3)
    first, last = permute(np.array([0, length - 1]), length, 3, ROUNDS).tolist()
    assert first != last


def test_indices_may_come_in_any_order_and_number() -> None:
    length = 10**6
    indices = [random.Random(1).randrange(length) for _ in range(300)]
    alone = [int(permute(np.array([index]), length, 5, ROUNDS)[0]) for index in indices[:40]]
    assert permute(np.array(indices), length, 5, ROUNDS)[:40].tolist() == alone


def test_the_documented_examples_are_true() -> None:
    assert doctest.testmod(shuffle_module).failed == 0
