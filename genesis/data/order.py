"""The order of training sequences: a pure function of (seed, mix, position).

A *position* counts the sequences that all ranks have consumed. Two steps lead from it to a sequence:

1. A selection map over integer weights gives the source, and the number of the draw from it. After any n sequences, a
   source of weight w out of W has given n·w/W of them, to within one sequence.
2. Draws go through a source epoch by epoch. Each epoch is a permutation of the source's sequences that needs no memory,
   so that every sequence comes once per epoch.

The mix may change at a position. An order is therefore a list of mixes, each with its start position and the number of
sequences that each source had given by then. A limit of epochs is also such a change, at a position that follows from
the mix and the limit: there the source's weight becomes 0, and the other sources continue in proportion. The order ends
when no source is left. `state` holds the list in plain types, with a hash of the first sequences, so that a saved run
never continues silently in another order.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import gcd, lcm
from typing import Any, Final, Self

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from genesis.base.errors import UserError, numbered
from genesis.data.shuffle import encrypt_32_bits, permute
from genesis.data.skipped import Range, Ranges, clip, plan_skips

ORDER_VERSION: Final = 1
"""Raised whenever the same (seed, mix, position) would give another sequence."""
MAX_PERIOD: Final = 1_000_000
"""The largest sum of a mix's weights: the selection map is a table of one period."""
MAX_ROUNDED_PERIOD: Final = 100_000
"""The sum to which weights that result from a division are rounded: its table is built quickly."""
NUM_HASHED: Final = 1_000

_SHUFFLE_ROUNDS: Final = 12
"""With the 4 rounds of grain's `MapDataset.shuffle`, neighbours in the order come from the same part of a large source
(correlations of 15 standard errors over 10^6 sequences or more); from 8 rounds on no correlation is measurable."""
_SMALL_SOURCE: Final = 4_096


@dataclass(frozen=True)
class Mix:
    """Weights in force from `start_position` on, and the sequences consumed before that position, both by source.

    A mix whose weights are all 0 is the end of the order.
    """

    start_position: int
    weights: tuple[int, ...]
    sequences_consumed: tuple[int, ...]


