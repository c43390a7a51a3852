"""Holds texts or requests that wait, by client: clients take turns, however many each of them has."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Holds what waits, in order of arrival for each client; the first client has waited longest for its turn."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[T]:
        return (one for line in self._lines.values() for one in line)

    def count(self, client: str) -> int:
        """Returns how much of a client waits."""
        return len(self._lines.get(client, ()))

    def add(self, client: str, one: T) -> None:
        """Puts one behind all others of its client."""
        self._lines.setdefault(client, deque()).append(one)

    def put_first(self, client: str, one: T) -> None:
        """Puts one in front of all others, as what has had its turn before."""
        self._lines = {client: deque([one, *self._lines.pop(client, ())]), **self._lines}

    def take(self, num_held: Mapping[str, int] | None = None) -> T:
        """Takes the next one of the client that holds least, and among these has waited longest for its turn.

        Args:
            num_held: How much each client has that came here before; None for nothing.
        """
        held = num_held or {}
        client = min(self._lines, key=lambda client: held.get(client, 0))
        line = self._lines.pop(client)
        one = line.popleft()
        if line:
            self._lines[client] = line  # behind all other clients
        return one

    def remove(self, client: str, one: T) -> None:
        """Removes one if it still waits."""
        line = self._lines.get(client, deque())
        if one in line:
            line.remove(one)
        if not line:
            self._lines.pop(client, None)

    def clear(self) -> None:
        """Removes all."""
        self._lines.clear()
