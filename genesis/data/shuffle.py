"""Permutes ranges of indices without storing the permutation, many indices at a time.

A Feistel network with Simon's round function encrypts an index, over the next even number of bits, repeatedly until the
result lies within the range. This is a permutation of the range, and each seed gives another one. The values are the
same as in google/grain's index shuffle, which takes one index at a time
(docs/decisions/0006-an-order-without-grain.md).

References:
    Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), section 4: the walk; Beaulieu et al., "The Simon
    and Speck families of lightweight block ciphers", eprint.iacr.org/2013/404: the round; C++17 [rand.util.seedseq]:
    the keys.
"""

from functools import lru_cache
from typing import Final

import numpy as np
from jaxtyping import Int64, UInt32
from numpy import ndarray

_WHOLE_LENGTH: Final = 1 << 16
"""Up to this length, the whole permutation is computed as a table: encryption needs a minimum number of bits, so that
most results would lie outside of a short range."""
_CHUNK_LENGTH: Final = 1 << 13
_MIN_BITS: Final = 16
_WORD: Final = (1 << 32) - 1


def permute(indices: Int64[ndarray, " n"], length: int, seed: int, rounds: int) -> Int64[ndarray, " n"]:
    """Returns the images of the indices under a permutation of `length`. Deterministic and thread-safe.

    The images near the last requested indices are cached, so that reading a range in order is fast.

    Args:
        indices: Indices from 0 to `length` - 1.
        length: Length of the range, up to 2^62.
        seed: Seed of 32 bits.
        rounds: Number of rounds of the Feistel network, even and at least 4.

    Example:
        >>> permute(np.arange(5), length=5, seed=0, rounds=12).tolist()
        [3, 1, 2, 0, 4]
    """
    size = length if length <= _WHOLE_LENGTH else _CHUNK_LENGTH
    chunks, offsets = np.divmod(indices, size)
    permuted = np.empty_like(indices)
    for chunk in set(chunks.tolist()):
        is_chunk = chunks == chunk
        permuted[is_chunk] = _permute_chunk(chunk * size, min(length, (chunk + 1) * size), length, seed, rounds)[
            offsets[is_chunk]
        ]
    return permuted


@lru_cache(maxsize=64)
def _permute_chunk(first: int, last: int, length: int, seed: int, rounds: int) -> Int64[ndarray, " chunk"]:
    """Returns the images of the indices [first, last) of a range of `length`."""
    bits = max(_MIN_BITS, (length - 1).bit_length())
    word_bits = (bits + bits % 2) // 2
    keys = round_keys(seed, rounds)
    if bits == _MIN_BITS:
        return _walk_table(_encrypt(np.arange(_WHOLE_LENGTH), word_bits, keys).tolist(), length)
    values = np.arange(first, last, dtype=np.int64)
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _encrypt(values[walking], word_bits, keys)
        walking = walking[values[walking] >= length]
    return values


def _walk_table(table: list[int], length: int) -> Int64[ndarray, " length"]:
    """Returns where the indices [0, length) go: no entry of `table` is visited twice, however short the range is."""
    values = []
    for index in range(length):
        value = table[index]
        while value >= length:
            value = table[value]
        values.append(value)
    return np.array(values, dtype=np.int64)


def encrypt_32_bits(indices: Int64[ndarray, " n"], seed: int, rounds: int) -> Int64[ndarray, " n"]:
    """Returns a permutation of the numbers below 2^32 at `indices`: keys to sort by."""
    return _encrypt(indices, 16, round_keys(seed, rounds))


def _encrypt(values: Int64[ndarray, " n"], word_bits: int, keys: tuple[int, ...]) -> Int64[ndarray, " n"]:
    mask = np.uint32((1 << word_bits) - 1)
    left, right = (values >> word_bits).astype(np.uint32), values.astype(np.uint32) & mask
    for first_key, second_key in zip(keys[::2], keys[1::2], strict=True):
        left ^= _mix(right, word_bits, mask) ^ (np.uint32(first_key) & mask)
        right ^= _mix(left, word_bits, mask) ^ (np.uint32(second_key) & mask)
    return (left.astype(np.int64) << word_bits) | right


def _mix(word: UInt32[ndarray, " n"], word_bits: int, mask: np.uint32) -> UInt32[ndarray, " n"]:
    """Returns Simon's f: (word <<< 1 and word <<< 8) xor word <<< 2, rotations of `word_bits`."""
    by_1, by_2, by_8 = ((word << r) | (word >> (word_bits - r)) for r in (1, 2, 8))
    mixed: UInt32[ndarray, " n"] = (by_1 & by_8 ^ by_2) & mask
    return mixed


@lru_cache(maxsize=64)
def round_keys(seed: int, rounds: int) -> tuple[int, ...]:
    """Returns the output of `std::seed_seq{seed}`: 32 bits for each round.

    Example:
        >>> round_keys(0, 4)
        (2963817213, 69796629, 1973464570, 532167439)
    """

    def fold(value: int) -> int:
        return (value ^ (value >> 27)) & _WORD

    keys = [0x8B8B8B8B] * rounds
    num_words = 1
    gap = 11 if rounds >= 623 else 7 if rounds >= 68 else 5 if rounds >= 39 else 3 if rounds >= 7 else (rounds - 1) // 2
    near = (rounds - gap) // 2
    far = near + gap
    num_first = max(num_words + 1, rounds)
    for k in range(num_first):
        at, at_near, at_far = k % rounds, (k + near) % rounds, (k + far) % rounds
        first = 1664525 * fold(keys[at] ^ keys[at_near] ^ keys[(k - 1) % rounds]) & _WORD
        second = first + (num_words if k == 0 else at + seed if k <= num_words else at) & _WORD
        keys[at_near] = (keys[at_near] + first) & _WORD
        keys[at_far] = (keys[at_far] + second) & _WORD
        keys[at] = second
    for k in range(num_first, num_first + rounds):
        at, at_near, at_far = k % rounds, (k + near) % rounds, (k + far) % rounds
        first = 1566083941 * fold((keys[at] + keys[at_near] + keys[(k - 1) % rounds]) & _WORD) & _WORD
        second = (first - at) & _WORD
        keys[at_near] ^= first
        keys[at_far] ^= second
        keys[at] = second
    return tuple(keys)
