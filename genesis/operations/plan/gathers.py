"""Which parameters FSDP2 holds whole at each moment, and what their gathers take: the order of torch's own hooks."""

from collections import Counter
from dataclasses import dataclass

from genesis.operations.plan.bill import COMMUNICATION, GATHERED, Bill
from genesis.operations.plan.layout import Layout


@dataclass(frozen=True)
class Unit:
    """The parameters that are gathered together, in bytes.

    Args:
        gathered: All of them as they are gathered.
        results: What collectives of the gather return; a parameter that one rank holds alone needs none.
        copies: A rank's share of these, in the type of the gather.
        reduced: All gradients in the type of the reduction.
        shard: A rank's share of these.
        own_shard: That share in the type of the parameters.
        from_host: The largest tensor that is copied from the host before a gather; None if they are on the device.
    """

    gathered: int
    results: int
    copies: int
    reduced: int
    shard: int
    own_shard: int
    from_host: int | None


class Gathers:
    """Plays the gathers of a micro-batch on a bill.

    Args:
        bill: The bytes.
        layout: How the model is spread.
        root: The parameters outside of the blocks, which stay gathered from the first moment to the last.
        units: The blocks' parameters, in order.
    """

    def __init__(self, bill: Bill, layout: Layout, root: Unit, units: list[Unit]) -> None:
        self._bill, self._layout, self._root, self._units = bill, layout, root, units
        self._stays = layout.strategy == "grad_op" or layout.keeps_gathered
        self._ahead = layout.max_gathers_in_flight - 1
        self._in_flight: dict[int, int] = {}
        self._held = 0
        self._is_whole = False
        self._recomputed: set[int] = set()

    def begin(self, *, is_first: bool) -> None:
        """Gathers the root, unless everything has stayed gathered since the last micro-batch."""
        self._is_whole = self._layout.keeps_gathered and not is_first
        self._in_flight.clear()
        self._held = 0
        if not self._is_whole:
            self._held = self._start(self._root)
            self._bill.change(GATHERED, self._root.gathered)

    def enter_forward(self, number: int) -> None:
        """Makes a unit whole before its forward, and starts the gathers of the next ones."""
        if self._is_whole:
            return
        self._request(number)
        # The result of a gather is freed when the next one is copied out.
        self._bill.change(COMMUNICATION, -self._held)
        self._bill.change(GATHERED, self._units[number].gathered)
        self._held = self._in_flight.pop(number)
        for later in range(number + 1, min(number + 1 + self._ahead, len(self._units))):
            self._request(later)

    def leave_forward(self, number: int) -> None:
        """Frees a unit after its forward, unless it stays until its backward."""
        if not self._stays:
            self._bill.change(GATHERED, -self._units[number].gathered)

    def enter_backward(self, number: int) -> None:
        """Makes a unit whole before its backward, and starts the gathers of those before it."""
        if not self._stays:
            if number in self._recomputed:
                self._recomputed.discard(number)
            else:
                self._gather(number)
            for earlier in range(number - 1, max(-1, number - 1 - self._ahead), -1):
                if earlier not in self._recomputed:
                    self._request(earlier)
        self._bill.change(COMMUNICATION, -self._held)
        self._held = 0

    def enter_recomputation(self, number: int) -> None:
        """Makes a unit whole before its second forward; it stays whole until its backward."""
        if not self._stays:
            self._gather(number)
            self._recomputed.add(number)

    def leave_backward(self, unit: Unit, *, is_last: bool) -> None:
        """Frees a unit after its backward."""
        if is_last or not self._layout.keeps_gathered:
            self._bill.change(GATHERED, -unit.gathered)

    def _gather(self, number: int) -> None:
        self._request(number)
        self._bill.change(GATHERED, self._units[number].gathered)
        self._bill.change(COMMUNICATION, -self._in_flight.pop(number))

    def _request(self, number: int) -> None:
        if number not in self._in_flight:
            self._in_flight[number] = self._start(self._units[number])

    def _start(self, unit: Unit) -> int:
        """Allocates the result of a gather and returns its bytes; one rank alone has none."""
        self._bill.change(COMMUNICATION, unit.results)
        self._bill.see(Counter({COMMUNICATION: unit.copies + (unit.from_host or 0)}))
        return unit.results