@dataclass(frozen=True)
class SequenceOrder:
    """Maps each position to a sequence. Deterministic, immutable, thread-safe; `build_order` builds it.

    Args:
        seed: Seed of the shuffle; any integer.
        names: The names of the sources.
        num_sequences: Number of sequences of each source.
        mixes: Mixes by start position, the first at 0. Changes caused by epoch limits are included from the beginning.
        max_epochs: Epoch limit of each source; None for a source without a limit.
        skipped: Positions whose windows are skipped: they are passed, but not trained.
    """

    seed: int
    names: tuple[str, ...]
    num_sequences: tuple[int, ...]
    mixes: tuple[Mix, ...]
    max_epochs: tuple[int | None, ...]
    skipped: Ranges = ()

    @property
    def end(self) -> int | None:
        """Returns the position at which every source has reached its limit; None if the order never ends."""
        return None if any(self.mixes[-1].weights) else self.mixes[-1].start_position

    def sequences(self, position: int, count: int) -> tuple[Int64[ndarray, " count"], Int64[ndarray, " count"]]:
        """Returns (index into `names`, sequence of that source) for `count` positions from `position` on."""
        assert self.end is None or position + count <= self.end, "read beyond the end of the order"
        parts = [self._draws(mix, first, last) for mix, first, last in self._spans(position, position + count)]
        source_ids = np.concatenate([sources for sources, _ in parts])
        draws = np.concatenate([draws for _, draws in parts])
        sequence_ids = np.empty(count, np.int64)
        for source in np.unique(source_ids):
            is_source = source_ids == source
            sequence_ids[is_source] = self._shuffled(int(source), draws[is_source])
        return source_ids, sequence_ids

    def sources(self, position: int, count: int) -> Int64[ndarray, " count"]:
        """Returns the index into `names` alone, for `count` positions from `position` on."""
        assert self.end is None or position + count <= self.end, "read beyond the end of the order"
        parts = [self._draws(mix, first, last)[0] for mix, first, last in self._spans(position, position + count)]
        return np.concatenate(parts)

    def sequences_consumed(self, position: int) -> tuple[int, ...]:
        """Returns the number of sequences of each source before `position`."""
        return _consumed_before(self.mix_at(position), position)

    def sequences_skipped(self, position: int) -> tuple[int, ...]:
        """Returns how many of these sequences of each source were skipped."""
        skipped = [0] * len(self.names)
        for first, stop in clip(self.skipped, 0, position):
            before, after = self.sequences_consumed(first), self.sequences_consumed(stop)
            skipped = [sum(counts) - less for *counts, less in zip(skipped, after, before, strict=True)]
        return tuple(skipped)

    def is_skipped(self, position: int, count: int) -> bool:
        """Returns whether the window of `count` positions from `position` on is skipped."""
        return bool(clip(self.skipped, position, position + count))

    def with_skips(self, asked: Ranges, position: int, global_batch_size: int) -> Self:
        """Returns the order of a run that continues at `position` and is asked to skip these positions, too."""
        return replace(self, skipped=plan_skips(self.skipped, asked, position, global_batch_size))

    def mix_at(self, position: int) -> Mix:
        """Returns the mix in force at `position`."""
        return next(mix for mix in reversed(self.mixes) if mix.start_position <= position)

    def with_mix(self, position: int, weights: Mapping[str, int], max_epochs: Mapping[str, int] | None = None) -> Self:
        """Returns the same order up to `position`, with the given weights and limits from there on.

        Limits include the sequences consumed before. If nothing changes, the result equals this order.
        """
        checked = _checked_weights(self.names, weights)
        limits = _checked_limits(self.names, max_epochs or {})
        consumed = self.sequences_consumed(position)
        now = Mix(position, _weights_left(checked, consumed, self.num_sequences, limits), consumed)
        past = [mix for mix in self.mixes if mix.start_position <= position]
        if past[-1].weights != now.weights:
            past = [*(mix for mix in past if mix.start_position < position), now]
        mixes = (*past[:-1], *_plan_mixes(past[-1], checked, self.num_sequences, limits))
        return type(self)(self.seed, self.names, self.num_sequences, mixes, limits, self.skipped)

    def state(self) -> dict[str, Any]:
        """Returns the order in plain types."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "num_sequences": dict(zip(self.names, self.num_sequences, strict=True)),
            "mixes": [
                {
                    "start_position": mix.start_position,
                    "weights": dict(zip(self.names, mix.weights, strict=True)),
                    "sequences_consumed": dict(zip(self.names, mix.sequences_consumed, strict=True)),
                }
                for mix in self.mixes
            ],
            "hash": self.hash(),
            # Absent where nothing is skipped, as in checkpoints of earlier versions.
            **({"skipped_positions": [list(skipped) for skipped in self.skipped]} if self.skipped else {}),
        }

    def hash(self) -> str:
        """Returns a hash of the first sequences, which in practice differs between any two orders."""
        return self._hash

    @cached_property  # training waits while a checkpoint asks for it
    def _hash(self) -> str:
        digest = blake2b("\0".join(self.names).encode(), digest_size=16)
        for ids in self.sequences(0, NUM_HASHED if self.end is None else min(NUM_HASHED, self.end)):
            digest.update(ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def continued(self, state: Mapping[str, Any], position: int) -> Self:
        """Returns the order of a saved run, continued at `position` with this order's mix and limits.

        Raises:
            UserError: The saved run had another order version, seed or corpus, or the installed packages shuffle
                differently.
        """
        here = self.state()
        for key, remedy in _REMEDIES.items():
            if state.get(key) != here[key]:
                raise UserError(
                    f"the checkpoint's order of data has {key} {_short(state.get(key))}, but this run has "
                    f"{_short(here[key])}; {remedy}"
                )
        mixes = tuple(
            Mix(
                mix["start_position"],
                tuple(mix["weights"][name] for name in self.names),
                tuple(mix["sequences_consumed"][name] for name in self.names),
            )
            for mix in state["mixes"]
        )
        skipped: list[Range] = [(first, stop) for first, stop in state.get("skipped_positions", ())]
        saved = type(self)(self.seed, self.names, self.num_sequences, mixes, self.max_epochs, tuple(skipped))
        if saved.hash() != state["hash"]:
            raise UserError(
                f"the checkpoint's order of data has hash {state['hash']}, this version gives {saved.hash()}; continue "
                "with the version of genesis that wrote it"
            )
        weights = dict(zip(self.names, self.mixes[0].weights, strict=True))
        limits = {name: limit for name, limit in zip(self.names, self.max_epochs, strict=True) if limit is not None}
        return saved.with_mix(position, weights, limits)

    def _spans(self, first: int, last: int) -> Iterator[tuple[Mix, int, int]]:
        """Yields the mixes in force within [first, last), each with the part in which it is in force."""
        ends = [*(mix.start_position for mix in self.mixes[1:]), max(last, self.mixes[-1].start_position)]
        for mix, end in zip(self.mixes, ends, strict=True):
            begin, stop = max(first, mix.start_position), min(last, end)
            if begin < stop:
                yield mix, begin, stop

    def _draws(self, mix: Mix, first: int, last: int) -> tuple[Int64[ndarray, " n"], Int64[ndarray, " n"]]:
        """Returns (source, number of its earlier sequences) for the positions [first, last), all under `mix`."""
        selected, consumed_in_period = _selection_map(mix.weights)
        num_periods, slots = np.divmod(np.arange(first, last) - mix.start_position, len(selected))
        sources = selected[slots]
        weights, consumed = np.array(mix.weights), np.array(mix.sequences_consumed)
        return sources, consumed[sources] + num_periods * weights[sources] + consumed_in_period[slots]

    def _shuffled(self, source: int, draws: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
        length = self.num_sequences[source]
        epochs, indices = np.divmod(draws, length)
        shuffled = np.empty_like(draws)
        for epoch in np.unique(epochs):
            is_epoch = epochs == epoch
            seed = _epoch_seed(self.seed, self.names[source], int(epoch))
            shuffled[is_epoch] = _shuffle(indices[is_epoch], length, seed)
        return shuffled


_REMEDIES: Final = {
    "order_version": "continue with the version of genesis that wrote it",
    "seed": "set data.seed to the checkpoint's",
    "num_sequences": "train on the checkpoint's corpus with its seq_len",
}


def build_order(
    num_sequences: Mapping[str, int], weights: Mapping[str, int], seed: int, max_epochs: Mapping[str, int] | None = None
) -> SequenceOrder:
    """Returns the order over sources of `num_sequences` each, mixed with `weights`.

    A source without a weight, or with weight 0, is not used. A source without a limit in `max_epochs` never ends.

    Raises:
        UserError: A weight names no source, is negative or too large; no weight is positive; a source with a weight is
            empty; a limit names no source or is below 1.

    Example:
        >>> order = build_order({"web": 1_000, "code": 100}, {"web": 3, "code": 1}, seed=0)
        >>> order.sequences(0, 8)[0].tolist()
        [0, 0, 0, 1, 0, 0, 0, 1]
    """
    names = tuple(num_sequences)
    checked = _checked_weights(names, weights)
    for name, weight in zip(names, checked, strict=True):
        if weight and not num_sequences[name]:
            raise UserError(f"source {name!r} has no sequence; give it weight 0, or lower data.seq_len")
    counts, limits = tuple(num_sequences.values()), _checked_limits(names, max_epochs or {})
    mixes = _plan_mixes(Mix(0, checked, (0,) * len(names)), checked, counts, limits)
    return SequenceOrder(seed, names, counts, mixes, limits)


def weigh_sequences(weights: Mapping[str, int], tokens_per_sequence: Mapping[str, Fraction]) -> dict[str, int]:
    """Returns the weights of sequences with which tokens have the proportions of `weights`.

    The weights are exact if their sum is below `MAX_ROUNDED_PERIOD`, else rounded to that sum, and at least 1.

    Example:
        >>> weigh_sequences({"long": 1, "short": 1}, {"long": Fraction(2_000), "short": Fraction(500)})
        {'long': 1, 'short': 4}
    """
    rates = {
        name: weight / tokens_per_sequence[name] if weight > 0 and tokens_per_sequence.get(name) else Fraction(weight)
        for name, weight in weights.items()
    }
    scale = Fraction(lcm(*(rate.denominator for rate in rates.values())))
    scale /= gcd(*(int(rate * scale) for rate in rates.values())) or 1
    total = sum(rates.values(), Fraction(0))
    if total * scale > MAX_ROUNDED_PERIOD:
        scale = MAX_ROUNDED_PERIOD / total
    return {name: max(1, round(rate * scale)) if rate > 0 else weights[name] for name, rate in rates.items()}


def _checked_weights(names: tuple[str, ...], weights: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the weight of each source, without common divisor."""
    _check_names("mix", names, weights)
    for name, weight in weights.items():
        if weight < 0:
            raise UserError(f"data.mix gives the source {name!r} weight {weight}; weights must be at least 0")
    divisor = gcd(*weights.values())
    if not divisor:
        raise UserError("data.mix gives no source a positive weight; set one")
    reduced = tuple(weights.get(name, 0) // divisor for name in names)
    if sum(reduced) > MAX_PERIOD:
        raise UserError(
            f"data.mix has weights that sum to {sum(reduced):,}; round them to a sum of at most {MAX_PERIOD:,}"
        )
    return reduced


def _checked_limits(names: tuple[str, ...], max_epochs: Mapping[str, int]) -> tuple[int | None, ...]:
    """Returns the limit of each source."""
    _check_names("max_epochs", names, max_epochs)
    for name, limit in max_epochs.items():
        if limit < 1:
            raise UserError(
                f"data.max_epochs gives the source {name!r} {numbered(limit, 'epochs')}; give at least 1, or the "
                "source weight 0 in data.mix"
            )
    return tuple(max_epochs.get(name) for name in names)


def _check_names(option: str, names: tuple[str, ...], given: Mapping[str, int]) -> None:
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the corpus has {', '.join(names)}"
            raise UserError(f"data.{option} names the source {name!r}, which the corpus lacks; {hint}")


def _plan_mixes(
    first: Mix, weights: tuple[int, ...], num_sequences: tuple[int, ...], max_epochs: tuple[int | None, ...]
) -> tuple[Mix, ...]:
    """Returns `first` and the mixes that follow it, one whenever a source reaches its limit."""
    mixes = [first]
    while True:
        mix = mixes[-1]
        last_draws = [
            _position_of_draw(mix, source, limit * length - consumed - 1)
            for source, (limit, length, consumed) in enumerate(
                zip(max_epochs, num_sequences, mix.sequences_consumed, strict=True)
            )
            if limit is not None and mix.weights[source]
        ]
        if not last_draws:
            return tuple(mixes)
        position = min(last_draws) + 1
        consumed_before = _consumed_before(mix, position)
        mixes.append(Mix(position, _weights_left(weights, consumed_before, num_sequences, max_epochs), consumed_before))


def _weights_left(
    weights: tuple[int, ...],
    sequences_consumed: tuple[int, ...],
    num_sequences: tuple[int, ...],
    max_epochs: tuple[int | None, ...],
) -> tuple[int, ...]:
    """Returns the weights of the sources below their limits, without common divisor; 0 for the others."""
    left = tuple(
        0 if limit is not None and consumed >= limit * length else weight
        for weight, consumed, length, limit in zip(weights, sequences_consumed, num_sequences, max_epochs, strict=True)
    )
    divisor = gcd(*left) or 1
    return tuple(weight // divisor for weight in left)


def _consumed_before(mix: Mix, position: int) -> tuple[int, ...]:
    """Returns the number of sequences of each source before `position`, at which `mix` is in force."""
    if position == mix.start_position or not any(mix.weights):
        return mix.sequences_consumed
    num_periods, rest = divmod(position - mix.start_position, sum(mix.weights))
    in_rest = np.bincount(_selection_map(mix.weights)[0][:rest], minlength=len(mix.weights))
    return tuple(
        consumed + num_periods * weight + int(extra)
        for consumed, weight, extra in zip(mix.sequences_consumed, mix.weights, in_rest, strict=True)
    )


def _position_of_draw(mix: Mix, source: int, number: int) -> int:
    """Returns the position of draw `number` from a source under `mix`, counted from 0."""
    selected, _ = _selection_map(mix.weights)
    num_periods, in_period = divmod(number, mix.weights[source])
    slot = int(np.flatnonzero(selected == source)[in_period])
    return mix.start_position + num_periods * len(selected) + slot


@lru_cache(maxsize=8)
def _selection_map(weights: tuple[int, ...]) -> tuple[Int64[ndarray, " period"], Int64[ndarray, " period"]]:
    """Returns one period: the source of each slot, and the number of its earlier slots in the period.

    The j-th draw of a source may neither come before its share reaches j - 1 nor after it reaches j, so that it is
    always less than one draw from its share. Taking the draw that is due first among those allowed meets all of these
    windows, because the shares sum to one.

    References:
        Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980); Baruah et al., "Proportionate
        progress: a notion of fairness in resource allocation", Algorithmica 15 (1996).
    """
    period = sum(weights)
    selected, consumed_before = np.empty(period, np.int64), np.empty(period, np.int64)
    consumed = [0] * len(weights)
    due = [(-(-period // weight), source) for source, weight in enumerate(weights) if weight]
    heapify(due)
    not_yet: list[tuple[int, int, int]] = []
    for slot in range(period):
        while not_yet and not_yet[0][0] <= slot:
            heappush(due, heappop(not_yet)[1:])
        _, source = heappop(due)
        selected[slot], consumed_before[slot] = source, consumed[source]
        consumed[source] += 1
        earliest = consumed[source] * period // weights[source]
        latest = -(-(consumed[source] + 1) * period // weights[source])
        heappush(not_yet, (earliest, latest, source))
    return selected, consumed_before


def _epoch_seed(seed: int, name: str, epoch: int) -> int:
    """Returns 32 bits that are unrelated between seeds, epochs and sources."""
    return int.from_bytes(blake2b(f"{seed}:{epoch}:{name}".encode(), digest_size=4).digest(), "little")


def _shuffle(indices: Int64[ndarray, " n"], length: int, seed: int) -> Int64[ndarray, " n"]:
    """Returns the images of the indices under a permutation of `length` elements."""
    if length <= _SMALL_SOURCE:
        return np.take(_small_permutation(length, seed), indices)
    return permute(indices, length, seed, _SHUFFLE_ROUNDS)


@lru_cache(maxsize=64)
def _small_permutation(length: int, seed: int) -> Int64[ndarray, " length"]:
    """Returns a whole permutation by sorting. Small sources keep this method, because it defines their order."""
    return np.argsort(encrypt_32_bits(np.arange(length), seed, _SHUFFLE_ROUNDS))


def _short(value: object) -> str:
    """Returns a value for a message of one line."""
    text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."
