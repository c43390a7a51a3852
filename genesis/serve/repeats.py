"""Counts log lines that repeat, so that nobody can fill the log."""

import logging
import time
from typing import Final

_REPEAT_SECONDS: Final = 60.0


class RepeatFilter(logging.Filter):
    """Lets the first of equal log lines pass, and counts those of the next minute; the next line has their number.

    Lines are equal if they come from the same statement and have the same kind of exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int, object], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is logged."""
        key = (record.pathname, record.lineno, record.exc_info[0] if record.exc_info else None)
        since_seconds, num_left_out = self._seen.get(key, (-_REPEAT_SECONDS, 0))
        now = time.monotonic()
        if now - since_seconds < _REPEAT_SECONDS:
            self._seen[key] = since_seconds, num_left_out + 1
            return False
        self._seen[key] = now, 0
        if num_left_out:
            record.msg, record.args = f"{record.getMessage()} ({num_left_out:,} more since the last such line)", ()
        return True
