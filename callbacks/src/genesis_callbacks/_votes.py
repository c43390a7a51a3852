"""Exchanges the ranks' votes at the end of each window: one small reduction, in the background."""

from collections.abc import Callable

from ._triggers import Vote
from .checkpoint.ranks import Ranks

_NOTHING = [0, 0, 0]


class VoteExchange:
    """Agrees on votes among all ranks, once for each window.

    Every rank calls `exchange` at the same windows. It communicates over the engine's own group.

    Args:
        ranks: The run's.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: Callable[[], list[int]] | None = None

    def exchange(self, ours: Vote) -> Vote:
        """Returns what all ranks agree on: with one rank its vote of now, otherwise the votes of the window before."""
        if self._ranks.world_size == 1:
            return ours
        # One window late by design: the reduction of the last window has ended long ago, so no rank waits for the
        # slowest one here. All ranks read the result at the same window, so they act on it in the same place.
        agreed = self._pending() if self._pending is not None else _NOTHING
        self._pending = self._ranks.start_maximum([ours.signal_number, int(ours.is_minute_due), ours.outcome])
        signal_number, minutes, outcome = agreed
        return Vote(signal_number, bool(minutes), outcome)

    def finish(self) -> None:
        """Waits for the exchange that is under way, whose result is no longer needed."""
        # Every rank has started it. A rank that dropped it would destroy its group while others still reduce.
        if self._pending is not None:
            self._pending()
            self._pending = None

    def abandon(self) -> None:
        """Drops the exchange that is under way without a wait: other ranks may be gone."""
        self._pending = None
