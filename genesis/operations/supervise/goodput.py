"""Where the wall time of a supervised run went."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from genesis.operations.supervise.plain import number

Part = Literal["trained", "start", "restore", "repeated", "saves", "waiting", "down"]


@dataclass(frozen=True)
class Goodput:
    """The wall time of a supervised run by what it was used for, in seconds.

    Args:
        trained: Steps that no checkpoint or earlier attempt had reached, without their saves.
        start: From a launch to the restore: processes, imports, building the model, the meeting of the ranks.
        restore: From there to the first batch.
        repeated: Steps that an earlier attempt had already trained.
        saves: Time that training waited for saves.
        waiting: Waits for a resource: a port, memory, disk space, processes of the attempt before.
        down: Other time without ranks: from an end to the next launch, and the time that nobody supervised.
    """

    trained: float = 0.0
    start: float = 0.0
    restore: float = 0.0
    repeated: float = 0.0
    saves: float = 0.0
    waiting: float = 0.0
    down: float = 0.0

    @property
    def total(self) -> float:
        """All wall time."""
        return float(sum(asdict(self).values()))

    @property
    def share(self) -> float:
        """The share of wall time that trained new tokens, from 0 to 1; 0 for a run without any time."""
        return self.trained / self.total if self.total > 0 else 0.0

    def add(self, other: "Goodput") -> "Goodput":
        """Returns the sums of both."""
        return Goodput(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Goodput)))

    @classmethod
    def decode(cls, content: Mapping[str, Any]) -> "Goodput":
        """Returns what `asdict` made.

        Raises:
            ValueError: A part is not a finite number.
        """
        return cls(**{field.name: number(content.get(field.name, 0.0)) for field in fields(cls)})


class GoodputMeter:
    """Adds up wall time by part; at each moment one part is running.

    Args:
        before: What earlier supervisors of the run have measured.
        now_seconds: The moment from which it measures, by the monotonic clock.
        part: The part that runs first.
    """

    def __init__(self, before: Goodput, now_seconds: float, part: Part = "down") -> None:
        self._sums, self._since_seconds, self._part = before, now_seconds, part

    def enter(self, part: Part, at_seconds: float) -> None:
        """Lets another part run from a moment on, which may lie in the past but not before the last change."""
        if part != self._part:
            at_seconds = max(at_seconds, self._since_seconds)
            self._sums = self.read(at_seconds)
            self._part, self._since_seconds = part, at_seconds

    def move(self, seconds: float, source: Part, target: Part) -> None:
        """Counts time of one part as that of another; at most what the part has."""
        seconds = min(seconds, getattr(self._sums, source))
        moved = {source: getattr(self._sums, source) - seconds, target: getattr(self._sums, target) + seconds}
        self._sums = replace(self._sums, **moved)

    def read(self, now_seconds: float) -> Goodput:
        """Returns the sums up to a moment."""
        seconds = max(0.0, now_seconds - self._since_seconds)
        return replace(self._sums, **{self._part: getattr(self._sums, self._part) + seconds})


def describe_goodput(goodput: Goodput) -> str:
    """Returns a line with the share of new training, and the shares of the other parts, largest first.

    Example:
        >>> describe_goodput(Goodput(trained=90.0, start=6.0, down=4.0))
        'goodput 90.0% of 1 min 40 s trained new tokens; start 6.0%, down 4.0%'
    """
    total = goodput.total
    if total <= 0:
        return "goodput: no time was measured"
    others = sorted(((name, value) for name, value in asdict(goodput).items() if name != "trained"), key=_by_size)
    rest = ", ".join(f"{name} {value / total:.1%}" for name, value in others if value > 0)
    return f"goodput {goodput.share:.1%} of {format_seconds(total)} trained new tokens" + (f"; {rest}" if rest else "")


def _by_size(part: tuple[str, float]) -> float:
    return -part[1]


def format_seconds(seconds: float) -> str:
    """Returns a duration for people.

    Example:
        >>> format_seconds(4.25), format_seconds(100.0), format_seconds(7320.0)
        ('4.2 s', '1 min 40 s', '2 h 02 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
