"""How much of a text must wait, because it may be the beginning of a sign that is looked for."""

from collections.abc import Sequence


def count_held(text: str, stop: Sequence[str]) -> int:
    """Returns the number of characters at the end of `text` that may be the beginning of one of the texts of `stop`.

    >>> count_held("one tw", ["two", "w"])
    2
    """
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next(
        (length for length in range(longest, 0, -1) if any(other.startswith(text[-length:]) for other in stop)), 0
    )
